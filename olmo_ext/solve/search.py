"""Shapes of equal budget: an exact search over whole numbers.

Every budget (non-embedding or total parameters, training FLOPs per token) is linear in `d_ff` once layers, d_model,
sub-MLPs and heads are chosen. So the search runs over those four in one vectorised pass, each point gives the interval
of `d_ff` that all constraints leave, and the multiples inside it are the shapes. A type's own `matrices()` give its
coefficients: a registered type is searched like a built-in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from olmo_ext.solve.grid import expand, make_grid, sums_of_widths, within
from olmo_ext.solve.problem import Interval, Problem, Solution
from olmo_ext.solve.refusals import accepted_ffns


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The feasible shapes, and how many were looked at."""

    solutions: tuple[Solution, ...]
    num_candidates: int
    num_feasible: int


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """A constraint without which there are shapes."""

    name: str
    asked: str
    nearest: float
    """The value nearest to what was asked at which a shape exists."""

    solution: Solution
    """A shape that has it."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Columns over the feasible shapes."""

    layers: np.ndarray
    d_model: np.ndarray
    num_sub_mlps: np.ndarray
    d_ff: np.ndarray
    heads: np.ndarray
    head_dim: np.ndarray
    attention: np.ndarray
    ffn: np.ndarray
    actual: np.ndarray
    deviation: np.ndarray
    num_candidates: int

    def solution(self, i: int) -> Solution:
        names = ("layers", "d_model", "num_sub_mlps", "d_ff", "heads", "head_dim", "attention", "ffn")
        counts = {name: int(getattr(self, name)[i]) for name in names}
        return Solution(**counts, actual=float(self.actual[i]), deviation=float(self.deviation[i]))


def _find(problem: Problem) -> _Found:
    grid = make_grid(problem)
    num_candidates = len(grid.layers)
    grid = grid.keep(within(grid.attention, problem.attention) & within(grid.d_model / grid.layers, problem.aspect))
    index, d_ff = expand(problem, grid)
    grid = grid.keep(index)
    sums = sums_of_widths(problem, grid.layers, d_ff)
    ffn = grid.ffn_base + grid.ffn_slope // grid.layers * sums
    actual = grid.base + grid.slope // grid.layers * sums
    deviation = actual / problem.target - 1.0
    feasible = (sums > 0) & within(ffn, problem.ffn)
    if np.isfinite(problem.tolerance):
        feasible &= np.abs(deviation) <= problem.tolerance * (1 + 1e-12)
    feasible[feasible] = accepted_ffns(
        problem,
        layers=grid.layers[feasible],
        d_model=grid.d_model[feasible],
        sub_mlps=grid.sub_mlps[feasible],
        d_ff=d_ff[feasible],
    )
    columns = {
        "layers": grid.layers,
        "d_model": grid.d_model,
        "num_sub_mlps": grid.sub_mlps,
        "d_ff": d_ff,
        "heads": grid.heads,
        "head_dim": grid.head_dim,
        "attention": grid.attention,
        "ffn": ffn,
        "actual": actual,
        "deviation": deviation,
    }
    return _Found(
        **{name: column[feasible] for name, column in columns.items()}, num_candidates=num_candidates + len(index)
    )


def search(problem: Problem, *, limit: int = 20, by: str = "deviation") -> Outcome:
    """The feasible shapes, best first.

    :param by: `deviation` (then alignment) or `alignment` (then deviation).
    :raises InputError: for a search that is too large.
    """
    found = _find(problem)
    width = found.heads * found.head_dim
    alignment = np.gcd(np.gcd(found.d_model, found.d_ff), np.gcd(width, 128))
    # Ties beyond a millionth of a percent are broken by alignment, then by fewer layers.
    off = np.round(np.abs(found.deviation), 8)
    keys = (found.layers, -alignment, off) if by == "deviation" else (found.layers, off, -alignment)
    order = np.lexsort(keys)[:limit]
    return Outcome(
        solutions=tuple(found.solution(int(i)) for i in order),
        num_candidates=found.num_candidates,
        num_feasible=len(found.layers),
    )


VALUES: dict[str, Callable[[_Found], np.ndarray]] = {
    "tolerance": lambda found: np.abs(found.deviation),
    "attention": lambda found: found.attention,
    "ffn": lambda found: found.ffn,
    "attention_share": lambda found: found.attention / (found.attention + found.ffn),
    "ratio": lambda found: found.d_ff / found.d_model,
    "total_ratio": lambda found: found.num_sub_mlps * found.d_ff / found.d_model,
    "aspect": lambda found: found.d_model / found.layers,
    "d_ff": lambda found: found.d_ff,
    "multiple_of": lambda found: found.d_ff & -found.d_ff,
    "layers": lambda found: found.layers,
    "num_sub_mlps": lambda found: found.num_sub_mlps,
    "d_model": lambda found: found.d_model,
    "heads": lambda found: found.heads,
    "head_dim": lambda found: found.head_dim,
}
"""Constraints, in the order in which giving them up is suggested, and the quantity that each bounds."""


def obstacles(problem: Problem) -> list[Obstacle]:
    """For a problem without shapes: every constraint that alone stands in the way, with the nearest feasible value."""
    result = []
    for name, values_of in VALUES.items():
        asked = getattr(problem, name)
        if asked is None:
            continue
        found = _find(relaxed(problem, name))
        if not len(found.layers):
            continue
        values = values_of(found)
        interval = asked_interval(name, asked)
        distance = np.maximum(interval[0] - values, 0) + np.maximum(values - interval[1], 0)
        # Among equally near ones, the shape that keeps the budget best.
        best = int(np.lexsort((np.abs(found.deviation), distance))[0])
        if distance[best] > 0:
            text = f"{interval[0]:.6g}" if interval[0] == interval[1] else f"{interval[0]:.6g} to {interval[1]:.6g}"
            result.append(Obstacle(name=name, asked=text, nearest=float(values[best]), solution=found.solution(best)))
    return result


def asked_interval(name: str, asked: object) -> Interval:
    """Smallest and largest value that a constraint allows."""
    if name == "tolerance":
        return 0.0, float(asked)  # type: ignore[arg-type]
    if isinstance(asked, tuple):
        return float(min(asked)), float(max(asked))
    return float(asked), float(asked)  # type: ignore[arg-type]


def relaxed(problem: Problem, name: str) -> Problem:
    """The problem without one constraint: a free range in place of a list, no bound in place of an interval."""
    if name == "tolerance":
        return replace(problem, tolerance=float("inf"))
    if name == "multiple_of":
        return replace(problem, multiple_of=1)
    if name == "layers":
        return replace(problem, layers=tuple(range(1, max(97, 2 * max(problem.layers)))))
    if name == "num_sub_mlps":
        return replace(problem, num_sub_mlps=tuple(range(1, max(17, 2 * max(problem.num_sub_mlps)))))
    if name == "d_model":
        # Widths that people can use, and those that were asked for.
        widths = {*range(16, max(8193, 2 * max(problem.d_model)), 16), *problem.d_model}
        return replace(problem, d_model=tuple(sorted(widths)))
    if name == "heads" and problem.head_dim is None:
        return replace(problem, heads=None)
    if name == "heads":
        return replace(problem, heads=tuple(range(1, 129)))
    if name == "head_dim" and problem.heads is not None:
        return replace(problem, head_dim=tuple(range(16, 513, 2)))
    return replace(problem, **{name: None})  # type: ignore[arg-type]
