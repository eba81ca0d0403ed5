"""The chunked loss against the full one: head, cross-entropy and z-loss, forward and backward, in fp32 on the CPU.

    python benchmarks/chunked_loss.py [--repeats 5]

Time: both take turns in one process, medians. Memory: the peak that each adds to a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = ((4096, 64, 1024), (4096, 64, 4096), (4096, 256, 4096), (100_352, 256, 1024), (100_352, 256, 4096))
"""Entries, d_model, tokens."""

Z_MULTIPLIER = 1e-4


def losses(entries: int, d_model: int, tokens: int) -> dict[str, Any]:
    """One step of each loss, by name."""
    import torch
    import torch.nn.functional as F

    from olmo_ext.upstream.chunked_loss import chunked_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.nn.Linear(d_model, entries, bias=False)
    hidden = torch.randn(tokens, d_model, requires_grad=True)
    labels = torch.randint(0, entries, (tokens,))

    def clear() -> None:
        hidden.grad = head.weight.grad = None

    def full() -> None:
        logits = head(hidden)
        z_loss = Z_MULTIPLIER * logits.logsumexp(-1).pow(2).sum()
        (F.cross_entropy(logits, labels, reduction="sum") + z_loss).backward()

    def chunked() -> None:
        chunked_loss(hidden, head, labels, z_multiplier=Z_MULTIPLIER)[0].backward()

    return {"full": full, "chunked": chunked, "clear": clear}


def resident(key: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def peak(case: tuple[int, int, int], name: str) -> int:
    """Bytes that one step adds to this process at most."""
    steps = losses(*case)
    losses(64, 64, 64)[name]()  # what the first product allocates once
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    steps[name]()
    return resident("VmHWM") - before


def seconds(case: tuple[int, int, int], repeats: int) -> dict[str, float]:
    steps = losses(*case)
    times: dict[str, list[float]] = {"full": [], "chunked": []}
    for _ in range(repeats + 1):
        for name, kept in times.items():
            steps["clear"]()
            began = time.process_time()
            steps[name]()
            kept.append(time.process_time() - began)
    return {name: statistics.median(kept[1:]) for name, kept in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "LOSS"), help="measure this one here and print JSON")
    options = parser.parse_args()
    if options.peak:
        print(json.dumps(peak(CASES[int(options.peak[0])], options.peak[1])))
        return
    # A tight threshold gives large blocks back at once: the peak is then that of the tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
    print(" entries    d tokens   full s  chunked  ratio  full MiB  chunked")
    for number, case in enumerate(CASES):
        took = seconds(case, options.repeats)
        peaks = {}
        for name in ("full", "chunked"):
            command = [sys.executable, __file__, "--peak", str(number), name]
            answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            peaks[name] = json.loads(answer.stdout.splitlines()[-1]) / 2**20
        ratio = took["chunked"] / took["full"]
        print("{:8} {:4} {:6}".format(*case), f"{took['full']:8.3f} {took['chunked']:8.3f} {ratio:6.2f}", end=" ")
        print(f"{peaks['full']:9.0f} {peaks['chunked']:8.0f}")


if __name__ == "__main__":
    main()
