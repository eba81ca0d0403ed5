"""A subset: the first instances of an order, copied into shards in that order. No torch.

    subset.json       what it is: source, order, range, shards with their sha256, filter, fingerprint
    source.json       the manifest of the source it was taken from
    index.npy         the instances' numbers in the source, uint32, in order
    shard-00000.bin   token ids, uint32, no header; all shards but the last hold `shard_instances`
    shard-00000.mask  one byte an instance: 1 if OLMo's instance filter keeps it

A longer subset of the same source and order starts with the shorter one, byte for byte, and has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.data.repetition import RepetitionFilter
from olmo_ext.data.tokens import TokenReader

FORMAT = "olmo-ext subset 1"
MANIFEST_NAME = "subset.json"
SOURCE_NAME = "source.json"
INDEX_NAME = "index.npy"


def fingerprint_of(content: Any) -> str:
    """sha256 of a JSON value in its one canonical spelling."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of_beginning(path: Path, num_bytes: int) -> Any:
    """The running sha256 of the first bytes of a file, or of all of it where it is shorter.

    :return: an object of hashlib, which may be updated further.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while num_bytes > 0 and (block := file.read(min(num_bytes, 1 << 20))):
            digest.update(block)
            num_bytes -= len(block)
    return digest


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a subset."""

    file: str
    instances: int
    sha256: str
    """Of the first `instances` instances: a shard being extended may already be longer."""

    mask_sha256: str
    kept: int
    """Instances that the filter keeps."""

    @property
    def mask_file(self) -> str:
        """Name of the file of the filter's decisions, one byte an instance."""
        return f"{Path(self.file).stem}.mask"


@dataclass(frozen=True, kw_only=True)
class SubsetManifest:
    """What `subset.json` holds."""

    source_name: str
    source_fingerprint: str
    source_instances: int
    order_seed: int
    order_epoch: int
    order_name: str | None
    """Set if the order was given as an index: hash of its beginning."""

    instances: int
    sequence_length: int
    vocabulary_size: int | None
    tokenizer: str | None
    shard_instances: int
    instance_filter: dict[str, int]
    index_sha256: str
    shards: list[Shard] = field(default_factory=list)
    dtype: str = "uint32"

    @property
    def fingerprint(self) -> str:
        """Identity of the sequence that this is the beginning of; the same for every length and place."""
        return sequence_fingerprint(
            source=self.source_fingerprint,
            seed=self.order_seed,
            epoch=self.order_epoch,
            order_name=self.order_name,
            sequence_length=self.sequence_length,
        )

    def dump(self) -> str:
        """The text of subset.json."""
        content = {"format": FORMAT, "fingerprint": self.fingerprint, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str, *, where: str) -> SubsetManifest:
        """:raises InputError: if it is another file or a manifest that was edited."""
        try:
            content = json.loads(text)
            version, stated = content.pop("format"), content.pop("fingerprint")
            if version != FORMAT:
                raise InputError(f"format {version!r}", where=where, right=repr(FORMAT))
            shards = [Shard(**shard) for shard in content.pop("shards")]
            manifest = cls(shards=shards, **content)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"no manifest of a subset ({error})", where=where) from None
        if manifest.fingerprint != stated:
            raise InputError("the fingerprint does not belong to the rest", where=where, right="fetch the subset again")
        if sum(shard.instances for shard in manifest.shards) != manifest.instances:
            raise InputError("the shards do not add up to the instances", where=where, right="fetch the subset again")
        return manifest


def sequence_fingerprint(
    *, source: str, seed: int, epoch: int, order_name: str | None = None, sequence_length: int
) -> str:
    """Identity of a subset of any length: source, order, cut into instances."""
    order = seed + epoch if order_name is None else order_name
    return fingerprint_of({"source": source, "order": order, "sequence_length": sequence_length})


class Subset:
    """A subset on the disk, checked for completeness when opened (names and sizes; `data verify` reads everything)."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        path = self.directory / MANIFEST_NAME
        try:
            text = path.read_text(errors="replace")
        except OSError:
            partly = any(self.directory.glob("shard-*")) if self.directory.is_dir() else False
            raise InputError(
                "the subset is not complete" if partly else f"no {MANIFEST_NAME}: not a subset",
                where=str(self.directory),
                right="run `olmo-ext data fetch` again, it continues" if partly else "`olmo-ext data fetch` makes one",
            ) from None
        self.manifest = SubsetManifest.parse(text, where=str(path))
        for shard in self.manifest.shards:
            self._check_size(shard.file, shard.instances * self.instance_bytes)
            self._check_size(shard.mask_file, shard.instances)

    @property
    def instance_bytes(self) -> int:
        """Bytes of one instance in a shard."""
        return self.manifest.sequence_length * np.dtype(self.manifest.dtype).itemsize

    def __len__(self) -> int:
        return self.manifest.instances

    def _check_size(self, name: str, needed: int) -> None:
        path = self.directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise InputError(
                f"shard cannot be read ({error.strerror})", where=str(path), right="run `olmo-ext data fetch` again"
            ) from None
        if size < needed:
            raise InputError(
                f"{size} bytes of {needed}: the shard was cut", where=str(path), right="remove it and fetch again"
            )

    def reader(self, vocabulary_size: int | None = None) -> TokenReader:
        """Random access in the subset's order; `vocabulary_size` may be that of a model."""
        shards = self.manifest.shards
        return TokenReader(
            [str(self.directory / shard.file) for shard in shards],
            [shard.instances for shard in shards],
            dtype=np.dtype(self.manifest.dtype),
            sequence_length=self.manifest.sequence_length,
            vocabulary_size=vocabulary_size or self.manifest.vocabulary_size,
        )

    def mask(self) -> np.ndarray:
        """Whether the instance filter keeps each instance, shape (instances,), bool."""
        parts = [
            np.fromfile(self.directory / shard.mask_file, dtype=np.uint8, count=shard.instances)
            for shard in self.manifest.shards
        ]
        return np.concatenate(parts).astype(bool) if parts else np.zeros(0, dtype=bool)

    def filter(self) -> RepetitionFilter:
        """The settings that the stored mask was made with."""
        return RepetitionFilter(**self.manifest.instance_filter)

    def index(self) -> np.ndarray:
        """Numbers of the instances in the source, shape (instances,), uint32, in order.

        :raises InputError: if index.npy is missing or cut.
        """
        path, right = self.directory / INDEX_NAME, "the same `olmo-ext data fetch` makes it again"
        try:
            values = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read ({error})", where=str(path), right=right) from None
        if len(values) < len(self):
            raise InputError(f"{len(values):,} numbers for {len(self):,} instances", where=str(path), right=right)
        return values[: len(self)]
