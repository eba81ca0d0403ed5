"""The two loops of the sparse order, compiled by numba (extra `order`): drawing, and following slots upwards.

PCG64 (setseq, XSL-RR) is written out here because a call into numpy for every word would cost more than the word.
`state` is uint64[6]: state high, state low, increment high, increment low, whether a 32-bit half is kept, that half.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

MULTIPLIER_HIGH = 2549297995355413924
MULTIPLIER_LOW = 4865540595714422341
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
"""Marks a free place of the table; no position has the number in its upper half."""


@intrinsic
def _step(typingctx: Any, high: Any, low: Any, increment_high: Any, increment_low: Any) -> Any:
    """One step of the 128-bit congruential generator: (high, low) of state * multiplier + increment."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)

        def join(upper: Any, lower: Any) -> Any:
            return builder.or_(builder.shl(builder.zext(upper, wide), ir.Constant(wide, 64)), builder.zext(lower, wide))

        state, increment = join(arguments[0], arguments[1]), join(arguments[2], arguments[3])
        multiplier = ir.Constant(wide, (MULTIPLIER_HIGH << 64) | MULTIPLIER_LOW)
        state = builder.add(builder.mul(state, multiplier), increment)
        upper = builder.trunc(builder.lshr(state, ir.Constant(wide, 64)), word)
        return context.make_tuple(builder, signature.return_type, (upper, builder.trunc(state, word)))

    pair = types.UniTuple(types.uint64, 2)
    return pair(types.uint64, types.uint64, types.uint64, types.uint64), codegen


@numba.njit(inline="always")
def _output(high, low):
    mixed = high ^ low
    turn = high >> np.uint64(58)
    return (mixed >> turn) | (mixed << ((np.uint64(64) - turn) & np.uint64(63)))


@numba.njit(nogil=True, cache=True)
def draw_down(state, last, first, out):
    """Draw j for i = last, last - 1, .. first, as `random_interval` does; leaves the generator after them.

    :param out: uint32; out[i - first] = j. If it has length 0 the draws are made and not kept.
    """
    high, low, more_high, more_low = state[0], state[1], state[2], state[3]
    kept, half = state[4], state[5]
    keep = len(out) > 0
    lower = np.uint64(0xFFFFFFFF)
    i = np.int64(last)
    while i >= first:
        mask = np.uint64(1)
        while np.int64(mask) < i:
            mask = (mask << np.uint64(1)) | np.uint64(1)
        stop = max(np.int64(first), np.int64((mask >> np.uint64(1)) + np.uint64(1)))
        if kept and i >= stop:
            kept = np.uint64(0)
            drawn = np.int64(half & mask)
            if keep:
                out[i - first] = drawn
            i -= drawn <= i
        if keep:
            while i > stop:
                high, low = _step(high, low, more_high, more_low)  # type: ignore[call-arg]
                word = _output(high, low)
                drawn = np.int64(word & lower & mask)
                out[i - first] = drawn
                i -= drawn <= i
                drawn = np.int64((word >> np.uint64(32)) & mask)
                out[i - first] = drawn
                i -= drawn <= i
        else:
            while i > stop:
                high, low = _step(high, low, more_high, more_low)  # type: ignore[call-arg]
                word = _output(high, low)
                i -= np.int64(word & lower & mask) <= i
                i -= np.int64((word >> np.uint64(32)) & mask) <= i
        while i >= stop:
            if kept:
                kept = np.uint64(0)
                drawn = np.int64(half & mask)
            else:
                high, low = _step(high, low, more_high, more_low)  # type: ignore[call-arg]
                word = _output(high, low)
                drawn = np.int64(word & lower & mask)
                half = word >> np.uint64(32)
                kept = np.uint64(1)
            if keep:
                out[i - first] = drawn
            i -= drawn <= i
    state[0], state[1], state[4], state[5] = high, low, kept, half


