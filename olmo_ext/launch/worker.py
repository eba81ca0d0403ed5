"""The process that trains members of a sweep one after the other: `python -m olmo_ext.launch.worker`.

Importing OLMo takes ten seconds, so it is done once. The parent writes one run directory a line to standard input
(JSON text) and reads one result a line (`{"run", "code", "reason"}`) from the descriptor named on the command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from olmo_ext.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, OlmoExtError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.launch.run_progress import process_lives
from olmo_ext.training.signals import StopRequest

PARENT_CHECK_SECONDS = 2.0


def stop_without_parent(parent: int) -> None:
    """Ask this process for a checkpoint and an end once its launcher is gone: one that was killed cannot ask itself."""

    def watch() -> None:
        while True:
            time.sleep(PARENT_CHECK_SECONDS)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def append_output_to(directory: RunDirectory, name: str) -> Path:
    """Send standard output and error, of this process and what it starts, to the end of a log of the run."""
    directory.logs.mkdir(parents=True, exist_ok=True)
    path = directory.logs / name
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return path


def train_run(run_directory: Path, stop: StopRequest) -> tuple[int, str]:
    """Train the run whose frozen `config.yaml` lies in the folder; never raises.

    :returns: the exit code and, for a failure, the reason in one line.
    """
    try:
        from olmo_ext.config.run_config import load_run_config
        from olmo_ext.training.train import train

        config = load_run_config(run_directory / "config.yaml")
        code = train(config, run_directory=run_directory, progress=False, stop=stop)
        return code, RunDirectory(run_directory).read_state().reason if code else ""
    except OlmoExtError as error:
        print(f"olmo-ext: {error}", file=sys.stderr)
        return error.exit_code, " ".join(str(error).split())
    except SystemExit as error:
        return (error.code if isinstance(error.code, int) else EXIT_FAILED), "left by SystemExit"
    except BaseException as error:  # noqa: BLE001 - one member's crash is not the next one's
        traceback.print_exc()
        return EXIT_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]


def record_failure(directory: RunDirectory, reason: str) -> None:
    """Make sure that a run which ended without success says so in `state.json`, unless another process trains it."""
    state = directory.read_state()
    elsewhere = state.host != socket.gethostname()
    theirs = state.status == "running" and (elsewhere or (state.pid != os.getpid() and process_lives(state)))
    if state.status in ("pending", "running", "requeued") and not theirs:
        state.status, state.reason = "failed", reason
        directory.write_state(state)


def main(arguments: list[str]) -> int:
    results = os.fdopen(int(arguments[0]), "w", buffering=1)
    stop_without_parent(int(arguments[1]))
    with StopRequest() as stop:
        for line in sys.stdin:
            if stop.is_set:
                break
            path = Path(json.loads(line))
            directory = RunDirectory(path)
            append_output_to(directory, f"attempt{directory.read_state().attempt + 1}-console.log")
            code, reason = train_run(path, stop)
            if code in (EXIT_FAILED, EXIT_BAD_INPUT):
                record_failure(directory, reason)
            try:
                results.write(json.dumps({"run": str(path), "code": code, "reason": reason}) + "\n")
            except BrokenPipeError:
                return EXIT_FAILED
            if code == EXIT_REQUEUE:
                return EXIT_REQUEUE
        return EXIT_REQUEUE if stop.is_set else EXIT_DONE


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a member that crashed must not keep the process.
    os._exit(exit_code)
