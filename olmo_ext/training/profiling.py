"""Profiler traces of a few steps, in the run's folder; upstream's profiler sorts by CUDA time and needs a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("olmo_ext.training")

WAIT, WARMUP, ACTIVE = 1, 1, 3
"""Steps before the profiler starts, steps that it discards while it warms up, and steps in the trace."""


def torch_profiler(folder: Path, device: torch.device, *, step: Callable[[], int]) -> Any:
    """A profiler that writes `step<N>.chrome_trace.json.gz` and a table of the costliest operations, `step<N>.txt`.

    :param step: says the run's step N; the profiler's own count begins again at each restart, whose trace would replace
        the one that is there.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=32)
        (folder / f"step{step()}.txt").write_text(table)
        trace = folder / f"step{step()}.chrome_trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        log.info("profiler trace in %s", trace)

    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=write,
    )
