"""`olmo-ext data`: survey, order, fetch, verify, inspect, corpus."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from olmo_ext.base.errors import EXIT_FAILED, InputError, WorkError
from olmo_ext.base.quantities import format_bytes, parse_bytes, parse_count
from olmo_ext.config.schema import DEFAULT_ORDER_SEED
from olmo_ext.data.corpus_command import corpus

if TYPE_CHECKING:
    from olmo_ext.data.sources import Source
    from olmo_ext.data.survey import SourceManifest

DEFAULT_SOURCE = "olmo2-1b-stage1"
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
MAP_HELP = "Read paths that begin with FROM at TO instead; may be given several times."


@click.group()
def data() -> None:
    """Corpus, official order, subsets."""


data.add_command(corpus)


def _count(value: str, *, option: str) -> int:
    try:
        count = parse_count(value)
    except ValueError as error:
        raise InputError(str(error), where=option, right="a whole number, as in 2.5B") from None
    if count < 1:
        raise InputError(f"{value!r}", where=option, right="at least 1")
    return count


def _source(name: str, maps: tuple[str, ...]) -> Source:
    from olmo_ext.data.sources import load_source, parse_map

    return load_source(name, locations=parse_map(maps))


def _manifest(path: Path) -> SourceManifest:
    from olmo_ext.data.survey import SourceManifest

    return SourceManifest.read(path)


def _check_source(source: Source, manifest: SourceManifest, *, where: Path) -> None:
    """A survey that is there already must be of the source that was named."""
    theirs = ([file.path for file in manifest.files], manifest.dtype, manifest.sequence_length)
    if (source.paths, source.dtype, source.sequence_length) != theirs:
        raise InputError(
            f"is of another source ({manifest.name!r}, {len(manifest.files):,} files) than {source.name!r}",
            where=str(where),
            right="name that source, another folder, or a new survey",
        )


def _instances(tokens: str | None, instances: str | None, sequence_length: int) -> int:
    """Whole instances that hold at least the tokens asked for."""
    if (tokens is None) == (instances is None):
        raise InputError("how much?", right="give --tokens or --instances")
    if instances is not None:
        return _count(instances, option="--instances")
    assert tokens is not None
    return -(-_count(tokens, option="--tokens") // sequence_length)


@data.command()
@click.argument("source", default=DEFAULT_SOURCE)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: SOURCE.manifest.json.")
@click.option("--map", "maps", multiple=True, metavar="FROM=TO", help=MAP_HELP)
@click.option("--replace", is_flag=True, help="Accept files that have changed since the survey that is there.")
@click.option("--concurrency", type=AT_LEAST_1, default=64, show_default=True, help="Requests in flight.")
@click.option("--list", "list_only", is_flag=True, help="Print where every file is read from, and ask nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def survey(
    source: str,
    output: Path | None,
    maps: tuple[str, ...],
    replace: bool,
    concurrency: int,
    list_only: bool,
    as_json: bool,
) -> None:
    """Sizes of all files of SOURCE (a name, a YAML, a list of paths), into a manifest.

    Can be stopped and called again. Where a manifest is there already, what has changed since is named, and the old
    one stays.
    """
    from olmo_ext.data.survey import survey_to

    token_source = _source(source, maps)
    if list_only:
        for path in token_source.paths:
            click.echo(token_source.location(path))
        return
    output = output or Path(f"{token_source.name}.manifest.json")
    manifest = survey_to(token_source, output, replace=replace, concurrency=concurrency)
    total = sum(file.bytes for file in manifest.files)
    summary = {
        "manifest": str(output),
        "files": len(manifest.files),
        "bytes": total,
        "instances": manifest.instances,
        "tokens": manifest.instances * manifest.sequence_length,
        "fingerprint": manifest.fingerprint,
    }
    empty = [file.path for file in manifest.files if file.bytes < manifest.instance_bytes]
    if as_json:
        click.echo(json.dumps({**summary, "without_instances": empty}))
        return
    click.echo(
        f"{output}: {summary['files']} files, {format_bytes(total)}, {summary['instances']:,} instances,"
        f" {summary['tokens']:,} tokens, fingerprint {manifest.fingerprint[:16]}"
    )
    for path in empty:
        click.echo(f"note: {path} is shorter than one instance")


@data.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--tokens", help="As in 2.5B; rounded up to whole instances.")
@click.option("--instances", help="Instead of --tokens.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="An .npy file.")
@click.option("--seed", type=AT_LEAST_0, default=DEFAULT_ORDER_SEED, show_default=True)
@click.option(
    "--epoch", type=AT_LEAST_0, default=0, show_default=True, help="Epochs count from 0; seed + epoch is what matters."
)
@click.option(
    "--method",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "numpy", "sparse", "sparse-numpy"]),
    help="numpy shuffles everything (4 bytes an instance); sparse needs the extra `order`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def order(
    manifest: Path,
    tokens: str | None,
    instances: str | None,
    output: Path,
    seed: int,
    epoch: int,
    method: str,
    as_json: bool,
) -> None:
    """The first instances of the official order of MANIFEST, as an index file (uint32, .npy).

    OUTPUT.json beside it says what it is. An index of another order that is there already stays.
    """
    import io

    import numpy as np

    from olmo_ext.base.files import write_atomically
    from olmo_ext.data.order import first_of_order
    from olmo_ext.data.progress_bar import Progress
    from olmo_ext.data.subset import sequence_fingerprint

    source = _manifest(manifest)
    count = _instances(tokens, instances, source.sequence_length)
    fingerprint = sequence_fingerprint(
        source=source.fingerprint, seed=seed, epoch=epoch, sequence_length=source.sequence_length
    )
    described = output.with_name(output.name + ".json")
    if output.exists() and (not described.exists() or fingerprint not in described.read_text(errors="replace")):
        raise InputError("holds something else than this order", where=str(output), right="another name for --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    with Progress("order", 1.0, show=lambda share: f"{share:.0%}") as progress:
        values = first_of_order(source.instances, count, seed=seed, epoch=epoch, method=method, progress=progress.to)
        progress.to(1.0)
    summary = {
        "index": str(output),
        "fingerprint": fingerprint,
        "source": source.fingerprint,
        "seed": seed,
        "epoch": epoch,
        "of_instances": source.instances,
        "instances": count,
        "tokens": count * source.sequence_length,
        "first": values[:5].tolist(),
    }
    # First what it is: after a kill in between, the same command goes on.
    write_atomically(described, json.dumps(summary, indent=1) + "\n")
    buffer = io.BytesIO()
    np.save(buffer, values)
    write_atomically(output, buffer.getvalue())
    if as_json:
        click.echo(json.dumps(summary))
    else:
        click.echo(
            f"{output}: the first {count:,} of {source.instances:,} instances ({summary['tokens']:,} tokens),"
            f" seed {seed} epoch {epoch}, fingerprint {fingerprint[:16]}; first {' '.join(map(str, values[:5]))}"
        )


@data.command()
@click.argument("source", default=DEFAULT_SOURCE)
@click.option("--tokens", help="As in 2.5B; rounded up to whole instances.")
@click.option("--instances", help="Instead of --tokens.")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="The subset.")
@click.option("--manifest", type=click.Path(path_type=Path, dir_okay=False), help="A survey, instead of making one.")
@click.option("--map", "maps", multiple=True, metavar="FROM=TO", help=MAP_HELP)
@click.option("--seed", type=AT_LEAST_0, default=DEFAULT_ORDER_SEED, show_default=True, help="Of the order.")
@click.option("--epoch", type=AT_LEAST_0, default=0, show_default=True)
@click.option("--indices", metavar="PATH|URL", help="A published global_indices.npy, instead of making the order.")
@click.option("--part", default="1/1", show_default=True, metavar="I/N", help="Fetch every N-th shard, from the I-th.")
@click.option("--concurrency", type=AT_LEAST_1, default=256, show_default=True, help="Requests in flight.")
@click.option("--memory", default="384MiB", show_default=True, help="For the windows in memory, 3 at a time.")
@click.option("--retries", type=AT_LEAST_1, default=8, show_default=True, help="How often a request is tried again.")
@click.option(
    "--request-seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
    help="Until a request counts as failed.",
)  # fmt: skip
@click.option("--shard-instances", type=AT_LEAST_1, help="Default: what the folder has, else about 1 GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fetch(
    source: str,
    tokens: str | None,
    instances: str | None,
    output: Path,
    manifest: Path | None,
    maps: tuple[str, ...],
    seed: int,
    epoch: int,
    indices: str | None,
    part: str,
    concurrency: int,
    memory: str,
    retries: int,
    request_seconds: float,
    shard_instances: int | None,
    as_json: bool,
) -> None:
    """Copy the first instances of SOURCE's official order, and nothing else, into a folder to train on.

    Stopped or killed, the same command goes on where it was. With more --tokens it extends the folder; the shorter
    subset is the beginning of the longer. Instances are merged into one request where they touch, and across small
    gaps as long as all gaps stay within 5 % of the bytes kept. With --part, run I/N for every I, at once or one by
    one: the last to finish writes subset.json. Private s3 and gs buckets take credentials from the environment,
    private http servers from ~/.netrc; AWS_SKIP_SIGNATURE=true reads public buckets.
    """
    from olmo_ext.base.locks import locked
    from olmo_ext.data.fetch import LOCK_NAME, FetchOptions, SubsetFetch
    from olmo_ext.data.indices import read_indices
    from olmo_ext.data.sources import parse_map
    from olmo_ext.data.stores import Stores
    from olmo_ext.data.subset import SOURCE_NAME
    from olmo_ext.data.survey import survey_to

    number, slash, parts = part.partition("/")
    if not slash or not number.isdecimal() or not parts.isdecimal() or not 1 <= int(number) <= int(parts):
        raise InputError(f"--part {part!r}", right="I/N, as in 3/10")
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise InputError(str(error), where="--memory", right="as in 384MiB") from None
    if memory_bytes < 1:
        raise InputError(f"{memory!r}", where="--memory", right="as in 384MiB")
    # Before anything is surveyed: the wrong number must not cost the minutes.
    _instances(tokens, instances, 1)
    stores = Stores(retries=retries, request_seconds=request_seconds)
    kept = output / SOURCE_NAME
    if manifest is not None:
        surveyed = _manifest(manifest)
    else:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output / LOCK_NAME):
            surveyed = _manifest(kept) if kept.exists() else survey_to(_source(source, maps), kept, stores=stores)
    if click.get_current_context().get_parameter_source("source") is not ParameterSource.DEFAULT:
        _check_source(_source(source, maps), surveyed, where=manifest or kept)
    job = SubsetFetch(
        output,
        surveyed,
        instances=_instances(tokens, instances, surveyed.sequence_length),
        seed=seed,
        epoch=epoch,
        locations=parse_map(maps),
        shard_instances=shard_instances,
        options=FetchOptions(concurrency=concurrency, memory=memory_bytes, part=int(number), parts=int(parts)),
        stores=stores,
    )
    if indices is not None:
        job.use_index(read_indices(indices, count=job.instances, total=surveyed.instances, stores=stores))
    report = job.run()
    if as_json:
        click.echo(json.dumps({"subset": str(output), **dataclasses.asdict(report)}))
        return
    length = surveyed.sequence_length
    click.echo(
        f"{output}: {report.instances:,} instances, {report.instances * length:,} tokens;"
        f" fetched {report.fetched:,} now ({format_bytes(report.received_bytes)} received,"
        f" {report.requests:,} requests, {report.retried} retried)"
    )
    if not report.complete:
        click.echo(f"part {part} is done; subset.json appears when the other parts are")


@data.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--sample", type=AT_LEAST_0, default=64, show_default=True, help="Random instances to read from the source again."
)
@click.option("--sample-seed", type=AT_LEAST_0, default=0, show_default=True)
@click.option("--map", "maps", multiple=True, metavar="FROM=TO", help=MAP_HELP)
@click.option("--upstream/--no-upstream", default=None, help="Run OLMo's data set over the source, if it is local.")
@click.option("--checksums", is_flag=True, help="Read whole local source files for the MD5 that their server stated.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def verify(
    directory: Path,
    sample: int,
    sample_seed: int,
    maps: tuple[str, ...],
    upstream: bool | None,
    checksums: bool,
    as_json: bool,
) -> None:
    """Prove a subset: hashes, order, filter, a sample of the source, OLMo's own data set. Exit code 1 if one fails."""
    from olmo_ext.data.sources import parse_map
    from olmo_ext.data.verify import SubsetVerification

    checks = SubsetVerification(directory, locations=parse_map(maps)).run(
        sample=sample, seed=sample_seed, upstream=upstream, checksums=checksums
    )
    if as_json:
        click.echo(json.dumps({"subset": str(directory), "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        words: dict[Any, str] = {True: "ok", False: "FAILED", None: "skipped"}
        for check in checks:
            click.echo(f"{check.name:9s} {words[check.passed]:8s} {check.detail}")
    if any(check.passed is False for check in checks):
        if as_json:
            sys.exit(EXIT_FAILED)
        failed = next(check for check in checks if check.passed is False)
        raise WorkError(f"{directory}: {failed.name}: {failed.detail}")


@data.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--step", type=AT_LEAST_1, required=True, help="The training step, 1 for the first.")
@click.option(
    "--batch-size", type=AT_LEAST_1, default=512, show_default=True, help="global_train_batch_size of the run."
)
@click.option(
    "--limit", type=AT_LEAST_0, default=8, show_default=True, help="Instances to show, 0 for all of the step."
)
@click.option("--characters", type=AT_LEAST_1, default=240, show_default=True, help="Text to show of each.")
@click.option("--tokenizer", help="Default: the source's own.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object an instance, with all its token ids.")
def inspect(
    directory: Path, step: int, batch_size: int, limit: int, characters: int, tokenizer: str | None, as_json: bool
) -> None:
    """What a training step saw: file, offset and text of its instances."""
    from olmo_ext.data.inspect import instances_of_step
    from olmo_ext.data.subset import Subset
    from olmo_ext.data.tokenizer import load_tokenizer

    seen = instances_of_step(directory, step=step, batch_size=batch_size, limit=limit or None)
    name = tokenizer or Subset(directory).manifest.tokenizer
    reader = load_tokenizer(name) if name else None
    for one in seen:
        text = reader.decode(one.tokens.tolist()) if reader else None
        if as_json:
            content = {**dataclasses.asdict(one), "tokens": one.tokens.tolist(), "text": text}
            click.echo(json.dumps(content, ensure_ascii=False))
            continue
        mark = "" if one.kept_by_filter else "  (masked by the instance filter)"
        click.echo(f"instance {one.place:,} = source {one.source_instance:,}{mark}")
        click.echo(f"  {one.path}, offset {one.offset:,}")
        shown = repr(text[:characters]) if text is not None else " ".join(map(str, one.tokens[:32].tolist()))
        click.echo(f"  {shown}")
    if not as_json and len(seen) < batch_size:
        click.echo(f"({len(seen)} of {batch_size} instances; --limit 0 shows all)")
