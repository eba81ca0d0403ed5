"""The sbatch command lines, as pure functions of their inputs (tests/launch/golden holds them whole)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import parse_seconds
from olmo_ext.launch.fit_to_node import Placement
from olmo_ext.launch.slurm_site import OPTION_NAMES, Site

MEMORY_SHARE = 0.9
"""Of a node's memory: the rest is the system's."""

SIGNAL_SECONDS = 300
"""How long before the time limit the batch shell is warned, at most a tenth of the limit."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One array of runs, all of one placement."""

    script: Path
    """The node type's .sbatch file, in the launch folder."""

    launch_folder: Path
    """Where the frozen job files lie."""

    job_name: str
    num_runs: int
    placement: Placement
    site: Site
    throttle: int | None = None
    time_limit: str | None = None
    dependency: str | None = None


def time_option(text: str) -> str:
    """Any spelling of a duration as Slurm's D-HH:MM:SS; `60` alone would be minutes to Slurm, so a unit is asked for.

    :raises InputError: if it is no duration, or a bare number.
    """
    right = "12:00:00, 1-00:00:00, 12h or 45m"
    try:
        total = round(parse_seconds(text))
    except (ValueError, OverflowError) as error:
        raise InputError(str(error), where="--time", right=right) from None
    if not re.search("[:smhd]", text):
        raise InputError(f"time limit {text!r} has no unit", where="--time", right=right)
    if not 60 <= total <= 366 * 86400:
        raise InputError(f"time limit {text!r} is under a minute or over a year", where="--time", right=right)
    days, rest = divmod(total, 86400)
    return f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def signal_seconds(time_limit: str | None) -> int:
    """Seconds between the warning and the limit, one that `time_option` takes; None is the script's own limit."""
    if time_limit is None:
        return SIGNAL_SECONDS
    return max(30, min(SIGNAL_SECONDS, round(parse_seconds(time_limit) / 10)))


def _pattern(path: Path) -> str:
    """A path in an --output pattern: `%` begins a replacement there, and a backslash switches them all off."""
    if "\\" in str(path):
        raise InputError("a backslash in the path", where=str(path), right="Slurm cannot write logs there")
    return str(path).replace("%", "%%")


def _common(site: Site, node_type: str | None, *, dependency: str | None) -> list[str]:
    options = []
    for name in OPTION_NAMES:
        if value := site.get(f"SBATCH_{name.upper()}", node_type):
            options.append(f"--{name}={value}")
    if dependency:
        options += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    return options + site.options(node_type)


def sbatch_runs(submission: Submission) -> list[str]:
    """sbatch for an array of runs: element i is the i-th run of `runs.json`."""
    placement, folder = submission.placement, submission.launch_folder
    node, gpus = placement.node, placement.gpus_per_node
    throttle = f"%{submission.throttle}" if submission.throttle else ""
    gpu_type = submission.site.get("GPU_TYPE", node.name)
    memory = int(node.memory * MEMORY_SHARE / node.gpus_per_node / 2**20) * gpus
    command = [
        "sbatch",
        "--parsable",
        # Nothing of the caller's environment: what a job needs is in the launch folder and in site.env.
        "--export=NONE",
        f"--job-name={submission.job_name}",
        f"--array=0-{submission.num_runs - 1}{throttle}",
        f"--nodes={placement.num_nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={gpu_type + ':' if gpu_type else ''}{gpus}",
        f"--cpus-per-task={node.cpus_per_gpu * gpus}",
        f"--mem={memory}M",
        f"--signal=B:USR1@{signal_seconds(submission.time_limit)}",
        "--requeue",
        "--open-mode=append",
        f"--output={_pattern(folder.parent.parent / 'logs')}/%A_%a.log",
    ]
    if submission.time_limit:
        command.append(f"--time={time_option(submission.time_limit)}")
    command += _common(submission.site, node.name, dependency=submission.dependency)
    return [*command, str(submission.script), f"--launched={folder}"]


def sbatch_command(
    arguments: Sequence[str],
    *,
    launch_folder: Path,
    job_name: str,
    site: Site,
    dependency: str | None = None,
    array: int | None = None,
) -> list[str]:
    """sbatch for an `olmo-ext` command: the comparison at the end, the fetch of data before.

    :param array: number of elements; `{part}/N` and `--part={part}/N` get the element's number, counted from 1.
    """
    element = "%A_%a" if array else "%j"
    command = [
        "sbatch",
        "--parsable",
        "--export=NONE",
        f"--job-name={job_name}",
        "--requeue",
        "--open-mode=append",
        f"--output={_pattern(launch_folder.parent.parent / 'logs')}/{element}.log",
    ]
    if array:
        command.append(f"--array=1-{array}")
    command += _common(site, "cpu", dependency=dependency)
    return [*command, str(launch_folder / "command.sbatch"), f"--launched={launch_folder}", *arguments]


def shell_line(command: Sequence[str]) -> str:
    """A command as it can be pasted into a shell."""
    return shlex.join(command)
