"""What a training step saw: source file, offset and text of its instances. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.data.subset import SOURCE_NAME, Subset
from olmo_ext.data.survey import SourceManifest


@dataclass(frozen=True, kw_only=True)
class SeenInstance:
    """One instance of a step."""

    place: int
    """Number in the subset, 0 for the first."""

    source_instance: int
    path: str
    """As published."""

    offset: int
    """Byte offset in that file."""

    kept_by_filter: bool
    tokens: np.ndarray


def instances_of_step(directory: Path, *, step: int, batch_size: int, limit: int | None = None) -> list[SeenInstance]:
    """The instances of a step, 1 being the first, as OLMo counts its steps.

    :param batch_size: instances in a global batch.
    :raises InputError: for a step outside the subset.
    """
    subset = Subset(directory)
    steps = len(subset) // batch_size
    if not 1 <= step <= steps:
        right = f"1 to {steps}: {len(subset):,} instances by {batch_size}" if steps else "a smaller --batch-size"
        what = f"step {step}" if steps else f"{len(subset):,} instances are less than one step of {batch_size}"
        raise InputError(what, where=str(directory), right=right)
    source = SourceManifest.read(subset.directory / SOURCE_NAME)
    reader, mask, index = subset.reader(), subset.mask(), subset.index()
    begin = (step - 1) * batch_size
    seen = []
    for place in range(begin, begin + min(batch_size, limit or batch_size)):
        entry, offset = source.locate(int(index[place]))
        seen.append(
            SeenInstance(
                place=place,
                source_instance=int(index[place]),
                path=source.files[entry].path,
                offset=offset,
                kept_by_filter=bool(mask[place]),
                tokens=reader.read(place),
            )
        )
    reader.close()
    return seen
