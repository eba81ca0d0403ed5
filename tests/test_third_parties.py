"""A taper, a scheduler and an evaluation task of somebody else's, each in one file outside the package and reached by
`plugins:` alone, through the commands as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FIXTURES = Path(__file__).parent / "fixtures"
YAML = """\
plugins: [power_taper, halving_scheduler, repetition_task]
model:
  d_model: 16
  n_layers: 3
  n_heads: 2
  rope: true
  weight_tying: false
  include_bias: false
  layer_norm_type: rms
  init_fn: normal
  vocab_size: 320
  embedding_size: 320
  max_sequence_length: 16
  ffn: {d_ff: 32, taper: {schedule: power, exponent: 3, start: 1.5, end: 0.5, multiple_of: 1}}
data: {paths: [tokens.bin], memmap_dtype: uint16}
tokenizer: {identifier: tokenizer.json}
optimizer: {name: adamw, learning_rate: 0.01}
scheduler: {name: halving, every: 2, t_warmup: 2}
precision: fp32
max_duration: 6
global_train_batch_size: 4
device_train_microbatch_size: 4
save_interval: 6
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{FIXTURES}:{os.environ.get('PYTHONPATH', '')}"}
    whole = [sys.executable, "-m", "olmo_ext", *arguments]
    return subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def shown(folder: Path, *arguments: str) -> str:
    done = command(folder, *arguments)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from olmo_ext.data.tokenizer import train_bpe

    path = tmp_path_factory.mktemp("third-parties")
    (path / "tokenizer.json").write_text(train_bpe(["one and two and three"], vocab_size=320).to_json_text())
    np.random.default_rng(0).integers(2, 200, size=40 * 16).astype(np.uint16).tofile(path / "tokens.bin")
    (path / "tiny.yaml").write_text(YAML)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    shown(folder, "train", "tiny.yaml", "--run-directory", "run")
    return folder / "run"


def test_plan_and_training_have_the_tapers_widths_and_the_schedulers_rates(folder: Path, run: Path) -> None:
    plan: dict[str, Any] = json.loads(shown(folder, "plan", "tiny.yaml", "--json"))
    widths = [layer["ffn"]["d_ff"] for layer in json.loads((run / "shape.json").read_text())["layers"]]
    # The middle of three layers would have 0.5 + 0.125 of 32, and the widths sum up to what the rule says, 84.
    assert widths == [[48], [20], [16]]
    assert json.dumps(widths[1])[1:-1] in json.dumps(plan)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["values"]["optim/learning_rate"] for row in rows if row["kind"] == "train"}
    # Step 1 is half of the warm-up from a tenth of the rate; then 0.01 for two steps, half of it for two, and so on.
    assert rates == pytest.approx({1: 0.0055, 2: 0.01, 3: 0.01, 4: 0.005, 5: 0.005, 6: 0.0025})


def test_the_task_is_found_through_the_run_and_its_rows_are_in_the_run(folder: Path, run: Path) -> None:
    shown(folder, "eval", "run", "--tasks", "repetition", "--option", "repetition.items=8")
    (row,) = [json.loads(line) for line in (run / "evals" / "repetition.jsonl").read_text().splitlines()]
    assert (row["task"], row["metric"], row["items"], row["step"]) == ("repetition", "acc", 8, 6)
    assert "repetition" in shown(folder, "eval", "--plugins", "repetition_task", "--list-tasks").splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "tiny.yaml", "model.ffn.taper.exponent=-1"), "exponent -1 is not positive"),
        (("plan", "tiny.yaml", "model.ffn.taper.schedule=powr"), "did you mean 'power'?"),
        (("plan", "tiny.yaml", "model.ffn.taper.schedule=cosine"), "belongs to schedule power; set an inherited one"),
        (("plan", "tiny.yaml", "scheduler.every=0"), "every 0 is not positive"),
        (("plan", "tiny.yaml", "scheduler.name=halvin"), "unknown scheduler 'halvin'; did you mean 'halving'?"),
        (("plan", "tiny.yaml", "scheduler.name=constant"), "belongs to scheduler halving; set an inherited one"),
        (("eval", "run", "--tasks", "repetitoin"), "unknown task 'repetitoin'; did you mean 'repetition'?"),
        (("eval", "run", "--tasks", "repetition", "--option", "repetition.item=8"), "no option 'item'; known: items"),
        (("eval", "run", "--tasks", "repetition", "--option", "repetitoin.items=8"), "did you mean 'repetition'?"),
    ],
)
def test_wrong_names_and_options_are_one_line(
    folder: Path, run: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = command(folder, *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_solve_takes_the_taper_and_writes_its_options(folder: Path) -> None:
    shown(
        folder, *"solve --plugin power_taper --base tiny.yaml --non-embedding 10K --layers 3 --d-model 16".split(),
        *"--heads 2 --taper power:1.5:0.5:3 --taper-multiple-of 1 --tolerance 50% --yaml solved.yaml".split(),
    )  # fmt: skip
    assert "exponent: 3" in (folder / "solved.yaml").read_text()
