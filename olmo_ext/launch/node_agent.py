"""What srun starts once on every node: torchrun, and the one who passes signals on to its workers.

torchrun turns a worker's exit code into 1, dies of signals that it does not handle, and kills its workers 30 seconds
after a SIGTERM. So it is started with the stop signals ignored, and the workers are signalled here, again and again
until they are gone: one that is just starting would lose a single signal. They save and leave with 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from olmo_ext.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.launch.worker import append_output_to

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
POLL_SECONDS = 0.2
REPEAT_SECONDS = 3.0
JOIN_SECONDS = 600
"""How long torchrun waits for the other nodes."""


def children_of(pid: int) -> list[int]:
    """Direct children of a process."""
    children = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in entry.read_text().split()]
        except OSError:
            continue
    return children


def torchrun_command(
    run_directory: Path,
    *,
    node: int,
    addresses: Sequence[str],
    port: int,
    gpus: int,
    attempt: int,
) -> list[str]:
    """torchrun of one node; the first node's address is where all meet."""
    entry = Path(__file__).parent / "entry" / "rank.py"
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(addresses)}",
        f"--nproc-per-node={gpus}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={addresses[0]}:{port}",
        f"--rdzv-id={os.environ.get('SLURM_JOB_ID', 'none')}-{attempt}",
        f"--rdzv-conf=is_host={int(node == 0)},join_timeout={JOIN_SECONDS}",
        f"--local-addr={addresses[node]}",
        # SIGQUIT alone: whatever else Slurm sends reaches the workers, which know what to do.
        "--signals-to-handle=SIGQUIT",
        str(entry),
        str(run_directory),
    ]


def torchrun_takes_signals() -> bool:
    """Whether this torchrun can be told which signals to handle (seen in torch 2.13)."""
    from importlib.util import find_spec

    specification = find_spec("torch")
    assert specification is not None and specification.origin is not None
    return "--signals-to-handle" in (Path(specification.origin).parent / "distributed" / "run.py").read_text()


class Agent:
    """Starts torchrun and stays until it has ended."""

    def __init__(self) -> None:
        self._asked = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        def ignore_stop_signals() -> None:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

        process = subprocess.Popen(command, env=environment, preexec_fn=ignore_stop_signals)
        last = 0.0
        while process.poll() is None:
            if self._asked and time.monotonic() - last >= REPEAT_SECONDS:
                last = time.monotonic()
                for worker in children_of(process.pid):
                    try:
                        os.kill(worker, signal.SIGUSR1)
                    except ProcessLookupError:
                        continue
            time.sleep(POLL_SECONDS)
        return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_directory", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--addresses", required=True)
    given = parser.parse_args()
    agent = Agent()
    node = int(os.environ.get("SLURM_NODEID", "0"))
    addresses = given.addresses.split(",")
    log = given.run_directory / "logs" / f"attempt{given.attempt}-node{node}.log"
    print(f"node {node}: output in {log}", flush=True)
    append_output_to(RunDirectory(given.run_directory), log.name)
    if not torchrun_takes_signals():
        print(
            "olmo-ext: this torchrun has no --signals-to-handle and would end its workers 30 s after SIGTERM, in the"
            " middle of a save; torch 2.13 has it",
            flush=True,
        )
        return EXIT_BAD_INPUT
    command = torchrun_command(
        given.run_directory,
        node=node,
        addresses=addresses,
        port=given.port,
        gpus=given.gpus,
        attempt=given.attempt,
    )
    environment = {**os.environ, "OLMO_EXT_WORLD_SIZE": str(len(addresses) * given.gpus)}
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if cpus.isdigit():
        environment.setdefault("OMP_NUM_THREADS", str(max(1, int(cpus) // given.gpus // 2)))
    return EXIT_DONE if agent.run(command, environment) == 0 else EXIT_FAILED
