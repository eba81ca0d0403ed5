"""Runs logged the way the trainer does it, for the tests of W&B: attempts that overlap, offline or online."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from olmo_ext.base.run_directory import MetricsRow, RunDirectory, RunState
from olmo_ext.weights_and_biases import offline_file

CONFIG: dict[str, Any] = {
    "run_name": "small",
    "seed": 1,
    "model": {"d_model": 64, "n_layers": 2},
    "wandb": {"project": "shapes", "entity": None, "group": None, "name": None, "tags": ["test"], "log_interval": 1},
}
SHAPE: dict[str, Any] = {
    "d_model": 64,
    "n_layers": 2,
    "layers": [
        {
            "ffn": {"type": "hourglass", "d_ff": [32, 32], "activation": "swiglu"},
            "attention": {"type": "softmax", "n_heads": 4, "n_kv_heads": 4, "head_dim": 16},
        }
    ]
    * 2,
    "parameters": {"attention": 32768, "ffn": 24576, "non_embedding": 57344, "total": 100000},
    "flops_per_token": {"forward": 1e6, "training": 3e6, "training_causal": 2.5e6},
}
LOSS = "train/CrossEntropyLoss"


def make(path: Path, *, wandb: bool = True) -> RunDirectory:
    """The folder of a run that was set up and not started."""
    run = RunDirectory(path)
    run.write_config(CONFIG if wandb else {**CONFIG, "wandb": None})
    run.write_shape(SHAPE)
    run.write_provenance({"code": {"version": "0"}, "data": {"fingerprint": "f"}})
    return run


def row(attempt: int, step: int, offset: float = 0.0) -> MetricsRow:
    """What the trainer writes for a step; `offset` makes the values of an attempt its own."""
    return MetricsRow(
        kind="train",
        attempt=attempt,
        step=step,
        tokens=step * 1000,
        flops=step * 1e9,
        seconds=step * 0.5,
        time=1_790_000_000.0 + step,
        values={LOSS: 5.0 - 0.1 * step + offset, "throughput/tokens_per_second": 1000.0 + attempt},
    )


def attempt(
    run: RunDirectory,
    number: int,
    steps: range,
    *,
    offset: float = 0.0,
    state: str = "done",
    log: bool = True,
    kill=False,
) -> Any:
    """One attempt in this process: metrics.jsonl, W&B and state.json. Returns the W&B run."""
    from olmo_ext.weights_and_biases import live_run as wandb_run

    logger: Any = wandb_run.NullRun()
    if log:
        logger = wandb_run.start(
            run.read_config(),
            run_directory=run,
            shape=run.read_shape(),
            provenance=run.read_provenance(),
            sweep="sweep",
            attempt=number,
        )
    run.append_metrics(MetricsRow(kind="attempt", attempt=number, step=steps.start - 1))
    for step in steps:
        line = row(number, step, offset)
        run.append_metrics(line)
        logger.log(line.values, step=step, tokens=line.tokens, flops=line.flops, when=line.time)
    if log:
        # Starting wandb takes as long as the machine needs; the limits of `finish` are not for that.
        logger._writer.became_ready.wait(120)
    if not kill:
        logger.finish(0)
    run.write_state(RunState(status=state, attempt=number, step=steps.stop - 1))
    return logger


def gone_within(pid: int, seconds: float) -> bool:
    """Whether a process has ended by then, its parent's leave taken or not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def framed(data: bytes, record: bytes) -> bytes:
    """An offline file's bytes with one more record, framed by LevelDB's rules and not by the code under test."""
    first, left = True, record
    while True:
        room = offline_file.BLOCK - len(data) % offline_file.BLOCK
        if room < 7:
            data += b"\0" * room
            continue
        part, left = left[: room - 7], left[room - 7 :]
        kind = (1 if not left else 2) if first else (4 if not left else 3)
        data += offline_file.HEADER.pack(zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
        first = False
        if not left:
            return data


def add_system_record(path: Path, *, seconds: int, watts: float) -> None:
    """What wandb samples every 15 seconds, at a time of the test's choosing."""
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    record.stats.timestamp.seconds = seconds
    record.stats.item.add(key="gpu.0.powerWatts", value_json=json.dumps(watts))
    path.write_bytes(framed(path.read_bytes(), record.SerializeToString()))


def command(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Call `olmo-ext` as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "olmo_ext", *arguments],
        env={**os.environ, "WANDB_MODE": "online", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def compare_with_golden(name: str, content: object) -> None:
    """Compare whole: a missing or an extra line fails. UPDATE_GOLDEN=1 writes the file instead, to be read and
    committed."""
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    path = Path(__file__).parents[1] / "golden" / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    expected = path.read_text()
    difference = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), lineterm="", n=2))
    assert expected == text, difference


def sweep_file(folder: Path, names: list[str]) -> None:
    runs = [{"name": name, "group": name, "seed": 1, "values": {}} for name in names]
    (folder / "sweep.json").write_text(json.dumps({"name": folder.name, "baseline": names[0], "runs": runs}))
