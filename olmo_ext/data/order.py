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

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from olmo_ext.base.errors import InputError

MAX_INSTANCES = 2**32 - 1
METHODS = ("auto", "numpy", "sparse", "sparse-numpy")
_SPARSE_FROM = 1 << 24
"""Below this many instances numpy's own shuffle takes about a second."""

_SPARSE_NUMPY_FROM = 1 << 28
"""Without numba the walk is no faster than numpy's shuffle; from here on it saves a gigabyte and more."""

_BLOCK = 1 << 20
"""Draws in one block of the compiled walk: 4 MiB, so that a block and the marks stay in the cache."""

Progress = Callable[[float], None]


def generator(seed: int, epoch: int = 0) -> np.random.Generator:
    """The generator of an epoch, as upstream makes it: seed 1 epoch 1 and seed 2 epoch 0 are the same."""
    return np.random.Generator(np.random.PCG64(seed=seed + epoch))


def full_order(num_instances: int, *, seed: int, epoch: int = 0) -> np.ndarray:
    """The whole order by numpy itself: 4 bytes and about 0.2 us an instance."""
    indices = np.arange(num_instances, dtype=np.uint32)
    generator(seed, epoch).shuffle(indices)
    return indices


def first_of_order(
    num_instances: int, count: int, *, seed: int, epoch: int = 0, method: str = "auto", progress: Progress | None = None
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
    if method == "sparse" and not compiled_available():
        raise InputError("the compiled order needs numba", right="pip install 'olmo-ext[order]', or --method auto")
    if method == "auto":
        walk_from, method = (_SPARSE_FROM, "sparse") if compiled_available() else (_SPARSE_NUMPY_FROM, "sparse-numpy")
        if num_instances < walk_from or count > num_instances // 8:
            method = "numpy"
    report = progress or (lambda share: None)
    if method == "numpy":
        return full_order(num_instances, seed=seed, epoch=epoch)[:count].copy()
    if count in (0, num_instances):
        return full_order(num_instances if count else 0, seed=seed, epoch=epoch)
    walk = _sparse_compiled if method == "sparse" else _sparse_numpy
    return walk(num_instances, count, seed + epoch, report)


def compiled_available() -> bool:
    """Whether numba is installed (extra `order`)."""
    return importlib.util.find_spec("numba") is not None


def _sparse_compiled(num_instances: int, count: int, seed: int, progress: Progress) -> np.ndarray:
    """The walk in compiled loops: one thread draws and sifts a block while the other follows the slots."""
    from olmo_ext.data import order_compiled as compiled

    halves = divmod(np.random.PCG64(seed).state["state"]["state"], 1 << 64)
    increment = np.random.PCG64(seed).state["state"]["inc"]
    state = np.array([*halves, *divmod(increment, 1 << 64), 0, 0], dtype=np.uint64)
    firsts = list(range(count, num_instances, _BLOCK))
    sizes = [min(_BLOCK, num_instances - first) for first in firsts]
    states = np.zeros((len(firsts), len(state)), dtype=np.uint64)
    nothing = np.zeros(0, dtype=np.uint32)
    for block in reversed(range(len(firsts))):
        states[block] = state
        compiled.draw_down(state, firsts[block] + sizes[block] - 1, firsts[block], nothing)
        if block % 64 == 0:
            progress(0.2 * (1 - block / len(firsts)))

    # A table at most a third full; marks of 8 to 16 bits a slot, at most 16 MiB.
    bits = max(4, int(np.ceil(np.log2(3 * count + 1))))
    mark_bytes = 1 << max(7, min(24, int(np.ceil(np.log2(count + 1)))))
    table, shift = np.empty(1 << bits, dtype=np.uint64), 64 - bits
    seen = np.zeros(mark_bytes, dtype=np.uint8)
    compiled.fill(table, shift, seen, count)
    # Two blocks are in use at a time.
    drawn = np.zeros((2, min(_BLOCK, num_instances)), dtype=np.uint32)
    near = np.zeros_like(drawn)

    def draw(block: int, marks: np.ndarray) -> int:
        out = drawn[block % 2][: sizes[block]]
        compiled.draw_down(states[block], firsts[block] + sizes[block] - 1, firsts[block], out)
        # While the block before is followed, only positions inside it are new.
        return compiled.sift(out[: size_of_head(block)], marks, firsts[max(block - 1, 0)], near[block % 2])

    def size_of_head(block: int) -> int:
        """The helper sifts three quarters of a block, which keeps both threads busy."""
        return sizes[block] - sizes[block] // 4

    moved = 0
    with ThreadPoolExecutor(max_workers=1) as helper:
        pending = helper.submit(draw, 0, seen)
        for block, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            num_near = pending.result()
            if block + 1 < len(firsts):
                pending = helper.submit(draw, block + 1, seen)
            here, head = block % 2, size_of_head(block)
            draws = drawn[here][:size]
            moved += compiled.follow_up(table, shift, seen, first, draws[:head], near[here], num_near)[0]
            tail, begin = draws[head:], first + head
            num_near = compiled.sift(tail, seen, begin, near[here])
            moved += compiled.follow_up(table, shift, seen, begin, tail, near[here], num_near)[0]
            if moved > count // 4:
                # Marks of positions that slots have left let draws through for nothing. A new array: the helper
                # reads the old one.
                seen, moved = np.zeros(mark_bytes, dtype=np.uint8), 0
                compiled.mark_present(table, seen)
            if block % 16 == 0:
                progress(0.2 + 0.8 * block / len(firsts))
    values = np.zeros(count, dtype=np.uint32)
    compiled.read_positions(table, values)
    high, low, _, _, kept, half = (int(word) for word in state)
    bit_generator = np.random.PCG64(seed)
    bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": (high << 64) | low, "inc": increment},
        "has_uint32": kept,
        "uinteger": half,
    }
    np.random.Generator(bit_generator).shuffle(values)
    progress(1.0)
    return values


