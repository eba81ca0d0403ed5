"""Profiler traces of a few steps, in the run's folder; upstream's profiler sorts by CUDA time and needs a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("olmo_ext.training")

WAIT, WARMUP, ACTIVE = 1, 1, 3
"""Steps that are passed over, profiled for nothing, and written."""


def torch_profiler(folder: Path, device: torch.device) -> Any:
    """A profiler that writes `profiler/step<N>.chrome_trace.json.gz` and a table of the costliest operations."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=32)
        (folder / f"step{profiler.step_num}.txt").write_text(table)
        trace = folder / f"step{profiler.step_num}.chrome_trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        log.info("profiler trace in %s", trace)

    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=write,
    )
