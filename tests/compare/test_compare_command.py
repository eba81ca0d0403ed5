"""`olmo-ext compare`: table, JSON, CSV, report, figures, events; one line for bad input."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from olmo_ext.cli import cli, main
from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.table import CSV_HEADER

from .synthetic import make_sweep

SHORT: dict[str, Any] = {"steps": 20, "evaluations": 4}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    groups = {
        "conventional": {**SHORT, "final": [3.0, 3.02, 2.99]},
        "hourglass": {**SHORT, "final": [2.9, 2.92, 2.895], "attempts": 2},
    }
    path = tmp_path_factory.mktemp("runs") / "demo"
    return make_sweep(path, groups, baseline="conventional", skip=("hourglass-s3",))


def _compare(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_the_table_has_a_row_per_group_with_the_difference_and_says_what_is_missing(sweep: Path) -> None:
    output = _compare(sweep).output
    row = next(line for line in output.splitlines() if line.startswith("hourglass  "))
    for part in ("2 of 3", "2.9100", "−0.1000 [−0.1000, −0.1000]", "20,000"):
        assert part in row
    assert "conventional (baseline)" in output
    assert "pending hourglass-s3, step 0" in output
    assert "do not cover data-order variance" in " ".join(output.split())


def test_json_holds_what_the_table_shows_and_nothing_else_is_printed(sweep: Path, tmp_path: Path) -> None:
    result = _compare(sweep, "--json", "-o", tmp_path / "report.html")
    content = json.loads(result.stdout)
    group = next(group for group in content["groups"] if group["group"] == "hourglass")
    assert group["difference_nats"]["mean"] == pytest.approx(-0.1)
    assert group["difference_nats"]["method"] == "t over paired seeds"
    assert group["seeds_finished"] == [1, 2] and group["seeds_asked"] == [1, 2, 3]
    assert group["seeds_needed"] == "unknown"
    assert [entry["run"] for entry in content["unfinished"]] == ["hourglass-s3"]
    assert (tmp_path / "report.html").is_file()


def test_csv_is_tidy_and_complete_and_shows_the_surviving_attempt(sweep: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(_compare(sweep, "--csv").stdout)))
    assert tuple(rows[0]) == CSV_HEADER
    runs = read_sweep(sweep, every_metric=True).runs
    assert len(rows) == sum(len(series) for run in runs for series in run.series.values())
    assert {row["metric"] for row in rows} >= {
        "train/CrossEntropyLoss",
        "optim/learning_rate",
        "eval/corpus/Perplexity",
    }
    assert max(float(row["value"]) for row in rows if row["metric"] == "train/CrossEntropyLoss") < 99
    last = [row for row in rows if row["run"] == "hourglass-s1" and row["metric"] == "eval/corpus/CrossEntropyLoss"][-1]
    assert (last["seed"], last["step"], float(last["value"])) == ("1", "20", pytest.approx(2.9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "--csv"), "both --json and --csv"),
        (("--baseline", "nothing"), "baseline 'nothing' is no group"),
        (("--validation", "wiki"), "no run has a validation set 'wiki'; one of: corpus"),
        (("--expected", "nowhere.yaml"), "nowhere.yaml: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    sweep: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(sweep), *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in error and error.count("\n") == 1


def test_another_baseline_turns_the_sign(sweep: Path) -> None:
    content = json.loads(_compare(sweep, "--json", "--baseline", "hourglass").stdout)
    group = next(group for group in content["groups"] if group["group"] == "conventional")
    assert group["difference_nats"]["mean"] == pytest.approx(0.1)


def test_figures_are_written_as_png_and_svg_the_same_each_time(sweep: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("one", "two"):
        _compare(sweep, "--figures", tmp_path / folder)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    names = {path.name for path in (tmp_path / "one").iterdir()}
    wanted = (
        "curves-tokens",
        "curves-flops",
        "curves-seconds",
        "differences",
        "pareto-flops",
        "pareto-speed",
        "widths",
    )
    assert names >= {f"{name}.{suffix}" for name in wanted for suffix in ("png", "svg")}
    assert (tmp_path / "one" / "widths.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    svg = (tmp_path / "one" / "curves-tokens.svg").read_text()
    assert ">hourglass<" in svg, "text stays text, so that a paper can restyle it"


def test_figures_leave_out_what_a_run_did_not_log_and_what_is_no_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups: dict[str, dict[str, Any]] = {
        "a": {**SHORT, "final": 3.0, "labels": ("corpus", "wiki")},
        "b": {**SHORT, "final": 2.9},
        "sick": {**SHORT, "final": float("nan"), "labels": ("corpus", "wiki")},
    }
    path = make_sweep(tmp_path / "s", groups, baseline="a", seeds=[1])
    _compare(path, "--validation", "wiki", "--figures", tmp_path / "out")
    assert (tmp_path / "out" / "curves-tokens.svg").is_file()


def test_tensorboard_events_carry_tokens_as_steps_and_the_shape_as_hyperparameters(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _compare(sweep, "--tensorboard", tmp_path / "events")
    events = EventAccumulator(str(tmp_path / "events" / "hourglass-s1"), size_guidance={"scalars": 0})
    events.Reload()
    written = events.Scalars("train/CrossEntropyLoss")
    series = read_sweep(sweep).runs[3].series["train/CrossEntropyLoss"]
    assert [event.step for event in written] == series.tokens.tolist()
    assert [event.value for event in written] == pytest.approx(series.value.tolist(), rel=1e-6)
    assert "_hparams_/session_start_info" in events.summary_metadata
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(sweep), "--tensorboard", str(tmp_path / "events")])
    assert stopped.value.code == 2 and "has event files already" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "module"), [("--figures", "matplotlib"), ("--tensorboard", "tensorboard")])
def test_a_missing_extra_is_named(
    sweep: Path,
    tmp_path: Path,
    option: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(sweep), option, str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert f"pip install 'olmo-ext[{option[2:]}]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
