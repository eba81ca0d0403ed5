"""The first N of the official order against numpy's whole shuffle, in one run on one machine.

The full size (--n 976562500 --count 5200000) needs 4 GB and three to five minutes for numpy's side. On a machine that
others use, trust the ratio of CPU time: numpy's shuffle has one thread, the sparse walk two.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

from olmo_ext.data.order import METHODS, first_of_order

KNOWN = {(976562500, 6198): [259497441, 807887091, 679996331, 386517173, 905601297]}


def child(method: str, n: int, count: int, seed: int) -> None:
    """One measurement in a process of its own, so that peak memory is its own."""
    first_of_order(1000, 10, seed=0, method=method)  # compile, or load what was compiled
    begin, worked = time.perf_counter(), time.process_time()
    values = first_of_order(n, count, seed=seed, method=method)
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    digest = int(np.bitwise_xor.reduce(values.astype(np.uint64) * np.arange(1, count + 1, dtype=np.uint64)))
    print(seconds, worked, peak, digest, ",".join(map(str, values[:5])))


def measure(method: str, arguments: argparse.Namespace) -> tuple[float, float, int, str, str]:
    command = [sys.executable, __file__, "--child", method]
    command += ["--n", str(arguments.n), "--count", str(arguments.count), "--seed", str(arguments.seed)]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(words[0]), float(words[1]), int(words[2]), words[3], words[4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=50_000_000, help="instances of the source (default 50 million)")
    parser.add_argument("--count", type=int, help="values wanted (default n / 188, the ratio of the full size)")
    parser.add_argument("--seed", type=int, default=6198)
    parser.add_argument("--methods", default="sparse,numpy", help="measured in this order; the last is the reference")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.count = arguments.count or arguments.n // 188
    if arguments.child:
        child(arguments.child, arguments.n, arguments.count, arguments.seed)
        return
    measured = {}
    for method in arguments.methods.split(","):
        measured[method] = measure(method, arguments)
        seconds, worked, peak, _, first = measured[method]
        print(
            f"{method:13s} {seconds:8.2f} s, {worked:8.2f} s of CPU, peak memory {peak / 2**30:5.2f} GiB,"
            f" first values {first}",
            flush=True,
        )
    reference = arguments.methods.split(",")[-1]
    for method, (seconds, worked, _, digest, _) in measured.items():
        same = "equal" if digest == measured[reference][3] else "DIFFERENT VALUES"
        whole, whole_work = measured[reference][:2]
        print(f"{method}: {whole / seconds:.1f} x {reference} ({whole_work / worked:.1f} x in CPU time), {same}")
    known = KNOWN.get((arguments.n, arguments.seed))
    if known:
        right = all(values[4] == ",".join(map(str, known)) for values in measured.values())
        print("first values as published" if right else f"WRONG: the first values are {known}")


if __name__ == "__main__":
    main()
