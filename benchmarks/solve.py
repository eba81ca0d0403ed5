"""Seconds of `solve`'s search and of `plan`, with how much they look at.

    python benchmarks/solve.py            # exits 1 beyond 2 s for the largest search or 1 s for the 16-run plan

The limits are those of the specification; every search runs three times in this process and the median counts. The plan
is the command as a user types it, start of Python included.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from olmo_ext.shapes.taper import Taper
from olmo_ext.solve.infeasible import obstacles
from olmo_ext.solve.problem import Problem
from olmo_ext.solve.search import search

ROOT = Path(__file__).resolve().parents[1]
SEARCH_LIMIT, PLAN_LIMIT = 2.0, 1.0
WIDE: dict[str, Any] = {"layers": tuple(range(2, 49)), "d_model": tuple(range(64, 4097, 16)), "ffn_type": "hourglass"}
SUBS = (1, 2, 3, 4, 6, 8)
PROBLEMS = {
    "45M/68M, K 4, L 6": Problem(
        quantity="non_embedding", target=113_250_000, layers=(6,), num_sub_mlps=(4,), multiple_of=2,
        d_model=tuple(range(1024, 2049, 8)), attention=(44.5e6, 45.5e6), ffn=(67.5e6, 68.5e6), ffn_type="hourglass",
    ),
    "non-embedding, all free": Problem(
        quantity="non_embedding", target=113_250_000, num_sub_mlps=SUBS, multiple_of=2, **WIDE
    ),
    "total, all free, 1074M": Problem(
        quantity="total", target=1_484_916_736, num_sub_mlps=SUBS, multiple_of=8, tolerance=0.01, **WIDE
    ),
    "training FLOPs, all free": Problem(
        quantity="training_flops_per_token", target=1_594_884_096, num_sub_mlps=SUBS, multiple_of=2, **WIDE
    ),
    "tapered, all free": Problem(
        quantity="non_embedding", target=113_250_000, num_sub_mlps=SUBS, multiple_of=16,
        taper=Taper(schedule="cosine", start=1.5, end=0.5), **WIDE,
    ),
}  # fmt: skip


def main() -> int:
    worst = 0.0
    print(f"{'search':28} {'candidates':>11} {'feasible':>10} {'seconds':>8} {'a second':>12}")
    for name, problem in PROBLEMS.items():
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            outcome = search(problem)
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds)
        worst = max(worst, median)
        rate = outcome.num_candidates / median
        print(f"{name:28} {outcome.num_candidates:>11,} {outcome.num_feasible:>10,} {median:>8.3f} {rate:>12,.0f}")
    impossible = Problem(
        quantity="non_embedding", target=113_250_000, layers=(6,), num_sub_mlps=(4,), d_model=(1024,),
        attention=(44.5e6, 45.5e6), ffn_type="hourglass",
    )  # fmt: skip
    started = time.perf_counter()
    found = obstacles(impossible)
    print(f"what is in the way of an infeasible one: {len(found)} constraints, {time.perf_counter() - started:.3f} s")
    command = [sys.executable, "-m", "olmo_ext", "plan", "configs/sweeps/tapered-440m.yaml", "--node", "b200"]
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    plan = statistics.median(seconds)
    print(f"largest search {worst:.3f} s, limit {SEARCH_LIMIT:g} s")
    print(f"olmo-ext plan, 16 runs: {plan:.3f} s, limit {PLAN_LIMIT:g} s")
    return int(worst > SEARCH_LIMIT or plan > PLAN_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
