"""`olmo-ext export` and `olmo-ext import`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click


def _say(result: Any, as_json: bool, text: str) -> None:
    content = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(result).items()}
    click.echo(json.dumps(content) if as_json else text)


@click.command()
@click.argument("run", type=click.Path(file_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The new folder.")
@click.option("--step", type=click.IntRange(min=0), help="Which checkpoint; the newest by default.")
@click.option("--tokenizer", help="A tokenizer.json, a folder or `dolma2`; the run's own by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(run: Path, output: Path, step: int | None, tokenizer: str | None, as_json: bool) -> None:
    """Write a verified Hugging Face model folder of RUN.

    A plain OLMo-2 shape becomes transformers' own Olmo2ForCausalLM; any other brings its code and is loaded with
    trust_remote_code=True (its tokenizer needs none: PreTrainedTokenizerFast). The folder, with a card that names the
    checkpoint, appears when logits, cached decoding, saving and reloading have been compared with the OLMo model; a
    mismatch names the layer and leaves nothing.
    """
    from olmo_ext.base.run_directory import RunDirectory
    from olmo_ext.base.sections import plain_section
    from olmo_ext.data.tokenizer import load_tokenizer
    from olmo_ext.export.card import loading_lines, origin_of
    from olmo_ext.export.folder import export_model
    from olmo_ext.training.checkpoint import CheckpointStore
    from olmo_ext.training.load_model import load_model_from_run

    store = CheckpointStore(RunDirectory(run).checkpoints, report=lambda line: click.echo(line, err=True))
    newest = store.newest_complete() if step is None else store.folder(step)
    model, config = load_model_from_run(run, step=None if newest is None else int(newest.name.removeprefix("step")))
    section = config.model
    ends = {"eos_token_id": section.eos_token_id, "pad_token_id": section.pad_token_id}
    text = load_tokenizer(tokenizer or config.tokenizer.identifier, **ends)
    assert newest is not None  # load_model_from_run refuses a run without one
    origin = origin_of(newest, str(config.run_name))
    result = export_model(
        model, model=plain_section(section), shape=config.shape, tokenizer=text, target=output, origin=origin
    )
    _say(
        result,
        as_json,
        f"{output}: {result.architecture}, {result.parameters:,} parameters, "
        f"verified on {result.verified_tokens} tokens (logits within {result.largest_difference:.0e} of their scale)\n"
        + "\n".join(loading_lines(output, own_code=result.architecture.startswith("OlmoExt"))),
    )


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The new run directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_(source: Path, output: Path, as_json: bool) -> None:
    """Make a run directory of SOURCE: an exported folder, a released OLMo-2 one, or an unsharded OLMo checkpoint.

    It can be evaluated, diagnosed, exported and generated from like a run that was trained here.
    """
    from olmo_ext.export.importer import import_model

    result = import_model(source, output, say=lambda text: click.echo(f"note: {text}", err=True))
    checked = "verified against the Hugging Face model" if result.verified else "every tensor in its place"
    _say(result, as_json, f"{output}: {result.kind}, {result.parameters:,} parameters, {checked}")
