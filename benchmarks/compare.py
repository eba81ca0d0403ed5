"""Time and size of a comparison: 50 runs x 5,000 rows, or as told. `python benchmarks/compare.py [--runs N --rows N]`.

Prints seconds for reading, comparing, building the page, the whole command in a new process, and the page's bytes,
beside the limits: 5 s for the command, 3 s for the page, 6 MB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "compare"))

from synthetic import make_shape, make_sweep  # noqa: E402


def build(path: Path, *, runs: int, rows: int) -> Path:
    """Two seeds a group: a baseline, then tapers and hourglasses."""
    groups = {}
    generator = np.random.default_rng(0)
    for number in range(runs // 2):
        shape = make_shape(d_model=128, n_layers=8)
        if number % 2:
            shape = make_shape(d_model=128, n_layers=8, d_ff=[[128] * 4] * 8, ffn_type="hourglass")
        finals = (3.0 + generator.normal(0, 0.02, 2)).tolist()
        groups[f"shape-{number:02d}"] = {"final": finals, "shape": shape, "steps": rows, "evaluations": 50}
    return make_sweep(path, groups, baseline="shape-00", seeds=(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rows", type=int, default=5000)
    arguments = parser.parse_args()
    from olmo_ext.compare.collect import read_sweep
    from olmo_ext.compare.comparison import compare_sweep
    from olmo_ext.compare.report.page import write_report

    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "sweep", runs=arguments.runs, rows=arguments.rows)
        command = [sys.executable, "-m", "olmo_ext", "compare", str(path), "-o", str(Path(folder) / "report.html")]
        started, busy = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        marks = [time.perf_counter()]
        sweep = read_sweep(path)
        marks.append(time.perf_counter())
        result = compare_sweep(sweep)
        marks.append(time.perf_counter())
        size = write_report(result, Path(folder) / "report.html")
        marks.append(time.perf_counter())
    read, compared, page = (b - a for a, b in zip(marks, marks[1:], strict=False))
    print(f"{arguments.runs} runs x {arguments.rows} rows")
    print(f"read {read:.2f} s, compare {compared:.2f} s, page {page:.2f} s (limit 3)")
    # Beside the clock, what the process itself used: on a busy machine the clock measures the others.
    processor = used.ru_utime + used.ru_stime - busy.ru_utime - busy.ru_stime
    print(f"olmo-ext compare -o report.html, new process: {whole:.2f} s (limit 5), {processor:.2f} s of processor time")
    print(f"report.html {size / 1e6:.2f} MB (limit 6)")


if __name__ == "__main__":
    main()
