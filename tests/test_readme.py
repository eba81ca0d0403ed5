"""Every command of the README runs, in its order, at sizes of seconds; every file it names is there.

`make demo`, `make test` and `pip install` are run by .ci/run from a clean checkout: here it is only held that they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.data.sources import load_source

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines() if line.strip()]
IN_CI = ("make demo", "make test", "pip install .")
PREFIX = "http://olmo-data.org/preprocessed/"
SHORT_RUN = " max_duration=3 scheduler.t_warmup=1 eval_interval=3 eval_subset_num_batches=2 save_interval=3"


def smoke(command: str, scratch: Path) -> str:
    """The same command at the size of a test, and without what no test machine has."""
    command = command.replace("--max-bytes 20MB", "--max-bytes 1MB").replace("--tokens 2.5B", "--tokens 2.2M")
    # Nothing is queued here: what was trained above stands in for the cluster's runs.
    command = command.replace("runs/hourglass-113m", "runs/my-sweep")
    if command.startswith(("olmo-ext train", "torchrun")) or "launch my-sweep" in command:
        command += SHORT_RUN
    if command.startswith("torchrun"):
        command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    if re.match(r"olmo-ext data (survey|fetch)", command):
        command += f" --map {PREFIX}={scratch / 'mirror'}/"
    if "--on b200" in command and "--dry-run" not in command:
        command += " --dry-run"
    return command


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader's checkout looks like: configs, scripts, slurm, and the files that the README writes."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "scripts", "slurm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("site.env", "__pycache__"))
    shutil.copy(ROOT / "README.md", folder)
    for kind, text in BLOCKS:
        if kind in ("yaml", "python") and (match := re.match(r"# (\S+)\n", text)):
            (folder / match[1]).write_text(text)
    # The official source in small: every file with one instance of 4,096 tokens.
    generator = np.random.default_rng(0)
    for path in {entry.removeprefix(PREFIX) for entry in load_source("olmo2-1b-stage1").paths}:
        target = folder / "mirror" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        generator.integers(0, 100_000, 4096, dtype=np.uint32).tofile(target)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


def test_every_command_of_the_readme_runs_in_its_order(scratch: Path) -> None:
    for command in COMMANDS:
        if command in IN_CI or command.startswith("sbatch"):
            continue
        done = run(smoke(command, scratch), scratch)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert (scratch / "report.html").stat().st_size > 10_000
    assert (scratch / "exported" / "config.json").is_file()


def test_what_takes_a_clean_machine_is_run_by_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert all(command in COMMANDS for command in IN_CI)
    for words in ("demo", "test", "pip"):
        assert words in script


def test_what_needs_a_cluster_is_submitted_by_the_slurm_tests() -> None:
    submitted = "".join(path.read_text() for path in (ROOT / "tests" / "slurm").glob("*.py"))
    for command in COMMANDS:
        if command.startswith("sbatch"):
            script = Path(command.split()[1])
            assert script.is_file() and f'"{script.stem}"' in submitted and "slurm/{node}.sbatch" in submitted


def test_every_file_the_readme_names_is_there() -> None:
    for name in set(re.findall(r"\b(?:configs|scripts|slurm|examples|olmo_ext)/[\w./-]+\w", README)):
        assert (ROOT / name).exists() or name == "slurm/site.env", name
