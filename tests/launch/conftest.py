"""A Slurm that only writes down what it is asked, and a sweep to launch on it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from olmo_ext.launch.launch_command import launch as launch_command

CONFIG = """
model: {d_model: 64, n_heads: 4, n_layers: 2, max_sequence_length: 8, vocab_size: 256, embedding_size: 256,
        ffn: {d_ff: 128}}
tokenizer: {identifier: none}
data: {paths: [tokens.bin], memmap_dtype: uint16}
max_duration: 5
global_train_batch_size: 8
device_train_microbatch_size: 1
"""
FAKES = {
    "sbatch": """#!/bin/bash
case " $* " in *" --test-only "*)
  [ -e "$FAKE/refuse-test" ] || exit 0
  cat "$FAKE/refuse-test" >&2
  [ ! -e "$FAKE/once" ] || rm "$FAKE/refuse-test"
  exit 1 ;;
esac
[ ! -e "$FAKE/hangs" ] || exec sleep 30
printf '%s\\n' "$@" "" >> "$FAKE/asked"
env | sort > "$FAKE/environment"
count=$(grep -c -- --parsable "$FAKE/asked")
if [ -e "$FAKE/refuse" ] && [ "$count" -ge 2 ]; then echo "sbatch: error: QOSMaxSubmit" >&2; exit 1; fi
echo $((100 + count))
""",
    "squeue": """#!/bin/bash
[ -z "$SQUEUE_STATES" ] || exit 0
[ ! -e "$FAKE/no-answer" ] || exit 1
[ ! -e "$FAKE/queue" ] || cat "$FAKE/queue"
""",
    "scontrol": """#!/bin/bash
echo "MaxArraySize            = ${MAX_ARRAY_SIZE:-1001}"
""",
    "sinfo": """#!/bin/bash
case " $* " in *" --Node "*) cat "$FAKE/nodes" 2>/dev/null; exit ;; esac
echo "b200*|up|1-00:00:00"
""",
    # The machine's own would look for its cluster.
    "sacctmgr": "#!/bin/bash\n",
    "scancel": """#!/bin/bash
echo "$*" >> "$FAKE/cancelled"
""",
}


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with six runs, and a Slurm that only writes down what it is asked."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "sweep.yaml").write_text(
        "base: base.yaml\naxes: {optimizer.learning_rate: [1e-3, 2e-3, 3e-3]}\nseeds: [1, 2]"
    )
    np.arange(256, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def invoke(*arguments: str, fails: type[Exception] | None = None) -> str:
    result = CliRunner().invoke(launch_command, ["sweep.yaml", "--on", "b200", *arguments], catch_exceptions=True)
    if fails is None:
        assert result.exception is None or result.exit_code == 0, result.output + repr(result.exception)
        return result.output
    assert isinstance(result.exception, fails), result.output
    return str(result.exception)


def submitted(folder: Path) -> list[list[str]]:
    path = folder / "asked"
    return [part.splitlines() for part in path.read_text().split("\n\n") if part.strip()] if path.exists() else []


def option(command: list[str], name: str) -> str | None:
    return next((word.partition("=")[2] for word in command if word.startswith(f"--{name}=")), None)
