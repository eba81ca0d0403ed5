"""Long curves made small enough for a page without hiding their spikes."""

from __future__ import annotations

import numpy as np


def buckets(tokens: np.ndarray, count: int) -> np.ndarray:
    """The bucket of each point, [points]: equal steps of the square root of tokens, since curves bend early."""
    if not len(tokens):
        return np.zeros(0, dtype=np.int64)
    share = np.sqrt(np.maximum(tokens, 0) / max(float(tokens[-1]), 1.0))
    return np.minimum((share * count).astype(np.int64), count - 1)


def extremes(tokens: np.ndarray, value: np.ndarray, count: int) -> np.ndarray:
    """Indices of the lowest and the highest point of every bucket, with the first and the last point, in order."""
    if len(value) <= 2 * count:
        return np.arange(len(value))
    bucket = buckets(tokens, count)
    order = np.lexsort((value, bucket))
    edges = np.flatnonzero(np.diff(bucket[order])) + 1
    lowest = order[np.concatenate(([0], edges))]
    highest = order[np.concatenate((edges - 1, [len(order) - 1]))]
    return np.unique(np.concatenate((lowest, highest, [0, len(value) - 1])))


def means(tokens: np.ndarray, columns: list[np.ndarray], count: int) -> list[np.ndarray]:
    """The mean of each column per bucket that has points, [buckets]."""
    if not len(tokens):
        return [np.zeros(0) for _ in columns]
    bucket = buckets(tokens, count)
    number = np.bincount(bucket, minlength=count)
    filled = number > 0
    return [np.bincount(bucket, weights=column, minlength=count)[filled] / number[filled] for column in columns]
