"""What a type's own `check` has against the shapes that `solve` looks at.

An option that no shape satisfies is a mistake, and is said in the type's words. One that some shapes satisfy (a number
of sub-MLPs, heads that divide) is a constraint like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.layers import FFNSpec
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, FFNType
from olmo_ext.solve.grid import HEAD_DIMS, head_choices
from olmo_ext.solve.problem import Problem, attention_spec, ffn_spec, layer_widths

MOST_SUB_MLPS = 64
MOST_HEADS = 128
WIDTHS = tuple(2**power for power in range(4, 15))


def refuse_impossible_options(problem: Problem) -> None:
    """Options that the types refuse whatever the shape.

    :raises InputError: in the type's words, as `plan` has them.
    """
    wrong = _attention_refusal(problem, itertools.chain(_own_heads(problem), _any_heads(problem)))
    if wrong is not None:
        raise InputError(wrong, where="--attention-option")
    own = ((d_model, (d_ff,) * count) for d_model, count, d_ff in _ffn_sizes(problem, problem.num_sub_mlps))
    anything = ((d_model, (d_ff,) * count) for d_model, count, d_ff in _ffn_sizes(problem, range(1, MOST_SUB_MLPS + 1)))
    wrong = _ffn_refusal(problem, itertools.chain(own, anything))
    if wrong is not None:
        raise InputError(wrong, where="--ffn-option")


def refusal_of_all(problem: Problem) -> str | None:
    """What the attention type has against every candidate, if it has something against each of them."""
    return _attention_refusal(problem, _own_heads(problem))


def _attention_refusal(problem: Problem, candidates: Iterable[tuple[int, int, int]]) -> str | None:
    """The first refusal, or None as soon as one candidate is accepted or where there is none."""
    kind, first = ATTENTION_TYPES.get(problem.attention_type), None
    for d_model, heads, head_dim in candidates:
        wrong = kind.check(attention_spec(problem, heads, head_dim), d_model)
        if wrong is None:
            return None
        first = first or wrong
    return first


def _own_heads(problem: Problem) -> Iterator[tuple[int, int, int]]:
    for d_model in problem.d_model:
        for heads, head_dim in head_choices(problem, d_model):
            if heads >= 1 and head_dim % 2 == 0 and not (problem.kv_heads and heads % problem.kv_heads):
                yield d_model, heads, head_dim


def _any_heads(problem: Problem) -> Iterator[tuple[int, int, int]]:
    for heads in range(problem.kv_heads or 1, MOST_HEADS + 1, problem.kv_heads or 1):
        for head_dim in HEAD_DIMS:
            yield heads * head_dim, heads, head_dim


def _ffn_sizes(problem: Problem, counts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    d_models = (problem.d_model[0], problem.d_model[-1], WIDTHS[-1])
    multiples = (problem.multiple_of * factor for factor in range(1, 33))
    return itertools.product(d_models, counts, (*WIDTHS, *multiples))


def _ffn_refusal(problem: Problem, candidates: Iterable[tuple[int, tuple[int, ...]]]) -> str | None:
    kind, first = FFN_TYPES.get(problem.ffn_type), None
    for d_model, d_ff in candidates:
        wrong = _check_ffn(kind, ffn_spec(problem, d_ff), d_model)
        if wrong is None:
            return None
        first = first or wrong
    return first


def _check_ffn(kind: FFNType, spec: FFNSpec, d_model: int) -> str | None:
    if kind.single and spec.num_sub_mlps != 1:
        return f"type {kind.name!r} has one sub-MLP, not {spec.num_sub_mlps}"
    return kind.check(spec, d_model)


def accepted_ffns(
    problem: Problem, *, layers: np.ndarray, d_model: np.ndarray, sub_mlps: np.ndarray, d_ff: np.ndarray
) -> np.ndarray:
    """Which of the shapes the FFN type accepts in every layer."""
    kind = FFN_TYPES.get(problem.ffn_type)
    if not len(d_ff) or (type(kind).check is FFNType.check and not kind.single):
        return np.ones(len(d_ff), dtype=bool)
    if getattr(type(kind).check, "whatever_the_widths", False):
        refused = [
            subs
            for subs in np.unique(sub_mlps).tolist()
            if _check_ffn(kind, ffn_spec(problem, (int(d_ff[0]),) * subs), int(d_model[0])) is not None
        ]
        return ~np.isin(sub_mlps, refused)
    # Without a taper the number of layers is of no account.
    counts = layers if problem.taper is not None else np.ones_like(layers)
    distinct, inverse = np.unique(np.stack([counts, d_model, sub_mlps, d_ff]), axis=1, return_inverse=True)
    accepted = np.empty(distinct.shape[1], dtype=bool)
    for position, (count, width, subs, inner) in enumerate(distinct.T.tolist()):
        widths = (inner,) if problem.taper is None else set(layer_widths(problem, inner, count))
        accepted[position] = all(_check_ffn(kind, ffn_spec(problem, (one,) * subs), width) is None for one in widths)
    return accepted[inverse.ravel()]