@numba.njit(inline="always")
def _place(position, shift):
    """Where a position's search in the table begins (multiplicative hashing)."""
    return np.int64((np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(shift))


@numba.njit(inline="always")
def _key(entry):
    return np.int64(entry >> np.uint64(32))


@numba.njit(inline="always")
def _insert(table, shift, key, slot):
    last = len(table) - 1
    at = _place(key, shift)
    while table[at] != EMPTY:
        at = (at + 1) & last
    table[at] = (np.uint64(key) << np.uint64(32)) | np.uint64(slot)


@numba.njit(inline="always")
def _remove(table, shift, at):
    """Free a place and move later entries of its run back, so that every search still ends at the first gap."""
    last = len(table) - 1
    gap = at
    at = (at + 1) & last
    while table[at] != EMPTY:
        home = _place(_key(table[at]), shift)
        if ((at - home) & last) >= ((at - gap) & last):
            table[gap] = table[at]
            gap = at
        at = (at + 1) & last
    table[gap] = EMPTY


@numba.njit(inline="always")
def _mark(seen, position):
    bit = np.int64(position) & np.int64(len(seen) * 8 - 1)
    seen[bit >> 3] |= np.uint8(1 << (bit & 7))


@numba.njit(nogil=True, cache=True)
def fill(table, shift, seen, count):
    """Put every slot at its own position.

    :param table: uint64, open addressing, a power of two long; position in the upper half, slot in the lower.
    :param shift: 64 less the bits of the table's length.
    :param seen: see `sift`.
    """
    table[:] = EMPTY
    for position in range(count):
        _insert(table, shift, position, position)
        _mark(seen, position)


@numba.njit(nogil=True, cache=True)
def mark_present(table, seen):
    """Set the marks of the present positions."""
    for entry in table:
        if entry != EMPTY:
            _mark(seen, _key(entry))


@numba.njit(nogil=True, cache=True)
def sift(drawn, seen, recent, near):
    """Which draws may be the position of a slot: the only ones worth a search in the table.

    :param drawn: uint32, the j of one block.
    :param seen: uint8, one bit for the low part of every position that a slot has had; small enough for the cache.
    :param recent: positions from here on may have got a slot after `seen` was read, and always pass.
    :param near: uint32 of the length of `drawn`; gets the places of the draws that pass.
    :return: how many pass.
    """
    bits = np.int64(len(seen) * 8 - 1)
    num_near = 0
    for k in range(len(drawn)):
        position = np.int64(drawn[k])
        bit = position & bits
        near[num_near] = k
        num_near += ((np.int64(seen[bit >> 3]) >> (bit & 7)) & 1) | (position >= recent)
    return num_near


AHEAD = 512
"""Candidates that are searched together before they are worked on one by one: the cache misses overlap."""


@numba.njit(nogil=True, cache=True)
def follow_up(table, shift, seen, first, drawn, near, num_near):
    """Undo the swaps i = first, first + 1, ..: a slot at position drawn[i - first] moves to i.

    :param near: the places that `sift` has found; overwritten.
    :return: how many slots moved; and the XOR of the entries read ahead. The XOR has no meaning: it is returned so that
        the compiler keeps those reads, which bring the entries into the cache.
    """
    last = len(table) - 1
    moved = 0
    touched = np.uint64(0)
    for begin in range(0, num_near, AHEAD):
        end = min(begin + AHEAD, num_near)
        # First those whose search would not end at once, or that may become positions before their turn. No branch
        # here: the processor has many of these reads under way.
        kept = begin
        for c in range(begin, end):
            place = near[c]
            key = np.int64(drawn[place])
            near[kept] = place
            kept += np.int64(table[_place(key, shift)] != EMPTY) | np.int64(key >= first)  # type: ignore[assignment]
        for c in range(begin, kept):
            touched ^= table[_place(np.int64(first) + np.int64(near[c]), shift)]
        # Then one by one: an earlier one may have moved the slot away.
        for c in range(begin, kept):
            key = np.int64(drawn[near[c]])
            at = _place(key, shift)
            while table[at] != EMPTY and _key(table[at]) != key:
                at = (at + 1) & last
            if table[at] == EMPTY:
                continue
            slot = table[at] & np.uint64(0xFFFFFFFF)
            _remove(table, shift, at)
            target = np.int64(first) + np.int64(near[c])
            _insert(table, shift, target, slot)
            _mark(seen, target)
            moved += 1
    return moved, touched


@numba.njit(nogil=True, cache=True)
def read_positions(table, out):
    """Where every slot has ended: out[slot] = position."""
    for entry in table:
        if entry != EMPTY:
            out[np.int64(entry & np.uint64(0xFFFFFFFF))] = _key(entry)
