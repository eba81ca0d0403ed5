"""Which byte ranges bring a window's instances: sorted per file, merged where that costs little. No torch.

The rule of merging: ranges that touch or overlap (a doubled file) become one. Of the other gaps between neighbours
in a file, those up to `MAX_GAP` are read along, smallest first, while all of them together stay within `WASTE` of the
window's bytes. So never more than 1.05 x the bytes kept are transferred, and where instances lie far apart nothing is
wasted. No merged request exceeds `MAX_REQUEST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_GAP = 256 * 2**10
WASTE = 0.05
MAX_REQUEST = 8 * 2**20


@dataclass(frozen=True)
class Request:
    """One range of one file, and the rows of the window that it fills."""

    entry: int
    """Number of the file in the source's list (the first of its entries, where it is listed twice)."""

    start: int
    end: int
    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where each row's bytes begin, counted from `start`."""


def plan_requests(
    instances: np.ndarray, *, ends: np.ndarray, first_entries: Sequence[int], instance_bytes: int
) -> list[Request]:
    """Requests for one window.

    :param instances: numbers in the source, in the order of the window's rows.
    :param ends: instances up to and with each entry of the source.
    :param first_entries: for each entry, the first entry with the same path.
    """
    entries = np.searchsorted(ends, instances, side="right")
    begins = np.concatenate([[0], ends[:-1]])
    starts = (instances.astype(np.int64) - begins[entries]) * instance_bytes
    files = np.asarray(first_entries)[entries]
    order = np.lexsort((starts, files))
    files, starts = files[order], starts[order]
    same_file = files[1:] == files[:-1]
    gaps = starts[1:] - starts[:-1] - instance_bytes
    joined = same_file & (gaps <= 0)
    wasteful = np.flatnonzero(same_file & (gaps > 0) & (gaps <= MAX_GAP))
    wasteful = wasteful[np.argsort(gaps[wasteful], kind="stable")]
    within = np.cumsum(gaps[wasteful]) <= WASTE * len(instances) * instance_bytes
    joined[wasteful[within]] = True
    requests: list[Request] = []
    group = [0]
    for place in range(1, len(order) + 1):
        fits = place < len(order) and starts[place] + instance_bytes - starts[group[0]] <= MAX_REQUEST
        if fits and joined[place - 1]:
            group.append(place)
            continue
        start = int(starts[group[0]])
        requests.append(
            Request(
                entry=int(files[group[0]]),
                start=start,
                end=int(starts[group[-1]]) + instance_bytes,
                rows=tuple(int(order[member]) for member in group),
                offsets=tuple(int(starts[member]) - start for member in group),
            )
        )
        group = [place]
    return requests
