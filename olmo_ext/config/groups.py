"""The groups of a sweep file before their configs are loaded: name, reported values, overrides. No torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.yaml_tree import leaves

NAME_LIMIT = 120
"""Bytes of a run's name; W&B refuses more than 128 characters."""

LARGEST_SWEEP = 10_000
"""Runs: each takes some milliseconds to check, and a folder. More is a mistake in the axes."""

RESERVED = ("logs", "sweep.json", "expected.yaml", "report.html", "slurm-jobs.jsonl")
"""What a sweep's folder holds beside its runs."""

_Point = tuple[str, str, Any, dict[str, Any]]
"""Axis, its part of the run's name, the value to report, overrides."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in seed only."""

    name: str
    values: dict[str, Any]
    overrides: dict[str, Any]


def check_name(name: str, *, where: str) -> str:
    """A name that can be a folder and arrives everywhere as it was written.

    :raises InputError: for a slash, a control character, a leading dot or dash, or a name that is too long.
    """
    if (
        not name
        or name[0] in ".-"
        or "/" in name
        or any(ord(c) < 32 or ord(c) == 127 for c in name)
        or name != name.strip()
    ):
        raise InputError(
            f"{name!r} cannot name a run's folder",
            where=where,
            right="no slash, line break, blank at an end, leading dot or dash",
        )
    if len(name.encode()) > NAME_LIMIT:
        raise InputError(f"a name of {len(name.encode())} bytes", where=where, right=f"at most {NAME_LIMIT}")
    return name


def _canonical(value: Any) -> str:
    """A value as text that does not depend on how it was written: 4e-4 and 0.0004 are one."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return format(value, ".12g")
    if isinstance(value, list):
        return "x".join(_canonical(item) for item in value)
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    return str(value)


def _slug(text: str, limit: int) -> str:
    """Letters, digits and `.+_-` only; a short hash tells apart what that made equal."""
    safe = re.sub(r"[^A-Za-z0-9.+_-]+", "_", text).strip("_")
    if safe == text and len(safe) <= limit:
        return safe
    return f"{safe[: limit - 7].strip('_')}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check_run_name(name: str, *, where: str) -> str:
    """`check_name` for a folder inside a sweep's.

    :raises InputError: as `check_name`, and for the name of something else in there.
    """
    if name.casefold() in RESERVED:
        raise InputError(f"a run called {name!r}", where=where, right="that stands in a sweep's folder: another name")
    return check_name(name, where=where)


def as_list(value: Any) -> list[Any]:
    """A value that may be written as one or as a list; nothing for null."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def name_text(value: Any, default: str | None, *, where: str) -> str:
    """A name that was written as text; the default for null.

    :raises InputError: for a list, a mapping, and what YAML reads as a number, true or false; for null without default.
    """
    value = default if value is None else value
    if not isinstance(value, str):
        raise InputError(f"{value!r} is no text", where=where, right='a name; a number stands in quotes, as "7"')
    return value


def _flat(overrides: Any, *, where: str) -> dict[str, Any]:
    """An option's or listed run's overrides as dotted key -> value (nested mappings stay, to be merged)."""
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise InputError(f"{overrides!r} holds no overrides", where=where, right="{key: value, ...}")
    return dict(overrides)


def _axis_options(axis: str, options: Any, short: str, *, where: str) -> list[tuple[str, Any, dict[str, Any]]]:
    """(part of the run's name, the value to report, overrides) for each point of an axis."""
    where = f"{where}, axes.{axis}"
    if isinstance(options, Mapping):
        return [(str(name), str(name), _flat(over, where=f"{where}.{name}")) for name, over in options.items()]
    if isinstance(options, list):
        if axis in ("seed", "data.seed", "run_name"):
            raise InputError(f"{axis} cannot be an axis", where=where, right="use `seeds`")
        return [(f"{short}{_slug(_canonical(v), 40)}", v, {axis: v}) for v in options]
    raise InputError(f"{options!r} is no axis", where=where, right="a list of values, or {name: {key: value, ...}}")


