"""What the `check` of an FFN or attention type says about the shapes that `solve` looks at.

A type may refuse an option whatever the shape: that is a mistake of the command line. It may also refuse some shapes
only (by their number of sub-MLPs, or heads that do not divide): that is a constraint of the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, FFNType
from olmo_ext.solve.problem import HEAD_DIMS, Problem, Solution

MOST_SUB_MLPS = 64
MOST_HEADS = 128
WIDTHS = tuple(2**power for power in range(4, 15))


def refuse_impossible_options(problem: Problem) -> None:
    """Refuse options that the types accept for no shape at all, those that were asked for and typical others.

    :raises InputError: in the type's words, as `plan` has them.
    """
    kv_heads = problem.kv_heads or 1
    any_heads = itertools.product(range(kv_heads, MOST_HEADS + 1, kv_heads), HEAD_DIMS)
    others = ((heads * head_dim, heads, head_dim) for heads, head_dim in any_heads)
    refused = _refused_by_attention(problem, itertools.chain(_heads_asked_for(problem), others))
    if refused is not None:
        raise InputError(refused, where="--attention-option")
    d_models = (problem.d_model[0], problem.d_model[-1], WIDTHS[-1])
    counts = (*problem.num_sub_mlps, *range(1, MOST_SUB_MLPS + 1))
    widths = (*WIDTHS, *(problem.multiple_of * factor for factor in range(1, 33)))
    refused = _refused_by_all(_check_ffn(problem, *sizes) for sizes in itertools.product(d_models, counts, widths))
    if refused is not None:
        raise InputError(refused, where="--ffn-option")


def refusal_of_all(problem: Problem) -> str | None:
    """Why the attention type accepts none of the heads that were asked for, or None if it accepts some."""
    return _refused_by_attention(problem, _heads_asked_for(problem))


def _heads_asked_for(problem: Problem) -> Iterable[tuple[int, int, int]]:
    return ((d_model, *choice) for d_model in problem.d_model for choice in problem.head_choices(d_model))


def _refused_by_attention(problem: Problem, candidates: Iterable[tuple[int, int, int]]) -> str | None:
    check = ATTENTION_TYPES.get(problem.attention_type).check
    return _refused_by_all(check(problem.attention_spec(*heads), d_model) for d_model, *heads in candidates)


def _refused_by_all(refusals: Iterable[str | None]) -> str | None:
    """The first refusal if every candidate has one; None as soon as one candidate is accepted."""
    first = None
    for refusal in refusals:
        if refusal is None:
            return None
        first = first or refusal
    return first


def _check_ffn(problem: Problem, d_model: int, num_sub_mlps: int, d_ff: int) -> str | None:
    kind = FFN_TYPES.get(problem.ffn_type)
    if kind.single and num_sub_mlps != 1:
        return f"type {kind.name!r} has one sub-MLP, not {num_sub_mlps}"
    return kind.check(problem.ffn_spec(*(d_ff,) * num_sub_mlps), d_model)


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first index of every distinct row, and for each row the place of its own in that list."""
    code = columns[0]
    for column in columns[1:]:
        code = np.unique(code, return_inverse=True)[1] * (int(column.max(initial=0)) + 1) + column
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    return first, place


def accepted_ffns(problem: Problem, shapes: Solution) -> np.ndarray:
    """Which of the shapes the FFN type accepts in every layer, [shapes] of bool."""
    check = type(FFN_TYPES.get(problem.ffn_type)).check
    names = ["num_sub_mlps"]
    if check is not FFNType.check and not getattr(check, "whatever_the_widths", False):
        names += ["d_model", "d_ff"] if problem.taper is None else ["d_model", "d_ff", "layers"]
    first, place = distinct(*(getattr(shapes, name) for name in names))
    accepted = [
        all(
            _check_ffn(problem, shape.d_model, shape.num_sub_mlps, width) is None
            for width in set(problem.layer_widths(shape.d_ff, shape.layers))
        )
        for shape in map(shapes.rows, first)
    ]
    return np.array(accepted, dtype=bool)[place]
