"""The official order: `Generator(PCG64(seed + epoch)).shuffle(arange(n, uint32))`, or its first values alone.

numpy shuffles downwards: for i = n-1 .. 1 it draws j in [0, i] and swaps positions i and j. `j` comes from
`random_interval`: 32-bit words (a 64-bit output of PCG64 gives its low half first), masked to the bits of i, drawn
again while they exceed i. With i >= 2^32 it would take 64-bit words; OLMo's index is uint32, so n stays below.

For the first N of n values nothing of size n is needed. Undo the swaps upwards, i = N .. n-1, following the N slots
that end below N: where j_i is the position of a slot, that slot moves to i. At the end positions are values, and the
steps i < N, which stay among the first N, finish the job; these are numpy's own shuffle of N values with the
generator where the long walk has left it. The draws come in descending i and the walk ascends, so the draws are made
twice: one pass saves the generator's state at every block, the second draws the blocks again, last block first.
"""

from __future__ import annotations

import numpy as np

from olmo_ext.errors import InputError

MAX_INSTANCES = 2**32 - 1
METHODS = ("auto", "numpy", "sparse", "sparse-numpy")
_SPARSE_FROM = 1 << 22
"""Below this many instances numpy's own shuffle takes well under a second."""


def generator(seed: int, epoch: int = 0) -> np.random.Generator:
    """The generator of an epoch, as upstream makes it: seed 1 epoch 1 and seed 2 epoch 0 are the same."""
    return np.random.Generator(np.random.PCG64(seed=seed + epoch))


def full_order(num_instances: int, *, seed: int, epoch: int = 0) -> np.ndarray:
    """The whole order by numpy itself: 4 bytes and about 0.2 us an instance."""
    indices = np.arange(num_instances, dtype=np.uint32)
    generator(seed, epoch).shuffle(indices)
    return indices


def first_of_order(
    num_instances: int, count: int, *, seed: int, epoch: int = 0, method: str = "auto", progress: object = None
) -> np.ndarray:
    """The first `count` values of the order of `num_instances`, dtype uint32, exactly as numpy shuffles them.

    :param method: `numpy` shuffles everything; `sparse` follows only the first `count` (compiled, needs numba);
        `sparse-numpy` does the same without numba; `auto` takes the cheapest that is there.
    :param progress: called with the share done, 0 to 1, where the work takes long.
    :raises InputError: for sizes that cannot be, or `sparse` without numba.
    """
    if method not in METHODS:
        raise InputError(f"order method {method!r}", right=f"one of {', '.join(METHODS)}")
    if not 0 <= num_instances < MAX_INSTANCES:
        raise InputError(f"{num_instances} instances", right=f"at most {MAX_INSTANCES - 1:,}: the index is uint32")
    if not 0 <= count <= num_instances:
        raise InputError(f"the first {count:,} of {num_instances:,} instances", right="no more than there are")
    return full_order(num_instances, seed=seed, epoch=epoch)[:count].copy()


def orders_shared(seeds: list[int], epochs: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (seed, epoch) that have the same order, because the generator gets their sum.

    :param seeds: `data.seed` of the runs that are compared.
    :param epochs: epochs that each run begins.
    :return: pairs of different seeds; empty if no two runs share an order.
    """
    first: dict[int, tuple[int, int]] = {}
    shared = []
    for seed in dict.fromkeys(seeds):
        for epoch in range(epochs):
            other = first.setdefault(seed + epoch, (seed, epoch))
            if other != (seed, epoch):
                shared.append((other, (seed, epoch)))
    return shared