def _points(axes: Any, *, where: str) -> list[list[_Point]]:
    """The points of every axis."""
    if axes is None:
        return []
    if not isinstance(axes, Mapping):
        raise InputError("is no mapping", where=f"{where}, axes", right="`key: [values]` lines")
    last_words = [axis.rpartition(".")[2] for axis in axes]
    points = []
    for axis, options in axes.items():
        word = axis.rpartition(".")[2]
        short = _slug(word if last_words.count(word) == 1 else axis, 60)
        listed = _axis_options(axis, options, short, where=where)
        if not listed:
            raise InputError("has no values", where=f"{where}, axes.{axis}", right="[a, b] or {name: {key: value}}")
        points.append([(axis, *point) for point in listed])
    return points


def _crossed(points: list[list[_Point]], *, where: str) -> list[Group]:
    groups = []
    for combination in itertools.product(*points) if points else ():
        overrides: dict[str, Any] = {}
        for axis, _, _, over in combination:
            for key, value in over.items():
                if key == "extends":
                    value = [*overrides.get(key, []), *as_list(value)]
                elif key in overrides:
                    raise InputError(
                        f"{key!r} is set by two axes", where=f"{where}, axes.{axis}", right="set it in one of them"
                    )
                overrides[key] = value
        name = "-".join(part for _, part, _, _ in combination)
        if len(name.encode()) > NAME_LIMIT - 12:
            name = _slug(name[: NAME_LIMIT - 20] + "\n" + name, NAME_LIMIT - 12)
        groups.append(Group(name=name, values={axis: value for axis, _, value, _ in combination}, overrides=overrides))
    return groups


def _listed(runs: Any, *, where: str) -> list[Group]:
    if runs is None:
        return []
    where = f"{where}, runs"
    if isinstance(runs, list):
        named = []
        for index, entry in enumerate(runs):
            over = _flat(entry, where=f"{where}.{index}")
            if "name" not in over:
                raise InputError("a run without `name`", where=f"{where}.{index}", right="{name: ..., key: value, ...}")
            named.append((name_text(over.pop("name"), None, where=f"{where}.{index}.name"), over))
    elif isinstance(runs, Mapping):
        named = [(str(name), _flat(over, where=f"{where}.{name}")) for name, over in runs.items()]
    else:
        raise InputError(f"{runs!r} lists no runs", where=where, right="{name: {key: value, ...}}")
    return [Group(name=name, values=dict(leaves(over)), overrides=over) for name, over in named]


def groups_of(tree: Mapping[str, Any], *, num_seeds: int, where: str) -> list[Group]:
    """What a sweep's `axes` and `runs` describe, before seeds.

    :param num_seeds: runs of each group.
    :raises InputError: for what cannot be read, and for a sweep of more than `LARGEST_SWEEP` runs.
    """
    points, listed = _points(tree.get("axes"), where=where), _listed(tree.get("runs"), where=where)
    sizes = [len(options) for options in points]
    total = ((math.prod(sizes) if points else 0) + len(listed)) * num_seeds
    if total > LARGEST_SWEEP:
        product = " x ".join(f"{size:,}" for size in sizes) or "0"
        raise InputError(
            f"{total:,} runs: ({product} by the axes + {len(listed):,} listed) x {num_seeds:,} seeds",
            where=where,
            right=f"at most {LARGEST_SWEEP:,}",
        )
    return [*_crossed(points, where=where), *listed]


def seeds_of(tree: Mapping[str, Any], *, where: str) -> list[int]:
    """The sweep's `seeds`, empty where there are none.

    :raises InputError: for anything but different whole numbers.
    """
    seeds = tree.get("seeds")
    if seeds is None:
        return []
    if not isinstance(seeds, list) or not seeds or any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
        raise InputError(f"{seeds!r}", where=f"{where}, seeds", right="a list of whole numbers, as in [1, 2, 3]")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"a seed stands twice in {seeds}", where=f"{where}, seeds", right="each seed once")
    return seeds
