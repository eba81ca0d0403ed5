"""Copies of a sweep's metrics: the same comparison, without the machine; and the ones in examples/."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.cli import cli

from .synthetic import make_sweep

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/sweep.json"))


def copy(sweep: Path, target: Path, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "copy_metrics.py"), str(sweep), str(target)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def compared(path: Path, *options: str) -> dict:
    result = CliRunner().invoke(cli, ["compare", str(path), "--json", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    groups = {"conventional": {"steps": 20, "evaluations": 4, "final": [3.0, 3.02, 3.01]}}
    groups["hourglass"] = {"steps": 20, "evaluations": 4, "final": [2.9, 2.92, 2.91]}
    path = make_sweep(tmp_path / "runs" / "demo", groups, baseline="conventional")
    provenance = path / "hourglass-s1" / "provenance.json"
    command = [f"{tmp_path}/bin/olmo-ext", "/opt/place/x.yaml"]
    content = json.loads(provenance.read_text()) | {"host": "login3", "command": command}
    provenance.write_text(json.dumps(content))
    return path


def test_a_copy_compares_as_the_runs_do_and_does_not_name_the_machine(sweep: Path, tmp_path: Path) -> None:
    result = copy(sweep, tmp_path / "kept", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    there, here = compared(sweep), compared(tmp_path / "kept")
    assert here["groups"] == there["groups"]
    text = "".join(path.read_text() for path in (tmp_path / "kept").rglob("*.*"))
    assert "login3" not in text and str(tmp_path) not in text and "/opt/place" not in text
    assert '"bin/olmo-ext"' in text and '"x.yaml"' in text


def test_runs_that_are_not_finished_are_named_and_come_with_a_later_call(sweep: Path, tmp_path: Path) -> None:
    state = sweep / "hourglass-s2" / "state.json"
    done = state.read_text()
    state.write_text(json.dumps(json.loads(done) | {"status": "running"}))
    first = copy(sweep, tmp_path / "kept", cwd=tmp_path)
    assert "left out: hourglass-s2 (running)" in first.stdout and not (tmp_path / "kept" / "hourglass-s2").exists()
    state.write_text(done)
    assert "left out" not in copy(sweep, tmp_path / "kept", cwd=tmp_path).stdout
    assert (tmp_path / "kept" / "hourglass-s2" / "metrics.jsonl").exists()


def test_a_copy_is_never_overwritten_with_something_else(sweep: Path, tmp_path: Path) -> None:
    copy(sweep, tmp_path / "kept", cwd=tmp_path)
    before = (tmp_path / "kept" / "hourglass-s1" / "metrics.jsonl").read_text()
    with open(sweep / "hourglass-s1" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "train", "attempt": 1, "step": 99, "values": {}}) + "\n")
    result = copy(sweep, tmp_path / "kept", cwd=tmp_path)
    assert result.returncode == 2 and "hourglass-s1/metrics.jsonl" in result.stderr
    assert (tmp_path / "kept" / "hourglass-s1" / "metrics.jsonl").read_text() == before


def as_printed(difference: dict) -> str:
    mean, low, high = (f"{difference[key]:+.3f}".replace("-", "−") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_committed_example_is_whole_and_its_results_stand_in_the_readme(example: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for group in compared(example)["groups"]:
        assert group["seeds_finished"] == group["seeds_asked"] and not group["not_compared_because"], group["group"]
        if (difference := group["difference_nats"]) is not None:
            row = f"| {group['loss']:.3f} | {as_printed(difference)} | {group['p_holm']:.3f} |"
            assert row in readme, group["group"]


def test_every_interval_that_the_readme_prints_is_one_of_the_examples() -> None:
    found = set()
    printed_baselines = {"shapes": ["conventional"], "mixers": ["conventional", "gated", "hope", "titans"]}
    for example, baselines in printed_baselines.items():
        for baseline in baselines:
            for group in compared(ROOT / "examples" / example, "--baseline", baseline)["groups"]:
                views = [view["difference"] for view in group["views"].values()]
                known = [x for x in [group["difference_nats"], *views] if x and x["low"] is not None]
                found |= {as_printed(difference) for difference in known}
    number = r"[+−]\d\.\d{3}"
    text = " ".join((ROOT / "README.md").read_text().split())
    printed = re.findall(rf"{number} \[{number}, {number}\]", text)
    assert len(printed) > 8 and set(printed) <= found, set(printed) - found