def _at_word(seed: int, words: int) -> np.random.Generator:
    """The generator after that many 32-bit words."""
    bit_generator = np.random.PCG64(seed)
    bit_generator.advance(words // 2)
    generator = np.random.Generator(bit_generator)
    if words % 2:
        generator.integers(0, 1 << 32, dtype=np.uint32)
    return generator


def _draw_numpy(seed: int, words: int, last: int, first: int) -> tuple[np.ndarray, int]:
    """The draws j for i = first .. last (made from last downwards), and the words used up to then.

    Whether a word is taken depends on i, which depends on how many were taken before: guess, count, guess again until
    nothing changes. The first wrong guess is right after each turn, so the one fixed point is reached, in few turns.
    """
    drawn, i = np.zeros(last - first + 1, dtype=np.int64), last
    while i >= first:
        mask = (1 << i.bit_length()) - 1
        wanted = i - max(first, (mask >> 1) + 1) + 1
        size = min(2 * wanted + 64, max(256, i // 4), 1 << 20)
        masked = (_at_word(seed, words).integers(0, 1 << 32, size, dtype=np.uint32) & np.uint32(mask)).astype(np.int64)
        taken = masked <= i
        while True:
            before: np.ndarray = np.cumsum(taken) - taken
            again = masked <= i - before
            if np.array_equal(again, taken):
                break
            taken = again
        places = np.flatnonzero(taken)[:wanted]
        words += int(places[-1]) + 1 if len(places) == wanted else size
        drawn[i - first - len(places) + 1 : i - first + 1] = masked[places][::-1]
        i -= len(places)
    return drawn, words


def _sparse_numpy(num_instances: int, count: int, seed: int, progress: Progress) -> np.ndarray:
    """The walk without numba: blocks small beside their position, so that few draws point into their own block."""
    firsts = [count]
    while firsts[-1] < num_instances:
        firsts.append(min(firsts[-1] + max(256, min(firsts[-1] // 16, 1 << 22)), num_instances))
    blocks = list(zip(firsts[:-1], firsts[1:], strict=True))
    words, starts = 0, [0] * len(blocks)
    for number in reversed(range(len(blocks))):
        starts[number] = words
        _, words = _draw_numpy(seed, words, blocks[number][1] - 1, blocks[number][0])
        progress(0.4 * (1 - number / len(blocks)))
    occupied = np.zeros(num_instances // 8 + 1, dtype=np.uint8)
    positions, slots = np.arange(count), np.arange(count)  # positions stay sorted: new ones are the largest
    np.bitwise_or.at(occupied, positions >> 3, (1 << (positions & 7)).astype(np.uint8))
    for number, (first, end) in enumerate(blocks):
        drawn, _ = _draw_numpy(seed, starts[number], end - 1, first)
        hits = np.flatnonzero((drawn < first) & ((occupied[drawn >> 3] >> (drawn & 7)) & 1).astype(bool))
        left, earliest = np.unique(drawn[hits], return_index=True)
        where = np.searchsorted(positions, left)
        holder = np.full(end - first, -1, dtype=np.int64)
        holder[hits[earliest]] = slots[where]
        # A slot that came into this block may move on within it, in the order of i.
        for target in np.flatnonzero((drawn >= first) & (drawn < np.arange(first, end))):
            origin = drawn[target] - first
            if holder[origin] >= 0:
                holder[target], holder[origin] = holder[origin], -1
        arrived = np.flatnonzero(holder >= 0)
        np.bitwise_and.at(occupied, left >> 3, (~(1 << (left & 7)) & 0xFF).astype(np.uint8))
        new = arrived + first
        np.bitwise_or.at(occupied, new >> 3, (1 << (new & 7)).astype(np.uint8))
        stay = np.ones(count, dtype=bool)
        stay[where] = False
        positions, slots = np.append(positions[stay], new), np.append(slots[stay], holder[arrived])
        progress(0.4 + 0.6 * number / len(blocks))
    values = np.zeros(count, dtype=np.uint32)
    values[slots] = positions
    _at_word(seed, words).shuffle(values)
    progress(1.0)
    return values
