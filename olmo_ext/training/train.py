"""One run, from its config to its last evaluation: `train`. Heavy imports wait until they are needed, so that a
finished run answers at once and signals are caught from the first moment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import EXIT_DONE, InputError
from olmo_ext.base.locks import try_lock
from olmo_ext.base.nodes import load_hardware
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.training.identity import check_same_run
from olmo_ext.training.requirements import check_requirements
from olmo_ext.training.signals import StopRequest

LENGTH_KEYS = ("max_duration", "stop_at", "stop_after")


def check_environment() -> None:
    """Refuse an environment that has some of the variables of several ranks, but not all.

    Without LOCAL_WORLD_SIZE, for one, OLMo takes every rank for local rank 0.

    :raises InputError: naming the variable that is missing.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise InputError(
            f"{' and '.join(given)} are set and {', '.join(missing)} not",
            where="environment",
            right="start several ranks with torchrun, or one process without these variables",
        )


def is_finished(config: RunConfig, directory: RunDirectory) -> bool:
    """Whether the folder holds this run, done."""
    if not directory.exists() or directory.read_state().status != "done":
        return False
    stored = load_run_config(directory.config_path, check_budget_too=False)
    return all(getattr(config, key) == getattr(stored, key) for key in LENGTH_KEYS)


@contextmanager
def only_one(directory: RunDirectory) -> Iterator[None]:
    """Hold the folder: two processes in one run would overwrite each other's rows and checkpoints.

    :raises InputError: if another process trains here.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    with open(directory.path / ".lock", "a+") as lock:
        lock.seek(0)
        if not try_lock(lock):
            holder = lock.read().strip() or "another process"
            raise InputError(
                f"{holder} is training this run", where=str(directory.path), right="wait for it, or stop it first"
            )
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def train(
    config: RunConfig,
    *,
    run_directory: Path | str,
    progress: bool | None = None,
    extend: bool = False,
    stop: StopRequest | None = None,
) -> int:
    """Train a run to its end, or go on with it, or find that it is done.

    :param run_directory: the run's folder; made if it is not there.
    :param progress: a progress bar; by default where stdout is a terminal.
    :param extend: whether a `max_duration` longer than the folder's is meant.
    :param stop: a request whose handlers are installed already; made here by default.
    :returns: 0 done (also if it was done before), 1 stopped for good, 75 stopped by a signal or the time limit after a
        complete checkpoint.
    :raises InputError: one line; no checkpoint and no row of the folder was changed.
    :raises WorkError: the run failed; `state.json` says why.
    """
    began = time.monotonic()  # Importing torch counts: a time limit is that of the command.
    directory = RunDirectory(run_directory)
    check_environment()
    if config.node is not None:
        load_hardware().node(config.node, where=f"{config.source or directory.path}, node")
    first = int(os.environ.get("RANK", "0")) == 0
    with nullcontext(stop) if stop is not None else StopRequest() as stop:
        check_same_run(config, directory, extend=extend)
        if is_finished(config, directory):
            return _nothing_to_do(directory, first=first)
        check_requirements(config, where=str(config.source or directory.path))
        from olmo_ext.training.distributed import agree, process_group
        from olmo_ext.training.session import Session

        holder: Any = only_one(directory) if first else nullcontext()
        with holder:
            if first:
                # Again, now that nobody else can change the folder: another process may have trained here meanwhile.
                check_same_run(config, directory, extend=extend)
            with process_group() as ranks:
                if agree(is_finished(config, directory), ranks):
                    return _nothing_to_do(directory, first=first)
                session = Session(config, directory=directory, stop=stop, ranks=ranks, progress=progress, began=began)
                return session.run()


def _nothing_to_do(directory: RunDirectory, *, first: bool) -> int:
    if first:
        print(f"{directory.path}: done at step {directory.read_state().step}, nothing to do", flush=True)
    return EXIT_DONE
