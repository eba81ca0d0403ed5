"""Proving a subset: its files, its order, its bytes against the source, and the order against OLMo's own code."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import OlmoExtError
from olmo_ext.data.order import first_of_order
from olmo_ext.data.stores import RemoteFile, Stores
from olmo_ext.data.subset import SOURCE_NAME, Subset, sha256_of_beginning
from olmo_ext.data.survey import SourceFile, SourceManifest

UPSTREAM_INSTANCES = 20_000_000
"""Up to here OLMo's own data set is run without being asked: its shuffle takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool | None
    """None: not looked at, and `detail` says why."""

    detail: str


class SubsetVerification:
    """All checks of one subset.

    :param locations: where the source is read from, if not where it was surveyed.
    """

    def __init__(
        self, directory: Path, *, locations: Mapping[str, str] | None = None, stores: Stores | None = None
    ) -> None:
        self.subset = Subset(directory)
        self.source = SourceManifest.read(Path(directory) / SOURCE_NAME)
        self.files = self.source.remote(locations)
        self.stores = stores or Stores()

    def run(self, *, sample: int, seed: int = 0, upstream: bool | None = None, checksums: bool = False) -> list[Check]:
        """All checks; what cannot be read fails the check that needs it, not the others.

        :param sample: instances that are read from the source again; 0 to leave the source alone.
        :param checksums: whether to read whole source files for the MD5 that their server has stated.
        :param upstream: whether to run OLMo's data set; None where it is cheap and the source is on this machine.
        """
        steps: dict[str, Callable[[], Check]] = {
            "manifest": self.manifests,
            "shards": self.shards,
            "filter": self.masks,
            "order": self.order,
            "source": lambda: self.against_source(sample, seed),
            "upstream": lambda: self.against_upstream(sample, seed, upstream),
        }
        if checksums:
            steps["checksums"] = self.source_checksums
        return [self._result(name, step) for name, step in steps.items()]

    def _result(self, name: str, step: Callable[[], Check]) -> Check:
        try:
            return step()
        except OlmoExtError as error:
            return Check(name=name, passed=False, detail=str(error))
        except OSError as error:
            detail = f"{error.filename or self.subset.directory}: {error.strerror or error}"
            return Check(name=name, passed=False, detail=detail)

    def manifests(self) -> Check:
        """subset.json belongs to source.json."""
        manifest = self.subset.manifest
        same = manifest.source_fingerprint == self.source.fingerprint
        detail = f"fingerprint {manifest.fingerprint[:16]}, source {self.source.fingerprint[:16]}"
        return Check(
            name="manifest", passed=same, detail=detail if same else f"{detail}: source.json is of another source"
        )

    def shards(self) -> Check:
        """Every shard's sha256."""
        for shard in self.subset.manifest.shards:
            path = self.subset.directory / shard.file
            num_bytes = shard.instances * self.subset.instance_bytes
            if sha256_of_beginning(path, num_bytes).hexdigest() != shard.sha256:
                return Check(name="shards", passed=False, detail=f"{path}: other bytes than were fetched")
        count = len(self.subset.manifest.shards)
        return Check(name="shards", passed=True, detail=f"sha256 of {count} shards")

    def masks(self) -> Check:
        """The stored filter decisions: their sha256, and a sample decided again."""
        manifest = self.subset.manifest
        for shard in manifest.shards:
            path = self.subset.directory / shard.mask_file
            if sha256_of_beginning(path, shard.instances).hexdigest() != shard.mask_sha256:
                return Check(name="filter", passed=False, detail=f"{path}: other bytes than were written")
        reader, mask, decide = self.subset.reader(), self.subset.mask(), self.subset.filter()
        rows = np.unique(np.linspace(0, len(self.subset) - 1, 200).astype(int))
        wrong = [int(row) for row in rows if decide.keeps(reader.read(int(row))) != mask[row]]
        reader.close()
        if wrong:
            return Check(name="filter", passed=False, detail=f"instance {wrong[0]} is decided otherwise")
        return Check(name="filter", passed=True, detail=f"keeps {int(mask.sum()):,} of {len(mask):,} instances")

    def order(self) -> Check:
        """index.npy is the official order."""
        manifest, index = self.subset.manifest, np.asarray(self.subset.index())
        if hashlib.sha256(index.tobytes()).hexdigest() != manifest.index_sha256:
            return Check(name="order", passed=False, detail="index.npy: other bytes than were written")
        if manifest.order_name is not None:
            return Check(name="order", passed=None, detail="the order was given as an index; only its hash is checked")
        seed, epoch = manifest.order_seed, manifest.order_epoch
        right = first_of_order(self.source.instances, len(index), seed=seed, epoch=epoch)
        if not np.array_equal(index, right):
            at = int(np.argmax(index != right))
            return Check(name="order", passed=False, detail=f"place {at} is {index[at]}, officially {right[at]}")
        detail = f"the first {len(index):,} of {self.source.instances:,}, seed {seed} epoch {epoch}"
        return Check(name="order", passed=True, detail=detail)

    def _sampled(self, sample: int, seed: int) -> np.ndarray:
        count = min(sample, len(self.subset))
        return np.sort(np.random.default_rng(seed).choice(len(self.subset), count, replace=False))

    def against_source(self, sample: int, seed: int) -> Check:
        """A random sample read from the source again."""
        if sample < 1:
            return Check(name="source", passed=None, detail="not read (--sample 0)")
        rows, reader, index = self._sampled(sample, seed), self.subset.reader(), self.subset.index()

        async def differing() -> list[str]:
            gate = asyncio.Semaphore(32)

            async def look(row: int) -> str | None:
                entry, offset = self.source.locate(int(index[row]))
                file: RemoteFile = self.files[entry]
                async with gate:
                    content = await self.stores.read(file, offset, offset + self.source.instance_bytes)
                same = bytes(content) == reader.read(row).tobytes()
                return None if same else f"instance {row} differs from {file.location}, offset {offset}"

            return [problem for problem in await asyncio.gather(*(look(int(row)) for row in rows)) if problem]

        if wrong := asyncio.run(differing()):
            return Check(name="source", passed=False, detail=wrong[0])
        return Check(name="source", passed=True, detail=f"{len(rows)} random instances are the source's bytes")

    def source_checksums(self) -> Check:
        """Local copies of files whose ETag at the survey was an MD5 (single-part objects of S3, GCS, R2) have it."""
        looked_at = 0
        for file, here in {entry.path: (entry, place) for entry, place in self._entries()}.values():
            stated = (file.etag or "").strip('"')
            if not re.fullmatch(r"[0-9a-f]{32}", stated) or "://" in here.location:
                continue
            with open(here.location, "rb") as stream:
                digest = hashlib.md5(usedforsecurity=False)
                while block := stream.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != stated:
                return Check(
                    name="checksums", passed=False, detail=f"{here.location}: MD5 is not the server's {stated}"
                )
            looked_at += 1
        if not looked_at:
            return Check(name="checksums", passed=None, detail="no local file with an MD5 from a server")
        return Check(name="checksums", passed=True, detail=f"MD5 of {looked_at} files is the server's")

    def _entries(self) -> list[tuple[SourceFile, RemoteFile]]:
        return list(zip(self.source.files, self.files, strict=True))

    def against_upstream(self, sample: int, seed: int, wanted: bool | None) -> Check:
        """OLMo's `IterableDataset` over the same files gives the same sequence."""
        name, manifest = "upstream", self.subset.manifest
        if manifest.order_name is not None:
            return Check(name=name, passed=None, detail="the order was given as an index; OLMo has none to compare")
        remote = next((file.location for file in self.files if "://" in file.location), None)
        if remote is not None:
            return Check(name=name, passed=None, detail=f"the source is not on this machine ({remote})")
        if wanted is False or (wanted is None and self.source.instances > UPSTREAM_INSTANCES):
            size = 4 * self.source.instances / 2**30
            return Check(name=name, passed=None, detail=f"not run: its shuffle takes {size:.1f} GiB (--upstream)")
        from olmo.config import DataConfig
        from olmo.data import IterableDataset, MemMapDataset

        dtype: Any = DataConfig(memmap_dtype=self.source.dtype).effective_memmap_dtype
        paths = [file.location for file in self.files]
        dataset = MemMapDataset(*paths, chunk_size=self.source.sequence_length, memmap_dtype=dtype)
        sequence = IterableDataset(
            dataset,  # type: ignore[arg-type]
            1,
            seed=manifest.order_seed,
            epoch=manifest.order_epoch,
            world_size=1,
            rank=0,
            fs_local_rank=0,
        ).get_global_indices()[: len(self.subset)]
        if not np.array_equal(sequence, self.subset.index()):
            return Check(name=name, passed=False, detail="OLMo's data set has another order")
        reader = self.subset.reader()
        for row in self._sampled(max(sample, 1), seed):
            theirs = dataset[int(sequence[row])]["input_ids"].numpy()
            if not np.array_equal(theirs, reader.read(int(row))):
                return Check(name=name, passed=False, detail=f"instance {row} is another one in OLMo's data set")
        return Check(name=name, passed=True, detail=f"equals OLMo's own order of {len(dataset):,} instances")
