"""Files of token ids as instances: what OLMo's memory-mapped data set reads, with every file checked first. No torch.

The official rule: a file holds `bytes // (itemsize * sequence_length)` instances, in list order, no instance crosses
files and the rest of a file is left out.
"""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olmo_ext.base.errors import InputError, WorkError

SAMPLE_BLOCK = 4096
"""Bytes of one sample; a multiple of every item size, so that samples are whole tokens."""

NUM_SAMPLES = 16
MAX_OPEN_FILES = 256
DTYPES = ("uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of a list, as found on the disk."""

    path: str
    num_bytes: int
    num_instances: int
    sample: str
    """Hash of blocks spread over the file: the same content has the same hash wherever the file lies."""


def sample_offsets(num_bytes: int, blocks: int = NUM_SAMPLES) -> list[int]:
    """Starts of the blocks that are sampled: the first, the last, the others evenly between, on whole blocks."""
    last = max(num_bytes - SAMPLE_BLOCK, 0) // SAMPLE_BLOCK
    return sorted({round(last * k / max(blocks - 1, 1)) * SAMPLE_BLOCK for k in range(blocks)} | {last * SAMPLE_BLOCK})


def read_exactly(descriptor: int, num_bytes: int, offset: int, path: str) -> bytes:
    """Read at an offset, never short.

    :raises WorkError: naming the file and the offset.
    """
    try:
        content = os.pread(descriptor, num_bytes, offset)
        while 0 < len(content) < num_bytes:
            more = os.pread(descriptor, num_bytes - len(content), offset + len(content))
            if not more:
                break
            content += more
    except OSError as error:
        raise WorkError(f"{path}, offset {offset}: cannot be read ({error.strerror or error})") from None
    if len(content) != num_bytes:
        raise WorkError(f"{path}, offset {offset}: the file ends after {len(content)} of {num_bytes} bytes")
    return content


def check_dtype(dtype: str, vocabulary_size: int | None, *, where: str | None = None) -> np.dtype:
    """The token type, if the vocabulary fits into it.

    :raises InputError: for another type, or ids that it cannot hold.
    """
    if dtype not in DTYPES:
        raise InputError(f"token type {dtype!r}", where=where, right=f"one of {', '.join(DTYPES)}")
    kind = np.dtype(dtype)
    largest = np.iinfo(kind).max
    if vocabulary_size is not None and vocabulary_size - 1 > largest:
        right = next(name for name in DTYPES if vocabulary_size - 1 <= np.iinfo(name).max)
        raise InputError(
            f"{dtype} holds ids up to {largest:,}, the vocabulary has {vocabulary_size:,}", where=where, right=right
        )
    return kind


def _check_sample(block: bytes, offset: int, path: str, dtype: np.dtype, vocabulary_size: int | None) -> None:
    tokens = np.frombuffer(block[: len(block) // dtype.itemsize * dtype.itemsize], dtype=dtype)
    if vocabulary_size is not None and len(tokens) and int(tokens.max()) >= vocabulary_size:
        at = int(np.argmax(tokens >= vocabulary_size))
        raise InputError(
            f"id {int(tokens[at])} read as {dtype} is beyond the vocabulary of {vocabulary_size:,}",
            where=f"{path}, offset {offset + at * dtype.itemsize}",
            right="check data.memmap_dtype and the tokenizer of this file",
        )


def _looks_wider(blocks: Sequence[bytes], dtype: np.dtype) -> bool:
    """Whether every second value is zero in every sample: what a file of twice the width looks like."""
    values = [
        np.frombuffer(block[: len(block) // (2 * dtype.itemsize) * 2 * dtype.itemsize], dtype) for block in blocks
    ]
    joined = np.concatenate(values)
    return len(joined) >= 64 and not joined[1::2].any() and bool(joined[::2].any())


def inspect_file(path: str, *, dtype: np.dtype, sequence_length: int, vocabulary_size: int | None) -> TokenFile:
    """Size, instances and sample of one file, after the checks that upstream does not make.

    :raises InputError: missing, empty, too short, an `np.save` header, another width, ids beyond the vocabulary.
    """
    if "://" in path:
        raise InputError(
            "training reads local files only", where=path, right="`olmo-ext data fetch` copies it; then set data.subset"
        )
    try:
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            offsets = sample_offsets(num_bytes)
            blocks = [os.pread(file.fileno(), SAMPLE_BLOCK, offset) for offset in offsets]
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", where=path) from None
    if blocks[0].startswith(b"\x93NUMPY"):
        raise InputError(
            "has the header of np.save, which would be read as tokens",
            where=path,
            right=f"raw {dtype} values as array.tofile writes them",
        )
    tokens = num_bytes // dtype.itemsize
    if tokens < sequence_length:
        raise InputError(
            f"{tokens} tokens of {dtype}, an instance needs {sequence_length}",
            where=path,
            right="leave the file out or lower model.max_sequence_length",
        )
    if num_bytes % dtype.itemsize:
        raise InputError(
            f"{num_bytes} bytes are not a whole number of {dtype} values",
            where=path,
            right="a complete file, or another data.memmap_dtype",
        )
    for block, offset in zip(blocks, offsets, strict=True):
        _check_sample(block, offset, path, dtype, vocabulary_size)
    if dtype.itemsize == 2 and _looks_wider(blocks, dtype):
        raise InputError(
            f"every second {dtype} value is 0: these are tokens of uint{16 * dtype.itemsize}",
            where=path,
            right=f"data.memmap_dtype: uint{16 * dtype.itemsize}",
        )
    digest = hashlib.sha256(num_bytes.to_bytes(8, "little") + b"".join(blocks)).hexdigest()[:16]
    instances = num_bytes // (dtype.itemsize * sequence_length)
    return TokenFile(path=path, num_bytes=num_bytes, num_instances=instances, sample=digest)


def inspect_files(
    paths: Sequence[str | Path], *, dtype: np.dtype, sequence_length: int, vocabulary_size: int | None
) -> list[TokenFile]:
    """`inspect_file` for a whole list, in parallel; a file that is listed twice is looked at once."""
    distinct = list(dict.fromkeys(str(path) for path in paths))

    def look(path: str) -> TokenFile:
        return inspect_file(path, dtype=dtype, sequence_length=sequence_length, vocabulary_size=vocabulary_size)

    with ThreadPoolExecutor(max_workers=16) as pool:
        by_path = dict(zip(distinct, pool.map(look, distinct), strict=True))
    return [by_path[str(path)] for path in paths]


class TokenReader:
    """Random access to the instances of a list of files.

    Reads with `pread`, not through a memory map: a file that is cut or deleted under a running training gives one
    error that names it, where a memory map gives SIGBUS or keeps silent.

    :param paths: files in order.
    :param num_instances: instances to use of each file.
    """

    def __init__(
        self,
        paths: Sequence[str],
        num_instances: Sequence[int],
        *,
        dtype: np.dtype,
        sequence_length: int,
        vocabulary_size: int | None,
    ) -> None:
        self.paths = list(paths)
        self.ends = np.cumsum(np.asarray(num_instances, dtype=np.int64))
        self.dtype = dtype
        self.sequence_length = sequence_length
        self.vocabulary_size = vocabulary_size
        self.instance_bytes = sequence_length * dtype.itemsize
        self._open: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._owner = os.getpid()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": collections.OrderedDict()}

    def locate(self, index: int) -> tuple[int, int]:
        """Number of the file and byte offset of an instance."""
        if not 0 <= index < len(self):
            raise IndexError(f"instance {index} of {len(self)}")
        file = int(np.searchsorted(self.ends, index, side="right"))
        start = int(self.ends[file - 1]) if file else 0
        return file, (index - start) * self.instance_bytes

    def _descriptor(self, file: int, offset: int) -> int:
        if self._owner != os.getpid():  # a fork shares descriptors with its parent: open our own
            self._open, self._owner = collections.OrderedDict(), os.getpid()
        descriptor = self._open.get(file)
        if descriptor is not None:
            if os.fstat(descriptor).st_nlink:
                self._open.move_to_end(file)
                return descriptor
            # Deleted, or replaced by a longer subset's shard: only a new open can tell.
            os.close(self._open.pop(file))
        try:
            descriptor = os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WorkError(f"{self.paths[file]}, offset {offset}: cannot be read ({error.strerror})") from None
        self._open[file] = descriptor
        if len(self._open) > MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def will_need(self, index: int) -> None:
        """Ask the kernel to read an instance ahead; costs nothing where it is cached."""
        if not hasattr(os, "posix_fadvise"):
            return
        file, offset = self.locate(index)
        os.posix_fadvise(self._descriptor(file, offset), offset, self.instance_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, index: int) -> np.ndarray:
        """The token ids of one instance, shape (sequence_length,), in the type of the file.

        :raises WorkError: naming file and offset if it cannot be read in full or holds ids beyond the vocabulary.
        """
        file, offset = self.locate(index)
        content = read_exactly(self._descriptor(file, offset), self.instance_bytes, offset, self.paths[file])
        tokens = np.frombuffer(content, dtype=self.dtype)
        if self.vocabulary_size is not None and tokens.max() >= self.vocabulary_size:
            at = int(np.argmax(tokens >= self.vocabulary_size))
            raise WorkError(
                f"{self.paths[file]}, offset {offset + at * self.dtype.itemsize}: id {tokens[at]} is beyond"
                f" the vocabulary of {self.vocabulary_size:,}"
            )
        return tokens

    def close(self) -> None:
        """Close every file that this process has opened."""
        if self._owner == os.getpid():
            for descriptor in self._open.values():
                os.close(descriptor)
        self._open.clear()
