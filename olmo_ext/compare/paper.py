"""A paper's own figures beside ours.

`expected.yaml`:

    paper: {title: ..., arxiv: "2602.06471"}
    conditions: {tokens: 2.5B, data: <corpus fingerprint or words>, evaluation: <label>}     # of all figures
    figures:
      - {run: hourglass-k4-l6, metric: ppl, value: 35.101, source: "table 3", mark: F, note: ...,
         tokens: ..., data: ..., evaluation: ...}                                            # of one figure

`run` is a group's name. `metric` is `ppl`, `loss` or a downstream metric as `task metric`. `data` can be checked where
it is the fingerprint or the name of the source that the runs recorded; words are shown, and make a figure not
comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import format_count, parse_count
from olmo_ext.compare.downstream import DownstreamScore
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.statistics import Difference

TOKEN_TOLERANCE = 0.01
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
    """As printed: PPL, nats, or the score's own unit."""

    our_value: float | None
    """In the unit of the paper's; PPL is exp of the mean loss, so that its ratio is the difference in nats."""

    paper_difference: float | None
    """To the baseline: nats for ppl and loss, the score's own unit otherwise."""

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
    if not isinstance(common, Mapping):
        raise InputError("no mapping", where=f"{path}, conditions", right="conditions: {tokens, data, evaluation}")
    figures = []
    for index, entry in enumerate(content["figures"]):
        place = f"{path}, figures.{index}"
        if not isinstance(entry, Mapping) or not {"run", "metric", "value"} <= entry.keys():
            raise InputError("needs run, metric and value", where=place, right="{run, metric, value, source}")
        merged = {**common, **entry}
        try:
            figures.append(_figure(merged))
        except (TypeError, ValueError) as error:
            raise InputError(str(error), where=place) from None
    return figures


def _figure(entry: Mapping[str, Any]) -> Figure:
    def text(name: str) -> str | None:
        return None if entry.get(name) is None else str(entry[name])

    value = float(entry["value"])
    if not math.isfinite(value) or (entry["metric"] == "ppl" and value <= 0):
        raise ValueError(f"{entry['metric']} cannot be {entry['value']}")
    return Figure(
        run=str(entry["run"]),
        metric=str(entry["metric"]),
        value=value,
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


@dataclass(frozen=True, kw_only=True)
class _Ours:
    """Our counterpart of a figure."""

    value: float | None = None
    difference: Difference | None = None
    missing: str = ""
    """Why there is none."""


def _our_loss(group: GroupResult, figure: Figure, label: str | None) -> _Ours:
    if figure.evaluation == label and label is not None:
        loss, difference = group.loss, group.nats
    elif figure.evaluation in group.other_sets:
        loss, difference = group.other_sets[figure.evaluation]
    else:
        loss, difference = group.loss, group.nats
        wanted = figure.evaluation or "not stated"
        missing = f"evaluation set {label or 'none'} against {wanted}"
        return _Ours(value=_as_printed(figure, loss), difference=difference, missing=missing)
    return _Ours(value=_as_printed(figure, loss), difference=difference)


def _as_printed(figure: Figure, loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and figure.metric == "ppl" else loss


def _our_score(group: GroupResult, figure: Figure, downstream: Sequence[DownstreamScore]) -> _Ours:
    task, _, metric = figure.metric.partition(" ")
    for score in downstream:
        if (score.group, score.task, score.metric, score.step) == (group.name, task, metric, None):
            return _Ours(value=score.value, difference=score.difference)
    return _Ours(missing=f"{figure.metric} was not evaluated")


def _mismatches(figure: Figure, group: GroupResult, tokens: int | None) -> list[str]:
    """Which of training data and tokens are not the paper's."""
    if not group.finished:
        return ["no finished run"]
    differences = []
    if tokens is None:
        differences.append("the paper's tokens are not stated")
    elif abs(group.tokens / tokens - 1) > TOKEN_TOLERANCE:
        differences.append(f"tokens {format_count(group.tokens)} against {format_count(tokens)}")
    data = group.finished[0].data
    # Words cannot be checked: only a fingerprint, or the name of the source that the run recorded, can match.
    if figure.data is None or figure.data not in (data.get("fingerprint"), data.get("source")):
        differences.append(f"training data {str(data.get('fingerprint'))[:12]} against {figure.data or 'not stated'}")
    return differences


def paper_rows(
    groups: list[GroupResult], path: Path, *, label: str | None, downstream: Sequence[DownstreamScore] = ()
) -> list[PaperRow]:
    """Every figure of the file whose run is a group of this sweep.

    :raises InputError: for a file that is no expected.yaml.
    """
    figures = read_expected(path)
    by_name = {group.name: group for group in groups}
    lengths: dict[str, set[int]] = {}
    for figure in figures:
        if figure.tokens is not None:
            lengths.setdefault(figure.run, set()).add(figure.tokens)

    def tokens_of(figure: Figure) -> int | None:
        # A figure without tokens of its own is of the run whose perplexity has them.
        known = lengths.get(figure.run, set())
        return figure.tokens or (next(iter(known)) if len(known) == 1 else None)

    # A paper may print one run after several numbers of tokens: its difference is to the baseline after as many.
    table = {(f.run, f.metric, f.evaluation, f.data, tokens_of(f)): f for f in figures}
    rows = []
    for figure in figures:
        group = by_name.get(figure.run)
        if group is None:
            continue
        is_loss = figure.metric in ("ppl", "loss")
        ours = _our_loss(group, figure, label) if is_loss else _our_score(group, figure, downstream)
        paper_difference = None
        other = table.get((group.baseline or "", figure.metric, figure.evaluation, figure.data, tokens_of(figure)))
        if other is not None:
            left, right = (_nats(f) if is_loss else f.value for f in (figure, other))
            paper_difference = None if left is None or right is None else left - right
        reasons = _mismatches(figure, group, tokens_of(figure))
        why = "; ".join([*reasons, *([ours.missing] if ours.missing else [])])
        verdict = NOT_COMPARABLE
        if not why:
            is_baseline = group.baseline is None
            verdict, why = ("", "the baseline itself") if is_baseline else judge(paper_difference, ours.difference)
        rows.append(
            PaperRow(
                group=figure.run,
                baseline=group.baseline,
                source=" · ".join(part for part in (figure.source, figure.note) if part),
                metric=figure.metric + (f" ({figure.evaluation})" if figure.evaluation and is_loss else ""),
                paper_value=figure.value,
                our_value=ours.value,
                paper_difference=paper_difference,
                our_difference=ours.difference,
                verdict=verdict,
                why=why,
            )
        )
    return rows
