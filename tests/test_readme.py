"""Every command of the README runs, in its order, at sizes of seconds; every file it names is there.

`make demo`, `make test` and `pip install` are run by .ci/run from a clean checkout: here it is only held that they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from olmo_ext.base import sections as own
from olmo_ext.base import upstream_sections as upstream
from olmo_ext.config.run_config import load_run_config
from olmo_ext.config.sweep import SWEEP_WORDS, load_sweep
from olmo_ext.data.sources import load_source
from olmo_ext.evals.built_in import Lambada, Perplexity
from olmo_ext.launch.slurm_site import NODES_FILE, packaged_names
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES

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
    if "--prepare" in command:
        command += f" --mirror {scratch / 'sets'}"
    if "--on b200" in command and "--dry-run" not in command:
        command += " --dry-run"
    return command


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader's checkout looks like: configs, scripts, and the files that the README writes."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "examples", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
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
    for file in (*Perplexity.files, *Lambada.files):
        target = folder / "sets" / file.name
        target.parent.mkdir(exist_ok=True)
        generator.integers(0, 100_000, 4096, dtype=np.uint32).tofile(target)
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )


@pytest.mark.timeout(2400)
def test_every_command_of_the_readme_runs_in_its_order(scratch: Path) -> None:
    for command in COMMANDS:
        if command in IN_CI or command.startswith("sbatch"):
            continue
        done = run(smoke(command, scratch), scratch)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert (scratch / "report.html").stat().st_size > 10_000
    assert (scratch / "exported" / "config.json").is_file()


def block_that_begins(words: str) -> str:
    (found,) = [text for kind, text in BLOCKS if kind == "yaml" and text.startswith(words)]
    return found


def test_the_reference_of_our_keys_is_complete_and_loads() -> None:
    block = block_that_begins("extends: [")
    tree = yaml.safe_load(block)
    sections = {
        "TrainConfig": tree, "ModelConfig": tree["model"], "DataConfig": tree["data"], "BudgetSection": tree["budget"],
        "FFNSection": tree["model"]["ffn"], "TaperSection": tree["model"]["ffn"]["taper"],
        "AttentionSection": tree["model"]["attention"],
    }  # fmt: skip
    for name, told in sections.items():
        theirs = {field.name for field in dataclasses.fields(getattr(upstream, name, own.OpenSection))}
        assert {field.name for field in dataclasses.fields(getattr(own, name))} - theirs <= set(told), name
    for name in ("hourglass", "conventional", "hope", "softmax", "gated", "titans"):
        assert name in (*FFN_TYPES, *ATTENTION_TYPES) and name in block
    del tree["extends"], tree["plugins"], tree["data"]["corpus"]
    shape = load_run_config(tree, check_budget_too=False).shape
    assert (shape.layers[0].ffn.d_ff, shape.layers[-1].ffn.d_ff) == ((192, 192), (64, 64))


def test_the_reference_of_a_sweep_is_complete_and_loads(tmp_path: Path) -> None:
    block = block_that_begins("name: widths")
    assert set(SWEEP_WORDS) <= set(yaml.safe_load(block))
    first = block_that_begins("# my-shape.yaml").replace("configs/", f"{ROOT}/configs/")
    (tmp_path / "my-shape.yaml").write_text(first)
    (tmp_path / "base.yaml").write_text(f"extends: {ROOT}/configs/smoke/conventional.yaml\n")
    (tmp_path / "widths.yaml").write_text(block)
    assert len(load_sweep(tmp_path / "widths.yaml", ["data.corpus=null"]).runs) == (2 * 2 + 1) * 3


def test_what_takes_a_clean_machine_is_run_by_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert all(command in COMMANDS for command in IN_CI)
    for words in ("demo", "test", "pip"):
        assert words in script


def test_what_needs_a_cluster_is_submitted_by_the_slurm_tests() -> None:
    submitted = "".join(path.read_text() for path in (ROOT / "tests" / "slurm").glob("*.py"))
    for command in COMMANDS:
        if command.startswith("sbatch"):
            script = Path(next(word for word in command.split() if word.endswith(".sbatch")))
            assert (
                script.name in packaged_names()
                and f'"{script.stem}"' in submitted
                and "slurm/{node}.sbatch" in submitted
            )


def test_every_file_the_readme_and_the_guide_name_is_there() -> None:
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    for name in set(re.findall(r"\b(?:configs|scripts|slurm|examples|olmo_ext|tests)/[\w./-]+\w", text)):
        generated = {f"slurm/{file}" for file in ("site.env", NODES_FILE, *packaged_names())}
        assert (ROOT / name).exists() or name in generated, name
