"""`olmo-ext data corpus`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from olmo_ext.base.errors import InputError


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The corpus folder.")
@click.option(
    "--tokenizer",
    default="bpe:4096",
    show_default=True,
    metavar="bpe:N|dolma2|FILE",
    help="A BPE trained on the text, OLMo-2's tokenizer, or a tokenizer.json.",
)
@click.option(
    "--validation-fraction", default="2%", show_default=True, help="Share of the text set aside, whole files."
)
@click.option("--max-bytes", help="Embedded corpus only: at most this much text, as in 20MB.")
@click.option("--text-field", default="text", show_default=True, help="The field of a record that holds the text.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def corpus(
    paths: tuple[Path, ...],
    output: Path,
    tokenizer: str,
    validation_fraction: str,
    max_bytes: str | None,
    text_field: str,
    as_json: bool,
) -> None:
    """Make token files from text: train, validation, tokenizer, manifest.

    PATHS are .txt, .md, .jsonl (.gz, .zst), .parquet, .arrow, .csv and .json files or folders of them. Without PATHS,
    the text is what every machine has: the sources and docs of Python, torch and transformers. A second call with
    the same text and settings changes nothing. Use it in a config as `data: {corpus: DIR}`.
    """
    from olmo_ext.base.quantities import parse_bytes, parse_fraction
    from olmo_ext.data.corpus import build_corpus
    from olmo_ext.data.corpus_sources import EmbeddedSource, FileSource, TextSource

    try:
        fraction = parse_fraction(validation_fraction)
    except ValueError as error:
        raise InputError(str(error), where="--validation-fraction", right="as in 2%") from None
    try:
        limit = None if max_bytes is None else parse_bytes(max_bytes)
    except ValueError as error:
        raise InputError(str(error), where="--max-bytes", right="as in 20MB") from None
    if limit is not None and limit <= 0:
        raise InputError(f"{max_bytes!r} is no room for text", where="--max-bytes")
    if paths and limit is not None:
        raise InputError("--max-bytes goes with the embedded corpus", right="name fewer files")
    source: TextSource = FileSource(paths, text_field=text_field) if paths else EmbeddedSource(max_bytes=limit)
    manifest, written = build_corpus(
        source,
        output,
        tokenizer=tokenizer,
        validation_fraction=fraction,
        say=lambda message: click.echo(message, err=True),
    )
    if as_json:
        click.echo(json.dumps({**manifest.content, "written": written}, indent=1))
        return
    click.echo(f"{output}: {'made' if written else 'is made already'}, fingerprint {manifest.fingerprint[:16]}")
    for name, split in manifest.splits.items():
        click.echo(
            f"  {name:<10} {split.documents:>8,} documents {split.bytes:>14,} bytes {split.tokens:>13,} tokens"
            f"  {split.bytes / max(split.tokens, 1):.2f} bytes a token"
        )
    click.echo(f"  {manifest.dtype}, vocabulary {manifest.vocab_size:,}, EOS {manifest.eos_token_id}")
    for reason, count in manifest.content["left_out"].items():
        click.echo(f"  left out: {count:,} files or documents, {reason}")
