"""Reading wandb's offline files (`run-ID.wandb`) and cutting off a record that a kill has torn.

The framing is LevelDB's log format: after 7 bytes of identification, blocks of 32 KiB that hold records, each with a
header of 7 bytes (crc32 of type and data, length, type); a record that does not fit a block is continued in the next.
The content of a record is a protobuf message whose schema the installed wandb brings along. The format is private to
wandb, so a run's curves never depend on it: they come from metrics.jsonl, and only the system metrics from here.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically

BLOCK = 32768
IDENT = struct.Struct("<4sHB")
IDENT_MAGIC = (b":W&B", 0xBEE1)
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass(kw_only=True)
class Scan:
    """The whole records at the start of an offline file."""

    records: list[bytes]
    good_bytes: int
    """Where the last whole record ends; what follows is torn or damaged."""

    total_bytes: int

    @property
    def torn_bytes(self) -> int:
        return self.total_bytes - self.good_bytes


def scan(path: Path) -> Scan:
    """Read every record up to the first that is not whole.

    :raises InputError: when the file is no wandb file at all. A file shorter than its identification, left by a kill
        right after the start, has no records.
    """
    data = path.read_bytes()
    if len(data) < IDENT.size:
        return Scan(records=[], good_bytes=0, total_bytes=len(data))
    ident, magic, _version = IDENT.unpack_from(data)
    if (ident, magic) != IDENT_MAGIC:
        raise InputError("not an offline file of wandb", where=str(path), right="run-<id>.wandb")
    records: list[bytes] = []
    parts: list[bytes] = []
    position = good = IDENT.size
    while True:
        room = BLOCK - position % BLOCK
        if room < HEADER.size:
            position += room  # The rest of a block that takes no header is padding.
            if not parts and position <= len(data):
                good = position
            continue
        if position + HEADER.size > len(data):
            break
        checksum, length, kind = HEADER.unpack_from(data, position)
        end = position + HEADER.size + length
        content = data[position + HEADER.size : end]
        whole = end <= len(data) and length <= room - HEADER.size and kind in (FULL, FIRST, MIDDLE, LAST)
        if not whole or zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
            break
        if (kind in (FULL, FIRST)) == bool(parts):
            break  # A new record inside an unfinished one, or a continuation of none.
        position = end
        parts.append(content)
        if kind in (FULL, LAST):
            records.append(b"".join(parts))
            parts, good = [], position
    return Scan(records=records, good_bytes=good, total_bytes=len(data))


def repaired_path(path: Path) -> Path:
    """Where `repair` puts the copy. Its name does not end in .wandb, so `wandb sync` on the folder sees one file."""
    return path.with_name(path.name + ".repaired")


def repair(path: Path) -> Path | None:
    """Write a copy without the torn end beside the file, whose own bytes stay; None when nothing is torn."""
    scanned = scan(path)
    if not scanned.torn_bytes:
        return None
    copy = repaired_path(path)
    write_atomically(copy, path.read_bytes()[: scanned.good_bytes])
    return copy


def settle(path: Path) -> None:
    """After the upload: put the repaired copy in the place of the torn file, so that wandb's own tools read it."""
    copy = repaired_path(path)
    if copy.exists():
        os.replace(copy, path)


@dataclass(kw_only=True)
class Segment:
    """One offline (or interrupted online) file of a run: what one attempt has written."""

    path: Path
    offline: bool
    run_id: str | None
    """None when the kill came before the first record was flushed."""

    records: int
    torn_bytes: int
    first_step: int | None = None
    last_step: int | None = None
    rows: int = 0
    stats: list[bytes] = field(default_factory=list)
    """Serialised `StatsRecord`s (GPU, CPU and memory use), each with its own time."""

    finished: bool = False

    @property
    def name(self) -> str:
        return self.path.parent.name


def find_files(wandb_folder: Path) -> list[Path]:
    """The run files under `wandb/`, in order of time; the symlink `latest-run`, which would double one, is left out."""
    folders = [
        folder
        for pattern in ("offline-run-*", "run-*")
        for folder in wandb_folder.glob(pattern)
        if folder.is_dir() and not folder.is_symlink()
    ]
    # offline-run-20260101_120000-ID and run-20260101_120000-ID: the time is what both have in common.
    folders.sort(key=lambda folder: (folder.name.removeprefix("offline-"), folder.stat().st_mtime))
    return [path for folder in folders for path in sorted(folder.glob("run-*.wandb"))]


def read_segment(path: Path) -> Segment:
    """What a file holds, up to its torn end."""
    from wandb.proto import wandb_internal_pb2

    scanned = scan(path)
    segment = Segment(
        path=path,
        offline=path.parent.name.startswith("offline-"),
        run_id=None,
        records=len(scanned.records),
        torn_bytes=scanned.torn_bytes,
    )
    for data in scanned.records:
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run" and record.run.run_id:
            segment.run_id = record.run.run_id
        elif kind == "history":
            step = record.history.step.num
            for item in record.history.item:
                if item.key == "_step":
                    step = json.loads(item.value_json)
            segment.first_step = step if segment.first_step is None else segment.first_step
            segment.last_step = step
            segment.rows += 1
        elif kind == "stats":
            segment.stats.append(record.stats.SerializeToString())
        elif kind == "exit":
            segment.finished = True
    return segment
