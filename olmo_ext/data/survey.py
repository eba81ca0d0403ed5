"""Sizes of a source's files, as a manifest from which order and instances follow. No torch."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import append_line, write_atomically
from olmo_ext.data.progress_bar import Progress
from olmo_ext.data.sources import Source, mapped
from olmo_ext.data.stores import MissingFile, RemoteFile, Stores
from olmo_ext.data.subset import fingerprint_of

FORMAT = "olmo-ext source 1"


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One distinct file."""

    path: str
    """As published; where it lies is the map's business."""

    bytes: int
    etag: str | None = None
    modified: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceManifest:
    """A surveyed source."""

    name: str
    dtype: str
    sequence_length: int
    vocabulary_size: int | None
    tokenizer: str | None
    surveyed: str
    locations: dict[str, str]
    """The map at the time of the survey: an ETag belongs to a place."""

    files: list[SourceFile] = field(repr=False)
    """One entry for every entry of the list, in order; doubled files are there twice."""

    @property
    def instance_bytes(self) -> int:
        """Bytes of one instance in a file."""
        return self.sequence_length * np.dtype(self.dtype).itemsize

    @property
    def ends(self) -> np.ndarray:
        """Number of instances up to and with each entry."""
        return np.cumsum([file.bytes // self.instance_bytes for file in self.files], dtype=np.int64)

    @property
    def instances(self) -> int:
        """Instances of all entries; the rest of a file that fills none is left out."""
        return sum(file.bytes // self.instance_bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Of names, sizes, order and cut; the folder that all paths share does not count, a copy is the same."""
        shared = len(os.path.commonprefix([file.path for file in self.files]).rpartition("/")[0])
        entries = [[file.path[shared:], file.bytes] for file in self.files]
        return fingerprint_of([self.dtype, self.sequence_length, entries])

    def remote(self, locations: Mapping[str, str] | None = None) -> list[RemoteFile]:
        """Where every entry is read from now; ETags are kept for files that lie where they were surveyed."""
        here = {**self.locations, **(locations or {})}
        by_path = {}
        for file in self.files:
            place = mapped(file.path, here)
            surveyed_there = place == mapped(file.path, self.locations)
            etag = file.etag if surveyed_there else None
            by_path[file.path] = RemoteFile(location=place, num_bytes=file.bytes, etag=etag)
        return [by_path[file.path] for file in self.files]

    def locate(self, instance: int) -> tuple[int, int]:
        """Number of the entry and byte offset of an instance."""
        ends = self.ends
        entry = int(np.searchsorted(ends, instance, side="right"))
        return entry, (instance - (int(ends[entry - 1]) if entry else 0)) * self.instance_bytes

    def dump(self) -> str:
        """JSON, one file a line."""
        head = {"format": FORMAT, "fingerprint": self.fingerprint, "instances": self.instances, **asdict(self)}
        del head["files"]
        lines = ",\n".join(
            "  " + json.dumps({**asdict(file), "instances": file.bytes // self.instance_bytes}) for file in self.files
        )
        return json.dumps(head, indent=1)[:-2] + ',\n "files": [\n' + lines + "\n ]\n}\n"

    @classmethod
    def parse(cls, text: str, *, where: str) -> SourceManifest:
        """:raises InputError: if it is another file, or was edited."""
        try:
            content = json.loads(text)
            version, stated = content.pop("format"), content.pop("fingerprint")
            if version != FORMAT:
                raise InputError(f"format {version!r}", where=where, right=repr(FORMAT))
            del content["instances"]
            names = SourceFile.__dataclass_fields__
            files = [SourceFile(**{k: v for k, v in file.items() if k in names}) for file in content.pop("files")]
            manifest = cls(files=files, **content)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"no manifest of a source ({error})", where=where) from None
        if manifest.fingerprint != stated:
            raise InputError("the fingerprint does not belong to the files", where=where, right="survey again")
        return manifest

    @classmethod
    def read(cls, path: Path | str) -> SourceManifest:
        """:raises InputError: if it cannot be read, or as in `parse`."""
        try:
            return cls.parse(Path(path).read_text(), where=str(path))
        except OSError as error:
            raise InputError(
                f"cannot be read ({error.strerror})", where=str(path), right="`olmo-ext data survey` makes it"
            ) from None
        except UnicodeDecodeError as error:
            raise InputError(f"no manifest of a source ({error})", where=str(path)) from None


def survey(
    source: Source,
    *,
    journal: Path | None = None,
    concurrency: int = 64,
    stores: Stores | None = None,
    quiet: bool = False,
) -> SourceManifest:
    """Ask for every distinct file's size, many at once.

    :param journal: answers are kept here as they come; a second call asks for the rest only. Removing it is the
        caller's business.
    :raises WorkError: naming the files that are missing or did not answer.
    """
    stores = stores or Stores()
    known = _read_journal(journal, source)
    distinct = [path for path in dict.fromkeys(source.paths) if path not in known]
    problems: list[str] = []

    async def ask(path: str, gate: asyncio.Semaphore, progress: Progress) -> None:
        async with gate:
            try:
                meta = await stores.head(source.location(path))
            except MissingFile:
                problems.append(f"missing: {source.location(path)}")
                return
            except WorkError as error:
                problems.append(str(error))
                return
        modified = meta["last_modified"].isoformat() if meta.get("last_modified") else None
        known[path] = SourceFile(path=path, bytes=meta["size"], etag=meta.get("e_tag"), modified=modified)
        if journal is not None:
            append_line(journal, json.dumps({"location": source.location(path), **asdict(known[path])}))
        progress.add(1)

    async def ask_all() -> None:
        gate = asyncio.Semaphore(concurrency)
        total = len(distinct) + len(known)
        with Progress("survey", total, show=lambda n: f"{n:.0f} files", quiet=quiet, begin_at=len(known)) as progress:
            await asyncio.gather(*(ask(path, gate, progress) for path in distinct))

    if distinct:
        asyncio.run(ask_all())
    if problems:
        # Where most fail, they fail alike: five long addresses would hide the reason.
        few = 5 if len(problems) <= 5 else 2
        shown = "; ".join(sorted(problems)[:few])
        more = f"; and {len(problems) - few} more" if len(problems) > few else ""
        raise WorkError(f"{len(problems)} of {len(set(source.paths))} files did not answer: {shown}{more}")
    return SourceManifest(
        name=source.name,
        dtype=source.dtype,
        sequence_length=source.sequence_length,
        vocabulary_size=source.vocabulary_size,
        tokenizer=source.tokenizer,
        surveyed=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        locations=dict(source.locations),
        files=[known[path] for path in source.paths],
    )


def _read_journal(journal: Path | None, source: Source) -> dict[str, SourceFile]:
    if journal is None or not journal.exists():
        return {}
    wanted, known = set(source.paths), {}
    for line in journal.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill: asked for again
        if entry["path"] in wanted and entry.pop("location") == source.location(entry["path"]):
            known[entry["path"]] = SourceFile(**entry)
    return known


def differences(before: SourceManifest, after: SourceManifest) -> list[str]:
    """What has changed between two surveys of a source, one sentence each."""
    old, new = {file.path: file for file in before.files}, {file.path: file for file in after.files}
    changes = [f"gone from the list: {path}" for path in old if path not in new]
    changes += [f"new in the list: {path}" for path in new if path not in old]
    for path in old.keys() & new.keys():
        ours, theirs = old[path], new[path]
        if ours.bytes != theirs.bytes:
            changes.append(f"changed: {path} had {ours.bytes} bytes, has {theirs.bytes}")
        elif ours.etag and theirs.etag and ours.etag != theirs.etag and before.locations == after.locations:
            changes.append(f"changed: {path} has another ETag ({theirs.etag}, was {ours.etag})")
    for name in ("dtype", "sequence_length", "vocabulary_size", "tokenizer"):
        if getattr(before, name) != getattr(after, name):
            changes.append(f"changed: {name} was {getattr(before, name)}, is {getattr(after, name)}")
    if not changes and [file.path for file in before.files] != [file.path for file in after.files]:
        changes.append("the same files in another order")
    return sorted(changes)


def survey_to(
    source: Source, output: Path, *, replace: bool = False, concurrency: int = 64, stores: Stores | None = None
) -> SourceManifest:
    """Survey into a file; an earlier survey there is compared, never overwritten unasked.

    :raises WorkError: naming what has changed since the earlier survey, unless `replace`.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    journal = output.with_name(output.name + ".partial")
    manifest = survey(source, journal=journal, concurrency=concurrency, stores=stores)
    if output.exists() and not replace:
        changed = differences(SourceManifest.read(output), manifest)
        if changed:
            journal.unlink(missing_ok=True)
            more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise WorkError(f"{output}: {'; '.join(changed[:5])}{more}; --replace accepts it")
    write_atomically(output, manifest.dump())
    journal.unlink(missing_ok=True)
    return manifest
