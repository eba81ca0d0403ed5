"""`launch --on local`: the missing runs of a sweep, one after the other in a worker process, or in several."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from olmo_ext.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, InputError
from olmo_ext.base.locks import try_lock
from olmo_ext.base.quantities import format_count, format_seconds
from olmo_ext.launch.members import Member
from olmo_ext.launch.run_progress import failure_lines, pid_lives, read_progress
from olmo_ext.launch.worker import record_failure

PROGRESS_SECONDS = 15.0
POLL_SECONDS = 0.2
REMIND_SECONDS = 2.0
ORPHAN_WAIT_SECONDS = 120.0


def _holder(path: Path) -> tuple[int | None, str]:
    """Process id and host of the launcher that wrote itself into the lock file."""
    pid, _, host = path.read_text().strip().partition(" ")
    return int(pid) if pid.isdecimal() else None, host or socket.gethostname()


@contextmanager
def sweep_lock(sweep_directory: Path) -> Iterator[int]:
    """Hold the sweep's folder alone; yields the descriptor, which workers inherit so that they hold it too.

    :raises InputError: if another launch is at work there.
    """
    sweep_directory.mkdir(parents=True, exist_ok=True)
    path = sweep_directory / ".launch.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + ORPHAN_WAIT_SECONDS
    told = False
    while not try_lock(descriptor):
        pid, host = _holder(path)
        elsewhere = host != socket.gethostname()
        # A dead launcher's worker is saving its checkpoint; a living launcher is somebody else at work.
        if elsewhere or (pid is not None and pid_lives(pid)) or time.monotonic() > deadline:
            raise InputError(
                f"another launch is at work here (process {pid or 'unknown'} on {host})",
                where=str(path.parent),
                right="wait for it, or `olmo-ext cancel` it",
            )
        if not told:
            click.echo("waiting for the worker of a launch that was killed to save its checkpoint")
            told = True
        time.sleep(POLL_SECONDS)


def launcher_of(sweep_directory: Path) -> int | None:
    """The process that holds the sweep's folder, if it is a living launcher.

    :raises InputError: if it is at work on another machine.
    """
    path = sweep_directory / ".launch.lock"
    if not path.is_file():
        return None
    with open(path) as file:
        if try_lock(file, shared=True):
            return None
    pid, host = _holder(path)
    if host != socket.gethostname():
        what = f"a launch is at work here (process {pid} on {host})"
        raise InputError(what, where=str(sweep_directory), right=f"stop it on {host}")
    return pid if pid is not None and pid_lives(pid) else None


def _visible_gpus() -> list[str]:
    """The GPUs that workers share out among themselves; none where nvidia-smi is absent."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name.strip()]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(i) for i, line in enumerate(x for x in listing.stdout.splitlines() if x.startswith("GPU "))]


def worker_environment(index: int, jobs: int, gpus: list[str]) -> dict[str, str]:
    """What a worker sees: its share of the cores, one GPU of several, and nothing of a job around the launcher."""
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    # An interactive job is not the run's: it goes on when the run has ended. Its end (SLURM_JOB_END_TIME) holds.
    dropped |= {"SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"}
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    if jobs > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // jobs)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
    return environment


