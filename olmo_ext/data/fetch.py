"""Copying the first instances of an order from a source into a subset. No torch.

    plan.json            what is being fetched; another source, order or cut in the same folder is refused
    shard-K.bin.part     a shard on its way, only ever appended to in whole windows
    shard-K.progress     instances of it that are on the disk; written after them
    shard-K.json         a finished shard: count and sha256
    subset.json          written last, by whoever finishes the last shard

A kill at any moment costs the windows that were not finished. Processes (`part i of n`) share nothing but the plan:
each takes every n-th shard. Extending keeps finished shards, copies a partly filled last one aside and appends to it,
so that the shorter subset stays usable meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import file_aside, write_atomically
from olmo_ext.base.locks import locked
from olmo_ext.base.quantities import format_bytes
from olmo_ext.data.byte_ranges import plan_requests
from olmo_ext.data.fetch_window import WindowReader
from olmo_ext.data.indices import NAMED_BY
from olmo_ext.data.order import first_of_order
from olmo_ext.data.progress_bar import Progress
from olmo_ext.data.shards import ShardFiles
from olmo_ext.data.stores import Stores
from olmo_ext.data.subset import INDEX_NAME, MANIFEST_NAME, SOURCE_NAME, SubsetManifest
from olmo_ext.data.survey import SourceManifest

PLAN_NAME = "plan.json"
LOCK_NAME = ".lock"
"""Held in the short stretches that several parts share. Without locks, the atomic renames still hold."""

SHARD_BYTES = 2**30
WINDOWS_AT_ONCE = 3
"""Windows in memory: one being written, one or two being read."""


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How to fetch; none of it changes what is fetched."""

    concurrency: int = 256
    """Requests in flight."""

    memory: int = 384 * 2**20
    """Bytes of all windows that are in memory together."""

    part: int = 1
    parts: int = 1
    """This process takes the shards part-1, part-1+parts, ..."""

    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class FetchReport:
    """What one call has done."""

    instances: int
    """Instances of the subset."""

    fetched: int
    """Instances that this call has transferred."""

    kept_bytes: int
    received_bytes: int
    """Bytes of all responses' bodies, retries and gaps included."""

    requests: int
    retried: int
    complete: bool
    """Whether the subset is ready; not while other parts are at work."""


