"""What a cluster allows, as Slurm itself reports it."""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from olmo_ext.base.errors import WorkError
from olmo_ext.launch.slurm_queue import ask_slurm


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that split a sweep."""

    array_size: int = 1000
    """Elements of one array; Slurm's default MaxArraySize is 1001, the first index that is too large."""


def _ask(*command: str) -> str | None:
    try:
        answer = ask_slurm(command)
    except WorkError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def read_limits() -> Limits:
    """MaxArraySize, and the number of jobs a user may submit where accounting says so."""
    config = _ask("scontrol", "show", "config") or ""
    sizes = [Limits().array_size]
    if match := re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE):
        sizes = [max(1, int(match[1]) - 1)]
    limits = (
        _ask("sacctmgr", "-nP", "show", "associations", "where", f"user={getpass.getuser()}", "format=MaxSubmitJobs")
        or ""
    )
    sizes += [int(line) for line in limits.split() if line.isdigit() and int(line) > 0]
    return Limits(array_size=min(sizes))


def slurm_seconds(text: str) -> float | None:
    """Seconds of a time as Slurm writes it, infinite for no limit; None for anything else.

    The forms of sbatch's --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
    """
    if text.lower() in ("infinite", "unlimited"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:
        return ((days * 24 + first) * 60 + second) * 60 + third
    return float(first * 60 + second if match[4] is None else (first * 60 + second) * 60 + third)


def limit_of(script: Path, options: Sequence[str], time_limit: str | None) -> str | None:
    """The time limit that a job will have, as Slurm writes it; None where a further option for sbatch sets it."""
    if any(word.startswith(("--time", "-t")) for word in options):
        return None
    match = re.search(r"^#SBATCH --time=(\S+)", script.read_text(), re.MULTILINE)
    return time_limit or (match[1] if match else None)


def check_partition(partition: str | None, time_limit: str | None) -> str | None:
    """Whether a partition exists, is up, and lets a job run that long; a problem in one line, or None.

    :param partition: one, or several with commas; the cluster's default where None.
    :param time_limit: as Slurm writes it; None where it is not known.
    """
    listing = _ask("sinfo", "--noheader", "--format=%P|%a|%l")
    if listing is None:
        return None
    rows = {}
    for line in listing.splitlines():
        name, available, longest = line.split("|")
        rows[name.rstrip("*")] = (available, longest, name.endswith("*"))
    wanted = partition.split(",") if partition else [name for name, row in rows.items() if row[2]]
    if not wanted:
        return "no partition is named and the cluster has no default; set SBATCH_PARTITION in slurm/site.env"
    for name in wanted:
        if name not in rows:
            return f"no partition {name!r}; the cluster has {', '.join(rows)}"
        available, longest, _ = rows[name]
        if available != "up":
            return f"partition {name!r} is {available}"
        asked, allowed = slurm_seconds(time_limit or ""), slurm_seconds(longest)
        if asked is not None and allowed is not None and asked > allowed:
            return f"partition {name!r} allows {longest}, the time limit is {time_limit}; give a shorter --time"
    return None


AVAILABLE_STATES = ("idle", "mix", "alloc", "comp", "resv", "maint", "plan")
"""What the names begin with of the states in which a node runs jobs, now or after those it has."""


def unavailable_nodes(partition: str | None) -> list[str]:
    """Nodes of a partition (of the cluster where None) that are down, drained or silent: `name state`."""
    of = [f"--partition={partition}"] if partition else []
    listing = _ask("sinfo", "--noheader", "--Node", "--format=%N|%T", *of) or ""
    states = dict(line.split("|") for line in listing.splitlines() if line.count("|") == 1)
    return [
        f"{node} {state}"
        for node, state in states.items()
        # The star is Slurm's for a node that does not answer.
        if not state.startswith(AVAILABLE_STATES) or state.endswith("*")
    ]


@dataclass(frozen=True, kw_only=True)
class Objection:
    """What sbatch says against a job."""

    text: str
    waits: bool
    """Whether a job that is really submitted would be queued all the same."""


def objection_to(command: Sequence[str], partition: str | None) -> Objection | None:
    """Ask sbatch whether it would take a job, without submitting it; None where it would, or does not answer.

    Asked for a test, Slurm counts only nodes that are up; a real job waits for the others.
    """
    said = _said_against(command)
    if said is None or "node configuration" not in said:
        return None if said is None else Objection(text=f"sbatch would refuse: {said}", waits=False)
    sizes = ("--nodes", "--gpus-per-node", "--cpus-per-task", "--mem", "--partition")
    said += ": " + (" ".join(word for word in command if word.startswith(sizes)) or "what its #SBATCH lines say")
    if away := unavailable_nodes(partition):
        those = ", ".join(away[:3]) + (f" and {len(away) - 3} more" if len(away) > 3 else "")
        return Objection(text=f"no node that is up fits ({said}); it will wait for {those}", waits=True)
    if _said_against(command) is None:
        return None  # a node that was away for the first question has come back
    files = "slurm/site.env has partition and GPU type, slurm/nodes.yaml a node's size"
    return Objection(text=f"sbatch would refuse: {said}; {files}", waits=False)


def _said_against(command: Sequence[str]) -> str | None:
    try:
        answer = ask_slurm([command[0], "--test-only", *[word for word in command[1:] if word != "--parsable"]])
    except WorkError:
        return None
    return " ".join(re.sub(r"sbatch: (error: )?", "", answer.stderr).split()) if answer.returncode else None