class _Worker:
    """One worker process and the member it is busy with."""

    def __init__(self, environment: dict[str, str], lock: int) -> None:
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        os.set_inheritable(lock, True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "olmo_ext.launch.worker", str(writing), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=(writing, lock),
            env=environment,
            text=True,
            start_new_session=True,  # the terminal's Ctrl-C reaches the launcher, which asks for a checkpoint
        )
        os.close(writing)
        os.set_blocking(reading, False)
        self.results = reading
        self.member: Member | None = None
        self.attempt = 0
        self.reported_step = -1
        self._buffer = b""

    def give(self, member: Member) -> None:
        assert self.process.stdin is not None
        self.member = member
        self.attempt = member.directory.read_state().attempt + 1
        self.reported_step = -1
        self.process.stdin.write(json.dumps(str(member.directory.path.absolute())) + "\n")
        self.process.stdin.flush()

    def read_results(self) -> list[dict[str, Any]]:
        try:
            while block := os.read(self.results, 1 << 16):
                self._buffer += block
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def no_more_work(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def close(self) -> None:
        self.no_more_work()
        self.process.wait()
        os.close(self.results)


class LocalLauncher:
    """Runs members on this machine until all are done, failed, or a signal asks for an end."""

    def __init__(self, members: list[Member], *, jobs: int, lock: int) -> None:
        self._total = len(members)
        self._done = sum(member.is_done for member in members)
        self._waiting = deque(member for member in members if not member.is_done)
        self._jobs = max(1, min(jobs, len(self._waiting)))
        self._lock = lock
        self._gpus = _visible_gpus() if self._jobs > 1 else []
        self._workers: list[_Worker | None] = [None] * self._jobs
        self._failed: list[str] = []
        self._stopped = False
        self._interrupts = 0
        self._reminded = 0.0

    def run(self) -> int:
        """Train what is missing.

        :returns: 0 if every run is done, 1 if one failed, 75 if a signal stopped the launch.
        """
        click.echo(f"{self._total} runs: {self._done} done, {len(self._waiting)} to do, {self._jobs} at a time")
        previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        }
        try:
            return self._run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for worker in filter(None, self._workers):
                worker.process.kill()
                worker.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        self._interrupts += number == signal.SIGINT

    def _run(self) -> int:
        next_report = time.monotonic() + PROGRESS_SECONDS
        while (self._waiting and not self._stopped) or any(w and w.member for w in self._workers):
            for index in range(self._jobs):
                self._attend(index)
            if self._stopped:
                self._ask_to_stop()
            elif time.monotonic() >= next_report:
                self._report_progress()
                next_report = time.monotonic() + PROGRESS_SECONDS
            readable = [worker.results for worker in self._workers if worker]
            select.select(readable, [], [], POLL_SECONDS) if readable else time.sleep(POLL_SECONDS)
        for index, worker in enumerate(self._workers):
            if worker:
                worker.close()
                self._workers[index] = None
        if self._failed:
            click.echo(f"{len(self._failed)} of {self._total} runs failed: {', '.join(self._failed)}", err=True)
        if self._stopped:
            click.echo("stopped; the same command continues", err=True)
            return EXIT_REQUEUE
        return EXIT_FAILED if self._failed else EXIT_DONE

    def _attend(self, index: int) -> None:
        """Take a worker's result, replace one that died, give an idle one its next member."""
        worker = self._workers[index]
        if worker:
            for result in worker.read_results():
                self._finish(worker, result["code"], result["reason"])
            if worker.process.poll() is not None:
                for result in worker.read_results():
                    self._finish(worker, result["code"], result["reason"])
                if worker.member:
                    self._finish(worker, *_death(worker.process.returncode, stopped=self._stopped))
                worker.close()
                worker = self._workers[index] = None
        if self._stopped or (worker and worker.member):
            return
        if not self._waiting:
            if worker:
                worker.no_more_work()
            return
        if worker is None:
            environment = worker_environment(index, self._jobs, self._gpus)
            worker = self._workers[index] = _Worker(environment, self._lock)
        member = self._waiting.popleft()
        click.echo(f"{member.run.name}: attempt {member.directory.read_state().attempt + 1}")
        try:
            worker.give(member)
        except BrokenPipeError:
            pass  # it died while idle; the next round finds its exit code

    def _finish(self, worker: _Worker, code: int, reason: str) -> None:
        member, worker.member = worker.member, None
        assert member is not None
        if code == EXIT_DONE:
            self._done += 1
            where = read_progress(member.directory)
            loss = f", loss {where.loss:.4f}" if where and where.loss is not None else ""
            click.echo(f"{member.run.name}: done{loss} ({self._done} of {self._total})")
        elif code == EXIT_REQUEUE:
            self._stopped = True
            step = member.directory.read_state().step
            click.echo(f"{member.run.name}: stopped with a checkpoint of step {step}")
        else:
            record_failure(member.directory, reason)
            self._failed.append(member.run.name)
            click.echo(f"{member.run.name}: FAILED: {reason}", err=True)
            for line in failure_lines(member.directory):
                click.echo(f"    {line}", err=True)

    def _ask_to_stop(self) -> None:
        """Ask again and again: a signal that comes while a worker starts a member would be lost."""
        now = time.monotonic()
        if now < self._reminded + REMIND_SECONDS and self._interrupts < 2:
            return
        if not self._reminded:
            click.echo("stopping: checkpoints are written at the next step; Ctrl-C again leaves at once", err=True)
        self._reminded = now
        for worker in filter(None, self._workers):
            worker.no_more_work()
            if self._interrupts >= 2:
                worker.process.kill()
            else:
                worker.process.terminate()

    def _report_progress(self) -> None:
        for worker in filter(None, self._workers):
            if worker.member is None:
                continue
            where = read_progress(worker.member.directory)
            if where is None or where.attempt < worker.attempt or where.step == worker.reported_step:
                continue
            worker.reported_step = where.step
            last = worker.member.directory.read_state().max_steps
            parts = [f"step {where.step}" + (f"/{last}" if last else "")]
            if where.loss is not None:
                parts.append(f"loss {where.loss:.3f}")
            if where.tokens_per_second:
                parts.append(f"{format_count(where.tokens_per_second)} tokens/s")
            if where.seconds_per_step and last:
                parts.append(f"{format_seconds((last - where.step) * where.seconds_per_step)} left")
            click.echo(f"{worker.member.run.name}: {', '.join(parts)}")


def _death(returncode: int, *, stopped: bool) -> tuple[int, str]:
    """What a worker's end without a result means for the member it was busy with."""
    if returncode == EXIT_REQUEUE and stopped:
        return EXIT_REQUEUE, ""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (out of memory?)" if name == "SIGKILL" and not stopped else ""
        return EXIT_FAILED, f"its process was ended by {name}{hint}"
    return EXIT_FAILED, f"its process ended with exit code {returncode}"


def launch_local(members: list[Member], *, jobs: int, lock: int) -> int:
    """Train the missing members here; see `LocalLauncher.run` for the exit code."""
    return LocalLauncher(members, jobs=jobs, lock=lock).run()