def default_shard_instances(instance_bytes: int) -> int:
    """Instances in a shard of about 1 GiB."""
    return max(SHARD_BYTES // instance_bytes, 1)


class SubsetFetch:
    """One folder being filled.

    :param manifest: the surveyed source.
    :param instances: how many of the order's first instances the subset shall hold.
    :param shard_instances: of every shard but the last; None for what the folder was begun with, else about 1 GiB.
    """

    def __init__(
        self,
        directory: Path,
        manifest: SourceManifest,
        *,
        instances: int,
        seed: int,
        epoch: int = 0,
        locations: dict[str, str] | None = None,
        shard_instances: int | None = None,
        options: FetchOptions | None = None,
        stores: Stores | None = None,
    ) -> None:
        self.directory, self.manifest = Path(directory), manifest
        self.instances, self.seed, self.epoch = instances, seed, epoch
        self.options = options or FetchOptions()
        self.stores = stores or Stores()
        self.order_name: str | None = None
        self._given_index: np.ndarray | None = None
        self.instance_bytes = manifest.instance_bytes
        self.shards = ShardFiles(
            self.directory,
            instances=instances,
            shard_instances=shard_instances or self._planned_shards() or default_shard_instances(self.instance_bytes),
            instance_bytes=self.instance_bytes,
        )
        self.ends = manifest.ends
        self.files = manifest.remote(locations)
        first_of_path: dict[str, int] = {}
        self.first_entries = [first_of_path.setdefault(file.path, k) for k, file in enumerate(manifest.files)]
        if manifest.dtype != "uint32":
            raise InputError(f"a subset holds uint32, the source {manifest.name!r} {manifest.dtype}")
        if not 1 <= instances <= manifest.instances:
            raise InputError(
                f"{instances:,} instances of {manifest.instances:,} in the source {manifest.name!r}",
                right=f"1 to {manifest.instances:,} ({manifest.instances * manifest.sequence_length:,} tokens)",
            )
        if not 1 <= self.options.part <= self.options.parts:
            raise InputError(f"part {self.options.part}/{self.options.parts}", right="1/n to n/n")

    def use_index(self, values: np.ndarray) -> None:
        """Take a given order in place of the official one.

        Where its beginning is the official order's it is called that; else the hash of its beginning names it.
        """
        beginning = values[: min(NAMED_BY, len(values))]
        self._given_index = values
        if not self._is_official(beginning):
            self.order_name = f"index {hashlib.sha256(beginning.tobytes()).hexdigest()[:16]}"

    def _is_official(self, beginning: np.ndarray) -> bool:
        total = self.manifest.instances
        count = min(len(beginning), total)
        official = first_of_order(total, count, seed=self.seed, epoch=self.epoch)
        return bool(np.array_equal(official, beginning[:count]))

    # -- what is fetched ------------------------------------------------------------------------------------------

    def _planned_shards(self) -> int | None:
        """Instances of a shard of the folder that is here already."""
        path = self.directory / PLAN_NAME
        return json.loads(path.read_text())["shard_instances"] if path.exists() else None

    def _plan(self) -> dict[str, Any]:
        return {
            "source": self.manifest.fingerprint,
            "seed": self.seed,
            "epoch": self.epoch,
            "order": self.order_name,
            "shard_instances": self.shards.shard_instances,
            "instance_filter": self.shards.filter.to_json(),
            "instances": self.instances,
        }

    def prepare(self) -> None:
        """Check the folder against what is asked for; make source.json, plan.json and index.npy."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory / LOCK_NAME):
            path, plan = self.directory / PLAN_NAME, self._plan()
            begun = path.exists()
            if begun:
                before = json.loads(path.read_text())
                for key, value in plan.items():
                    if key != "instances" and before[key] != value:
                        raise InputError(
                            f"holds a subset of another {key} ({before[key]}, asked for: {value})",
                            where=str(self.directory),
                            right="another folder",
                        )
                if before["instances"] > self.instances:
                    raise InputError(
                        f"holds, or is getting, {before['instances']:,} instances, more than {self.instances:,}",
                        where=str(self.directory),
                        right="ask for as many (a subset may grow), or another folder",
                    )
            elif any(self.directory.glob("shard-*")):
                raise InputError("holds shards without a plan", where=str(self.directory), right="an empty folder")
            # Without a plan, source and index may be another one's: of a call that was killed before its plan.
            if not begun or not (self.directory / SOURCE_NAME).exists():
                write_atomically(self.directory / SOURCE_NAME, self.manifest.dump())
            self._prepare_index(keep=begun)
            write_atomically(path, json.dumps(plan, indent=1) + "\n")

    def _prepare_index(self, *, keep: bool) -> None:
        """Make index.npy, or make it longer.

        :raises InputError: if a longer one would not begin with the one that shards were fetched by.
        """
        path = self.directory / INDEX_NAME
        there = np.zeros(0, dtype=np.uint32)
        if keep:
            with contextlib.suppress(OSError, ValueError):  # gone or cut: made again
                there = np.load(path, mmap_mode="r")
        if self._given_index is not None:
            values = np.asarray(self._given_index)
        elif len(there) >= self.instances:
            return
        else:
            total = self.manifest.instances
            with Progress("order", 1.0, show=lambda share: f"{share:.0%}", quiet=self.options.quiet) as progress:
                values = first_of_order(total, self.instances, seed=self.seed, epoch=self.epoch, progress=progress.to)
        both = min(len(there), len(values))
        if not np.array_equal(there[:both], values[:both]):
            at = int(np.argmax(there[:both] != values[:both]))
            raise InputError(
                f"place {at} is instance {there[at]}, in the order asked for {values[at]}",
                where=str(path),
                right="the order that the folder was begun with, or another folder",
            )
        if len(there) >= self.instances:
            return
        values = values[: self.instances]
        with file_aside(path) as file:
            np.save(file, values.astype(np.uint32))

    # -- fetching -------------------------------------------------------------------------------------------------

    def run(self) -> FetchReport:
        """Fetch this part's shards; write the subset's manifest if they were the last.

        :raises WorkError: one clear error; what was finished stays and the next call goes on from there.
        """
        self.prepare()
        self.index = np.load(self.directory / INDEX_NAME, mmap_mode="r")
        mine = [k for k in range(self.shards.number) if k % self.options.parts == self.options.part - 1]
        states = {k: self.shards.resume(k) for k in mine}
        todo = sum(self.shards.size(k) - done for k, done in states.items())
        if todo:
            asyncio.run(self._fetch(states))
        complete = self._finish()
        return FetchReport(
            instances=self.instances,
            fetched=todo,
            kept_bytes=todo * self.instance_bytes,
            received_bytes=self.stores.received_bytes,
            requests=self.stores.requests,
            retried=self.stores.retried,
            complete=complete,
        )

    def _windows(self, states: dict[int, int]) -> Iterator[tuple[int, int, int]]:
        """(shard, first row, end row) of everything to be fetched, in order."""
        rows = max(self.options.memory // WINDOWS_AT_ONCE // self.instance_bytes, 1)
        for shard, done in states.items():
            for first in range(done, self.shards.size(shard), rows):
                yield shard, first, min(first + rows, self.shards.size(shard))

    async def _fetch(self, states: dict[int, int]) -> None:
        """Read windows ahead of the one being written; requests of several windows share the connections."""
        reader = WindowReader(
            self.stores,
            self.files,
            concurrency=self.options.concurrency,
            instance_bytes=self.instance_bytes,
            vocabulary_size=self.manifest.vocabulary_size,
        )
        windows = self._windows(states)
        total = sum(self.shards.size(shard) for shard in states) * self.instance_bytes
        already = sum(states.values()) * self.instance_bytes
        pending: list[tuple[tuple[int, int, int], asyncio.Task[np.ndarray]]] = []
        with Progress("fetch", total, show=format_bytes, quiet=self.options.quiet, begin_at=already) as progress:

            def start_next() -> None:
                window = next(windows, None)
                if window is not None:
                    pending.append((window, asyncio.create_task(self._read_window(window, reader, progress))))

            try:
                for _ in range(WINDOWS_AT_ONCE - 1):
                    start_next()
                digest: tuple[int, Any] | None = None
                while pending:
                    window, task = pending.pop(0)
                    content = await task
                    start_next()
                    digest = await asyncio.to_thread(self.shards.append, window, content, digest)
            finally:
                for _, task in pending:
                    task.cancel()
                await asyncio.gather(*(task for _, task in pending), return_exceptions=True)

    async def _read_window(self, window: tuple[int, int, int], reader: WindowReader, progress: Progress) -> np.ndarray:
        shard, first, end = window
        begin = shard * self.shards.shard_instances
        requests = plan_requests(
            np.asarray(self.index[begin + first : begin + end]),
            ends=self.ends,
            first_entries=self.first_entries,
            instance_bytes=self.instance_bytes,
        )
        return await reader.read(requests, num_rows=end - first, progress=progress.add)

    def _finish(self) -> bool:
        """Write `subset.json` if every shard is there."""
        with locked(self.directory / LOCK_NAME):
            shards = [self.shards.finished(k) for k in range(self.shards.number)]
            complete = [
                shard for k, shard in enumerate(shards) if shard is not None and shard.instances == self.shards.size(k)
            ]
            if len(complete) < self.shards.number:
                return False
            manifest = SubsetManifest(
                source_name=self.manifest.name,
                source_fingerprint=self.manifest.fingerprint,
                source_instances=self.manifest.instances,
                order_seed=self.seed,
                order_epoch=self.epoch,
                order_name=self.order_name,
                instances=self.instances,
                sequence_length=self.manifest.sequence_length,
                vocabulary_size=self.manifest.vocabulary_size,
                tokenizer=self.manifest.tokenizer,
                shard_instances=self.shards.shard_instances,
                instance_filter=self.shards.filter.to_json(),
                index_sha256=hashlib.sha256(np.asarray(self.index[: self.instances]).tobytes()).hexdigest(),
                shards=complete,
            )
            write_atomically(self.directory / MANIFEST_NAME, manifest.dump())
            for leftover in self.directory.glob(".*.aside"):  # of processes that were killed inside a write
                leftover.unlink(missing_ok=True)
        return True
