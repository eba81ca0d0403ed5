"""The files of a subset's shards while they are filled: appended to in whole windows, resumed, finished. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import WorkError
from olmo_ext.base.files import sha256_of_file, sync_directory, write_atomically
from olmo_ext.data.repetition import RepetitionFilter
from olmo_ext.data.subset import Shard, sha256_of_beginning


class ShardFiles:
    """The shards of a folder, finished and on their way.

    :param instances: of the whole subset.
    :param shard_instances: of every shard but perhaps the last.
    """

    def __init__(self, directory: Path, *, instances: int, shard_instances: int, instance_bytes: int) -> None:
        self.directory = directory
        self.instances, self.shard_instances, self.instance_bytes = instances, shard_instances, instance_bytes
        self.filter = RepetitionFilter()

    @property
    def number(self) -> int:
        """How many shards the whole subset has."""
        return -(-self.instances // self.shard_instances)

    def size(self, shard: int) -> int:
        """Instances that a shard shall hold."""
        return min(self.shard_instances, self.instances - shard * self.shard_instances)

    def _file(self, shard: int, ending: str) -> Path:
        return self.directory / f"shard-{shard:05d}.{ending}"

    def finished(self, shard: int) -> Shard | None:
        """A finished shard with its count, or nothing."""
        path = self._file(shard, "json")
        try:
            described = Shard(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        try:
            sizes = [self._file(shard, ending).stat().st_size for ending in ("bin", "mask")]
        except OSError:
            return None
        return (
            described
            if sizes[0] >= described.instances * self.instance_bytes and sizes[1] >= described.instances
            else None
        )

    def resume(self, shard: int) -> int:
        """Instances of a shard that need not be fetched, with its `.part` files made fit to append to."""
        finished = self.finished(shard)
        if finished is not None and finished.instances >= self.size(shard):
            self._file(shard, "progress").unlink(missing_ok=True)  # of a kill right after the shard was finished
            return self.size(shard)
        try:
            done = int(json.loads(self._file(shard, "progress").read_text())["instances"])
            if done == self.size(shard) and self._finish_interrupted(shard):
                return done
            sizes = [self._file(shard, f"{ending}.part").stat().st_size for ending in ("bin", "mask")]
            if sizes[0] < done * self.instance_bytes or sizes[1] < done:
                done = 0
        except (OSError, ValueError, KeyError, TypeError):
            done = 0
        if done == 0 and finished is not None and self._as_written(finished):
            done = finished.instances
            for ending in ("bin", "mask"):
                shutil.copyfile(self._file(shard, ending), self._file(shard, f"{ending}.part"))
        for ending, size in (("bin", self.instance_bytes), ("mask", 1)):
            with open(self._file(shard, f"{ending}.part"), "ab") as file:
                file.truncate(done * size)
                os.fsync(file.fileno())
        self._write_progress(shard, done)
        return done

    def _as_written(self, shard: Shard) -> bool:
        """Whether a finished shard still has its hashes: a damaged one must not get new ones by being extended."""
        return all(
            sha256_of_beginning(self.directory / name, shard.instances * size).hexdigest() == stated
            for name, size, stated in (
                (shard.file, self.instance_bytes, shard.sha256),
                (shard.mask_file, 1, shard.mask_sha256),
            )
        )

    def _finish_interrupted(self, shard: int) -> bool:
        """Finish a shard that a kill has left with all its bytes, renamed or not."""
        count = self.size(shard)
        paths = []
        for ending, size in (("bin", self.instance_bytes), ("mask", 1)):
            part, final = self._file(shard, f"{ending}.part"), self._file(shard, ending)
            path = part if part.exists() else final
            if not path.exists() or path.stat().st_size != count * size:
                return False
            paths.append(path)
        self._finish_shard(shard, sha256_of_file(paths[0]))
        return True

    def _write_progress(self, shard: int, done: int) -> None:
        write_atomically(self._file(shard, "progress"), json.dumps({"instances": done}))

    def append(self, window: tuple[int, int, int], content: np.ndarray, digest: tuple[int, Any] | None) -> Any:
        """Write a window behind its shard, then say so; finish the shard with its last window.

        :param digest: shard and running sha256 where the shard was begun by this call.
        """
        shard, first, end = window
        kept = self.filter.keeps_each(content.view(np.uint32)).astype(np.uint8)
        for ending, data in (("bin", content), ("mask", kept)):
            with open(self._file(shard, f"{ending}.part"), "ab") as file:
                if file.tell() != first * (self.instance_bytes if ending == "bin" else 1):
                    raise WorkError(f"{file.name}: another process is writing here; run every part once")
                file.write(data.reshape(-1).data)
                file.flush()
                os.fsync(file.fileno())
        self._write_progress(shard, end)
        running = digest[1] if digest is not None and digest[0] == shard else None
        if running is None:
            running = sha256_of_beginning(self._file(shard, "bin.part"), first * self.instance_bytes)
        running.update(content.reshape(-1).data)
        if end == self.size(shard):
            self._finish_shard(shard, running.hexdigest())
        return shard, running

    def _finish_shard(self, shard: int, sha256: str) -> None:
        part = self._file(shard, "mask.part")
        mask = (part if part.exists() else self._file(shard, "mask")).read_bytes()
        described = Shard(
            file=self._file(shard, "bin").name,
            instances=self.size(shard),
            sha256=sha256,
            mask_sha256=hashlib.sha256(mask).hexdigest(),
            kept=mask.count(1),
        )
        # A shard that replaces its shorter self begins with it: the old count and hash stay true in between.
        for ending in ("bin", "mask"):
            with contextlib.suppress(FileNotFoundError):  # renamed before a kill
                os.replace(self._file(shard, f"{ending}.part"), self._file(shard, ending))
        sync_directory(self.directory)
        write_atomically(self._file(shard, "json"), json.dumps(asdict(described)) + "\n")
        self._file(shard, "progress").unlink(missing_ok=True)
