"""A paper's figures beside ours: judged by our interval, and only where the conditions are the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.compare.paper import judge, read_expected
from olmo_ext.compare.statistics import Difference

from .known import BASE, SHORT, shifted
from .synthetic import BATCH_TOKENS, make_sweep


@pytest.mark.parametrize(
    ("paper", "low", "high", "verdict"),
    [
        (-0.03, -0.04, -0.02, "reproduced"),
        (-0.03, -0.04, 0.01, "undecided"),
        (-0.03, -0.02, 0.01, "contradicted"),
        (-0.03, 0.01, 0.02, "contradicted"),
        (None, -0.04, -0.02, "undecided"),
    ],
)
def test_a_papers_difference_is_judged_by_our_interval(
    paper: float | None, low: float, high: float, verdict: str
) -> None:
    assert judge(paper, Difference(mean=(low + high) / 2, low=low, high=high))[0] == verdict
    assert judge(paper, Difference(mean=0.0))[0] == "undecided"


EXPECTED = """
conditions: {{tokens: {tokens}, data: ffffffffffffffff, evaluation: corpus}}
figures:
  - {{run: base, metric: ppl, value: 20.0, source: t}}
  - {{run: wide, metric: ppl, value: {value}, source: t}}
  - {{run: wide, metric: ppl, value: 19.0, source: wiki, evaluation: wikitext}}
  - {{run: wide, metric: arc_easy acc, value: 0.4, source: tasks}}
  - {{run: elsewhere, metric: ppl, value: 1.0}}
"""


def test_paper_figures_stand_beside_ours_and_only_equal_conditions_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = {**SHORT, "downstream": {"arc_easy_acc": 0.35, "arc_easy_items": 100}}
    wide = shifted(-0.030, -0.028, -0.033)
    make_sweep(path, {"base": {**options, "final": BASE}, "wide": {**options, "final": wide}}, baseline="base")
    expected = tmp_path / "expected.yaml"
    expected.write_text(EXPECTED.format(tokens=40 * BATCH_TOKENS, value=20 * math.exp(-0.031)))
    rows = compare_sweep(read_sweep(path), expected=expected).paper
    assert [row.verdict for row in rows] == ["", "reproduced", "not comparable", "undecided"]
    assert rows[1].paper_difference == pytest.approx(-0.031)
    assert rows[2].why == "evaluation set corpus against wikitext"
    assert rows[3].our_value == pytest.approx(0.35)
    expected.write_text(EXPECTED.format(tokens="2.5B", value=19))
    rows = compare_sweep(read_sweep(path), expected=expected).paper
    assert all(row.verdict == "not comparable" and "tokens" in row.why for row in rows)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs").glob("*/expected.yaml")), ids=lambda path: path.parent.name
)
def test_the_repositorys_paper_figures_are_read(path: Path) -> None:
    assert len(read_expected(path)) >= 10


def test_a_papers_difference_is_to_its_baseline_after_as_many_tokens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make_sweep(path, {"base": {**SHORT, "final": BASE}, "wide": {**SHORT, "final": 2.9}}, baseline="base")
    figures = [
        {"run": run, "metric": "loss", "value": value, "tokens": tokens}
        for run, tokens, value in (("base", 10, 3.5), ("wide", 10, 3.4), ("base", 90, 3.0), ("wide", 90, 2.8))
    ]
    expected = tmp_path / "expected.yaml"
    expected.write_text(json.dumps({"figures": figures}))
    rows = [row for row in compare_sweep(read_sweep(path), expected=expected).paper if row.group == "wide"]
    assert [row.paper_difference for row in rows] == pytest.approx([-0.1, -0.2])


@pytest.mark.parametrize(
    "content",
    [
        "figures: 3",
        "figures: [{run: a}]",
        "figures: [{run: a, metric: ppl, value: x}]",
        "figures: [{run: a, metric: ppl, value: 0}]",
        "figures: [{run: a, metric: loss, value: .nan}]",
        "{conditions: [1], figures: []}",
    ],
)
def test_a_broken_expected_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "expected.yaml").write_text(content)
    with pytest.raises(InputError, match="expected.yaml"):
        read_expected(tmp_path / "expected.yaml")
