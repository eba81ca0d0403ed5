"""Why a problem has no shape: which constraint stands in the way, and the nearest value at which there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from olmo_ext.solve.problem import Interval, Problem, Solution
from olmo_ext.solve.refusals import MOST_HEADS
from olmo_ext.solve.search import feasible_shapes


class Obstacle(NamedTuple):
    """A constraint that alone makes a problem infeasible: the problem without it has shapes."""

    name: str
    nearest: float
    """The value, nearest to what was asked, at which a shape exists."""

    solution: Solution
    """A shape that has it."""


SIZES = ("d_ff", "multiple_of", "layers", "num_sub_mlps", "d_model", "heads", "head_dim")
CONSTRAINTS = ("tolerance", "attention", "ffn", "attention_share", "ratio", "total_ratio", "aspect", *SIZES)
"""In the order in which giving them up is suggested."""

FREE: dict[str, Callable[[Problem], Any]] = {
    "tolerance": lambda problem: float("inf"),
    "multiple_of": lambda problem: 1,
    "layers": lambda problem: tuple(range(1, max(97, 2 * max(problem.layers)))),
    "num_sub_mlps": lambda problem: tuple(range(1, max(17, 2 * max(problem.num_sub_mlps)))),
    # Widths that people can use, and those that were asked for.
    "d_model": lambda problem: tuple(sorted({*range(16, max(8193, 2 * max(problem.d_model)), 16), *problem.d_model})),
    "heads": lambda problem: tuple(range(1, MOST_HEADS + 1)) if problem.head_dim else None,
    "head_dim": lambda problem: tuple(range(16, 513, 2)) if problem.heads else None,
}
"""What stands in place of a constraint that is given up, where None would not leave the quantity free."""


def obstacles(problem: Problem) -> list[Obstacle]:
    """For a problem without shapes: every constraint that alone stands in the way, with the nearest feasible value."""
    result = []
    for name in CONSTRAINTS:
        asked = getattr(problem, name)
        if asked is None:
            continue
        free: dict[str, Any] = {name: FREE[name](problem) if name in FREE else None}
        feasible, _ = feasible_shapes(replace(problem, **free))
        values = getattr(feasible, name)
        low, high = _interval(name, asked)
        distance = np.maximum(low - values, 0) + np.maximum(values - high, 0)
        # Among equally near ones, the shape that keeps the budget best.
        best = np.lexsort((feasible.tolerance, distance))[:1]
        if (distance[best] > 0).any():
            result.append(Obstacle(name, float(values[best[0]]), feasible.rows(best[0])))
    return result


def _interval(name: str, asked: Any) -> Interval:
    if isinstance(asked, tuple):
        return min(asked), max(asked)
    return (0, asked) if name == "tolerance" else (asked, asked)
