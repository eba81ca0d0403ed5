"""Which instances each step of an attempt trained on (`save_data_indices`)."""

from __future__ import annotations

import gzip
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO


class SampleLog:
    """One rank's file, `step <tab> instance <tab> ...` a line; without a file nothing is kept.

    :param stack: closes the file.
    :param wanted: whether there is to be one.
    """

    def __init__(self, logs: Path, stack: ExitStack, *, attempt: int, rank: int, wanted: bool) -> None:
        self._attempt = attempt
        self._file: TextIO | None = None
        if wanted:
            path = logs / f"attempt{attempt}-rank{rank}.samples.tsv.gz"
            self._file = stack.enter_context(gzip.open(path, "wt", compresslevel=1))

    def record(self, step: int, indices: list[int]) -> None:
        if self._file is not None:
            self._file.write(f"{step}\t" + "\t".join(map(str, indices)) + "\n")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    @property
    def pattern(self) -> str | None:
        """The files of all ranks, from the run's folder."""
        return f"logs/attempt{self._attempt}-rank*.samples.tsv.gz" if self._file is not None else None
