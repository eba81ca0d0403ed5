"""On PYTHONPATH of a launched process: training that takes no torch and behaves as the run's name says.

`crash` raises at step 3, `killed` dies by SIGKILL at step 3 of its first attempt, `bad` is refused; FAKE_STEP_SECONDS
is the length of a step. A step counts as saved when it is done. While the file FAKE_HOLD is there, runs whose name fits
the pattern in it wait after step 3: a test is as fast as the machine, and not faster.
"""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import time
from pathlib import Path

import olmo_ext.training.train as real
from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import MetricsRow, RunDirectory


def is_held(name):
    try:
        return fnmatch.fnmatchcase(name, Path(os.environ["FAKE_HOLD"]).read_text())
    except (KeyError, FileNotFoundError):
        return False


def train(config, *, run_directory, progress=None, extend=False, stop=None):
    directory = RunDirectory(run_directory)
    state = directory.read_state()
    name, steps = config.run_name, config.max_duration
    if state.status == "done":
        return 0
    if "bad" in name:
        raise InputError("no such data", where="data.paths")
    first = int(os.environ.get("RANK", "0")) == 0
    world = int(os.environ.get("WORLD_SIZE", "1"))
    state.attempt += 1
    state.status, state.max_steps, state.reason, state.pid = "running", steps, "", os.getpid()
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    state.slurm_job = f"{job}_{task}" if job else os.environ.get("SLURM_JOB_ID")
    if first:
        directory.write_state(state)
        directory.append_metrics(MetricsRow(kind="attempt", attempt=state.attempt, step=state.step, time=time.time()))
        (directory.path / "world_size").write_text(str(world))
        (directory.path / "environment").write_text(json.dumps(dict(os.environ)))
        with open(directory.path / "processes", "a") as file:
            file.write(f"{os.getpid()}\n")
    for step in range(state.step + 1, steps + 1):
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0.05")))
        while step > 3 and is_held(name) and not (stop is not None and stop.is_set):
            time.sleep(0.05)
        if step == 3 and "crash" in name:
            raise RuntimeError("a deterministic crash")
        if step == 3 and "killed" in name and state.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not first:
            if stop is not None and stop.is_set:
                return 75
            continue
        state.step = step
        values = {"train/CrossEntropyLoss": 1 / step}
        directory.append_metrics(
            MetricsRow(kind="train", attempt=state.attempt, step=step, tokens=step * 8, time=time.time(), values=values)
        )
        if stop is not None and stop.is_set:
            state.status, state.reason = "requeued", stop.reason
            directory.write_state(state)
            return 75
    if first:
        state.status = "done"
        directory.write_state(state)
    Path(run_directory, "order-of-work").write_text(str(time.time()))
    return 0


real.train = train
