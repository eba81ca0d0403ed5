"""From names of tasks to results: what each needs is checked first, then one runs after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from olmo_ext.base.errors import InputError
from olmo_ext.evals.results import Result, write_results
from olmo_ext.evals.target import Share, Target
from olmo_ext.evals.tasks import Evaluation, EvaluationOptions, require_files, tasks_asked


def evaluate(
    target: Target, options: EvaluationOptions, *, say: Callable[[str], None] = lambda message: None
) -> list[Result]:
    """Every task of one target; rows go into the run's `evals/` after each, so that a kill loses little.

    :raises InputError: naming what is missing or unknown, before anything is computed.
    """
    require_files(options)
    evaluation = Evaluation(target=target, options=options, say=say)
    asked = tasks_asked(options)
    for task, names in asked:
        task.check(names, evaluation)
    for task, names in asked:
        for results in task.run(names, evaluation):
            if target.model.precision != "fp32":
                # Other numbers than those of fp32: compared as equal, rounding would pass for a difference of models.
                precision = target.model.precision
                results = [replace(row, task_version=f"{row.task_version}/{precision}") for row in results]
            evaluation.results.extend(results)
            if target.run is not None and Share.current().rank == 0:
                rows = [row.row(step=target.step, checkpoint_sha256=target.checkpoint_sha256) for row in results]
                write_results(target.run.evals / f"{task.file or task.name}.jsonl", rows)
    return evaluation.results


def pick_device(name: str) -> str:
    """`auto` is the GPU where there is one, a rank's own where torchrun started several.

    :raises InputError: for a device that is not here.
    """
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device {name!r}", where="--device", right="auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device here", where="--device", right="cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise InputError(f"no device {name!r} here", where="--device", right=f"cuda:0 to cuda:{last}")
    return name
