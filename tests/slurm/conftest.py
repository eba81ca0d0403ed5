"""A real Slurm on this machine, and projects whose runs are submitted to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.base.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[2]
FAKE_TRAINING = REPOSITORY / "tests" / "launch" / "fake_training"

CONFIG = """
model: {d_model: 32, n_heads: 2, n_layers: 2, max_sequence_length: 16, vocab_size: 256, embedding_size: 256,
        eos_token_id: 255, pad_token_id: 254, ffn: {d_ff: 64}, include_bias: false, weight_tying: false, rope: true}
tokenizer: {identifier: none}
optimizer: {name: adamw, learning_rate: 1e-3}
scheduler: {name: constant}
precision: fp32
compile: null
data: {paths: [tokens.bin], memmap_dtype: uint16, num_workers: 0, pin_memory: false, prefetch_factor: null,
       persistent_workers: false}
evaluators:
  - label: validation
    type: lm
    subset_num_batches: 2
    data: {paths: [tokens.bin], memmap_dtype: uint16, num_workers: 0, pin_memory: false, prefetch_factor: null,
           persistent_workers: false, drop_last: true}
device_eval_batch_size: 4
eval_interval: 1000000
save_interval: 1000000
console_log_interval: 50
max_duration: 10
global_train_batch_size: 8
device_train_microbatch_size: 8
"""
SITE = """
SBATCH_PARTITION_B200=b200
SBATCH_PARTITION_RTX6000ADA=ada
SBATCH_PARTITION_CPU=ada
GPU_TYPE_B200=b200
PYTHON={python}
OMP_NUM_THREADS=1
CUDA_VISIBLE_DEVICES=
HF_HUB_OFFLINE=1
"""


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """The environment that talks to the cluster."""
    # Not under pytest's folders: munged wants every folder above its socket to be searchable by all.
    directory = Path(tempfile.mkdtemp(prefix="olmo-ext-slurm-", dir="/tmp"))
    directory.chmod(0o755)
    script = str(REPOSITORY / "scripts" / "slurm_cluster.sh")
    up = subprocess.run([script, "up", str(directory)], capture_output=True, text=True, timeout=90)
    assert up.returncode == 0, up.stderr
    environment = (directory / "env.sh").read_text()
    match = re.search(r"SLURM_CONF=(\S+)", environment)
    assert match
    os.environ["SLURM_CONF"] = match[1]
    yield {**os.environ}
    subprocess.run([script, "down", str(directory)], check=True, timeout=120)
    del os.environ["SLURM_CONF"]
    shutil.rmtree(directory, ignore_errors=True)


def queued_jobs() -> dict[str, str]:
    """Job or `ARRAY_TASK` -> state."""
    listing = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i %T"], capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in listing.stdout.splitlines())


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], check=True)


@contextmanager
def nodes_down(nodes: str, *, partition: str) -> Iterator[None]:
    """Take nodes away; they count again when this is left: sinfo says so before sbatch does."""
    scontrol("update", f"nodename={nodes}", "state=down", "reason=test")
    try:
        yield
    finally:
        scontrol("update", f"nodename={nodes}", "state=resume")
        asked = ["sbatch", "--test-only", f"--partition={partition}", f"--nodelist={nodes}", "--wrap=true"]
        wait_until(lambda: subprocess.run(asked, capture_output=True).returncode == 0, f"{nodes} to be counted", 60)


def wait_until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.2)


class Project:
    """A folder with slurm/, a config and its data, as a user has it."""

    def __init__(self, path: Path, environment: dict[str, str], *, fake: bool) -> None:
        self.path, self.environment = path, environment
        path.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "olmo_ext", "slurm", "init", path], check=True, stdout=subprocess.DEVNULL)
        self.fake = f"PYTHONPATH={FAKE_TRAINING}\nFAKE_STEP_SECONDS=0.2\nFAKE_HOLD={path}/hold\n"
        self.site(self.fake if fake else "")
        (path / "base.yaml").write_text(CONFIG)
        ids = np.random.default_rng(0).integers(0, 250, 1 << 17)
        ids.astype(np.uint16).tofile(path / "tokens.bin")

    def site(self, more: str) -> None:
        (self.path / "slurm" / "site.env").write_text(SITE.format(python=sys.executable) + more + "\n")

    def hold(self, names: str = "*") -> None:
        """From step 3 the fake runs of these names wait, until they are asked to stop or `release` is called."""
        self.write("hold", names)

    def release(self) -> None:
        (self.path / "hold").unlink()

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def olmo_ext(self, *arguments: str, check: bool = True, **more: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "olmo_ext", *arguments],
            cwd=self.path,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def launch(self, sweep: str, *arguments: str, check: bool = True, **more: str) -> subprocess.CompletedProcess:
        return self.olmo_ext("launch", sweep, "--on", "b200", "--gpus", "1", *arguments, check=check, **more)

    def sbatch(self, *arguments: str) -> str:
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], cwd=self.path, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, name: str) -> RunDirectory:
        """`sweep/run`."""
        return RunDirectory(self.path / "runs" / name)

    def attempts(self, name: str) -> list[tuple[int, int]]:
        """(attempt, restored step) of every start."""
        return [(row.attempt, row.step) for row in self.run(name).read_all_metrics() if row.kind == "attempt"]

    def events(self, name: str) -> list[dict]:
        path = self.run(name).path / "slurm-attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verdicts(self, name: str) -> list[str]:
        return [event["verdict"] for event in self.events(name) if event["event"] == "end"]

    def job(self, name: str) -> str:
        """The job of a run, `ARRAY_TASK`."""
        return next(event["job"] for event in reversed(self.events(name)) if event["job"])

    def wait_for_step(self, name: str, step: int, *, attempt: int = 1, seconds: float = 90) -> None:
        def reached() -> bool:
            assert self.run(name).read_state().status != "failed", self.run(name).read_state().reason
            rows = self.run(name).read_all_metrics()
            return any(row.kind == "train" and row.attempt == attempt and row.step >= step for row in rows)

        wait_until(reached, f"step {step} of attempt {attempt} of {name}", seconds)

    def wait_until_gone(self, *sweeps: str, seconds: float = 180) -> None:
        """Until no job of the sweeps is queued or running."""
        from olmo_ext.launch.slurm_queue import read_submissions

        jobs = {entry["job"] for sweep in sweeps for entry in read_submissions(self.path / "runs" / sweep)}
        assert jobs
        wait_until(lambda: not any(j.partition("_")[0] in jobs for j in queued_jobs()), f"{sweeps} to end", seconds)

    def logs(self) -> str:
        """Everything that jobs have written, for the message of a failing test."""
        texts = [f"== {path}\n{path.read_text(errors='replace')}" for path in sorted(self.path.rglob("*.log"))]
        return "\n".join(texts)[-20000:]


@pytest.fixture
def project(tmp_path: Path, cluster: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Project]:
    """A project whose training is played by a fake; `project_with_training` really trains."""
    made = Project(tmp_path / "project", cluster, fake=True)
    yield made
    _end(made, request)


@pytest.fixture
def project_with_training(tmp_path: Path, cluster: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Project]:
    made = Project(tmp_path / "project", cluster, fake=False)
    yield made
    _end(made, request)


def _end(project: Project, request: pytest.FixtureRequest) -> None:
    subprocess.run(["scancel", f"--user={os.getuid()}"], check=False, env=project.environment)
    wait_until(lambda: not queued_jobs(), "the queue to be empty", 60)
    # Shown by pytest for a failing test only.
    print(project.logs())
