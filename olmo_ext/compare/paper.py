"""A paper's own figures beside ours.

`expected.yaml`:

    paper: {title: ..., arxiv: "2602.06471"}
    conditions: {tokens: 2.5B, data: <corpus fingerprint or words>, evaluation: <label>}     # of all figures
    figures:
      - {run: hourglass-k4-l6, metric: ppl, value: 35.101, source: "table 3", mark: F, note: ...,
         tokens: ..., data: ..., evaluation: ...}                                            # of one figure

`run` is a group's name. `metric` is `ppl`, `loss` or a downstream metric as `task metric`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from olmo_ext.compare.statistics import Difference
from olmo_ext.errors import InputError
from olmo_ext.quantities import parse_count

if TYPE_CHECKING:
    from olmo_ext.compare.comparison import GroupResult

REPRODUCED, CONTRADICTED, UNDECIDED, NOT_COMPARABLE = "reproduced", "contradicted", "undecided", "not comparable"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a paper prints."""

    run: str
    metric: str
    value: float
    source: str = ""
    mark: str = ""
    note: str = ""
    tokens: int | None = None
    data: str | None = None
    evaluation: str | None = None


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One group's figure in a paper, and what we have."""

    group: str
    baseline: str | None
    source: str
    metric: str
    paper_value: float
    our_value: float | None
    paper_difference: float | None
    """Nats, for ppl and loss."""

    our_difference: Difference | None
    verdict: str
    why: str


def judge(paper_difference: float | None, ours: Difference | None) -> tuple[str, str]:
    """Reproduced: our interval holds the paper's difference and not zero. Contradicted: it does not hold the paper's.
    Else undecided."""
    if paper_difference is None:
        return UNDECIDED, "the paper gives no figure for the baseline"
    if ours is None or ours.low is None or ours.high is None:
        return UNDECIDED, "our difference has no interval"
    if not ours.contains(paper_difference):
        return CONTRADICTED, "our interval excludes the paper's difference"
    if ours.excludes_zero:
        return REPRODUCED, "our interval contains the paper's difference and excludes zero"
    return UNDECIDED, "our interval contains both the paper's difference and zero"


def read_expected(path: Path) -> list[Figure]:
    """Read an expected.yaml.

    :raises InputError: for a file that is none.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise InputError(
            "no such file", where=str(path), right="the paper's figures, as in configs/*/expected.yaml"
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"not YAML ({error})", where=str(path)) from None
    if not isinstance(content, Mapping) or not isinstance(content.get("figures"), list):
        raise InputError("no list `figures`", where=str(path), right="figures: [{run, metric, value, source}]")
    common = content.get("conditions") or {}
    figures = []
    for index, entry in enumerate(content["figures"]):
        place = f"{path}, figures.{index}"
        if not isinstance(entry, Mapping) or not {"run", "metric", "value"} <= entry.keys():
            raise InputError("needs run, metric and value", where=place)
        merged = {**common, **entry}
        try:
            figures.append(_figure(merged))
        except (TypeError, ValueError) as error:
            raise InputError(str(error), where=place) from None
    return figures


def _figure(entry: Mapping[str, Any]) -> Figure:
    def text(name: str) -> str | None:
        return None if entry.get(name) is None else str(entry[name])

    return Figure(
        run=str(entry["run"]),
        metric=str(entry["metric"]),
        value=float(entry["value"]),
        source=text("source") or "",
        mark=text("mark") or "",
        note=text("note") or "",
        tokens=None if entry.get("tokens") is None else parse_count(entry["tokens"]),
        data=text("data"),
        evaluation=text("evaluation"),
    )


def _nats(figure: Figure) -> float | None:
    if figure.metric == "ppl":
        return math.log(figure.value)
    return figure.value if figure.metric == "loss" else None


def _mismatches(figure: Figure, group: GroupResult, label: str | None) -> list[str]:
    """Which of data, tokens and evaluation set are not the paper's."""
    found = []
    if not group.finished:
        return ["no finished run"]
    if figure.tokens is None:
        found.append("the paper's tokens are not stated")
    elif abs(group.tokens / figure.tokens - 1) > 0.01:
        found.append(f"tokens {group.tokens:,} against {figure.tokens:,}")
    ours = group.finished[0].data.get("fingerprint")
    if figure.data is None or ours != figure.data:
        found.append(f"training data {str(ours)[:12]} against {figure.data or 'not stated'}")
    if figure.evaluation is None or figure.evaluation != label:
        found.append(f"evaluation set {label} against {figure.evaluation or 'not stated'}")
    return found


def paper_rows(groups: list[GroupResult], path: Path, *, label: str | None) -> list[PaperRow]:
    """Every figure of the file whose run is a group of this sweep."""
    figures = read_expected(path)
    by_name = {group.name: group for group in groups}
    table = {(figure.run, figure.metric, figure.evaluation): figure for figure in figures}
    rows = []
    for figure in figures:
        group = by_name.get(figure.run)
        if group is None:
            continue
        nats = _nats(figure)
        paper_difference, ours = None, None
        if nats is not None and group.baseline is not None:
            other = table.get((group.baseline, figure.metric, figure.evaluation))
            base = None if other is None else _nats(other)
            paper_difference = None if base is None else nats - base
            ours = group.nats
        why = "; ".join(_mismatches(figure, group, label))
        verdict = NOT_COMPARABLE
        if not why:
            verdict, why = ("", "the baseline itself") if group.baseline is None else judge(paper_difference, ours)
        rows.append(
            PaperRow(
                group=figure.run,
                baseline=group.baseline,
                source=" · ".join(part for part in (figure.source, figure.note) if part),
                metric=figure.metric + (f" ({figure.evaluation})" if figure.evaluation else ""),
                paper_value=figure.value,
                our_value=group.ppl if figure.metric == "ppl" else group.loss if figure.metric == "loss" else None,
                paper_difference=paper_difference,
                our_difference=ours,
                verdict=verdict,
                why=why,
            )
        )
    return rows
