"""From a sweep file to the list of its runs, each a full config under a stable name. No torch.

    extends: ../base/small.yaml        # or `base:`; one path or a list. Any other key of a config may stand here too
    axes:                              # crossed with each other
      shape:                           # named options: several keys that change together
        conventional: {model.ffn.type: conventional}
        hourglass: {model.ffn.type: hourglass, model.ffn.num_sub_mlps: 4}
        mine: {extends: my-shape.yaml}   # a file on top of the base; what the sweep itself says wins over it
      optimizer.learning_rate: [4e-4, 8e-4]
    runs:                              # listed, beside what the axes give
      deep: {model.n_layers: 12, model.d_model: 512}
    seeds: [1, 2, 3]                   # change the weights, not the data
    seeds_change_data: false           # true: `data.seed` follows the seed
    baseline: conventional             # a run, or the name of its group; the first group if left out
    unequal_budgets: false
    expected: ../hourglass/expected.yaml   # a paper's figures, set beside ours by `compare`

A file with none of these words is a plain config: a sweep of one run.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.config import RunConfig, load_run_config, parse_override
from olmo_ext.errors import InputError
from olmo_ext.files import write_atomically
from olmo_ext.launch.fairness import check_equal_budgets, refuse_twins
from olmo_ext.schema import SWEEP_WORDS, load_schema
from olmo_ext.yaml_tree import Origins, is_null, leaves, plain_value, read_yaml

NAME_LIMIT = 120
"""Bytes of a run's name; W&B refuses more than 128 characters."""

NodeRule = Callable[[RunConfig], Mapping[str, Any]]
"""Settings (dotted keys) that fit a config to a node type; they win over `extends`, not over the file itself."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One member of a sweep."""

    name: str
    """The folder's name, and `run_name` of the config."""

    group: str
    """The name without its seed: runs of one group differ in seed only."""

    seed: int
    values: dict[str, Any]
    """Axis -> value (the option's name where the axis names options); for a listed run, dotted key -> value."""

    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A set of runs that are compared with each other."""

    name: str
    source: Path
    baseline: str
    """A group's name."""

    runs: list[SweepRun]
    unequal_budgets: bool
    expected: Path | None = None
    """A paper's figures; copied into the sweep's folder, where `compare` looks for them."""

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(run.group for run in self.runs))


@dataclass(frozen=True, kw_only=True)
class _Member:
    """A group before its configs are loaded."""

    name: str
    values: dict[str, Any]
    overrides: dict[str, Any]


def is_sweep_file(path: Path | str) -> bool:
    """Whether a YAML file is a sweep rather than a plain config."""
    return not set(SWEEP_WORDS).isdisjoint(read_yaml(Path(path)))


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
    value = plain_value(value)
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


def _as_list(value: Any) -> list[Any]:
    if is_null(value):
        return []
    return list(value) if isinstance(value, list) else [value]


def _text(value: Any, default: str | None, *, where: str) -> str:
    """A name that was written as text; the default for null.

    :raises InputError: for a list, a mapping, and what YAML reads as a number, true or false; for null without default.
    """
    value = default if is_null(value) else plain_value(value)
    if not isinstance(value, str):
        raise InputError(f"{value!r} is no text", where=where, right='a name; a number stands in quotes, as "7"')
    return value


def _flat(overrides: Any, *, where: str) -> dict[str, Any]:
    """An option's or listed run's overrides as dotted key -> value (nested mappings stay, to be merged)."""
    if is_null(overrides):
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
        return [(f"{short}{_slug(_canonical(v), 40)}", plain_value(v), {axis: v}) for v in options]
    raise InputError(f"{options!r} is no axis", where=where, right="a list of values, or {name: {key: value, ...}}")


def _crossed(axes: Any, *, where: str) -> list[_Member]:
    if is_null(axes):
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
            raise InputError("has no values", where=f"{where}, axes.{axis}")
        points.append([(axis, *point) for point in listed])
    members = []
    for combination in itertools.product(*points):
        overrides: dict[str, Any] = {}
        for axis, _, _, over in combination:
            for key, value in over.items():
                if key == "extends":
                    value = [*overrides.get(key, []), *_as_list(value)]
                elif key in overrides:
                    raise InputError(f"{key!r} is set by two axes", where=f"{where}, axes.{axis}")
                overrides[key] = value
        name = "-".join(part for _, part, _, _ in combination)
        if len(name.encode()) > NAME_LIMIT - 12:
            name = _slug(name[: NAME_LIMIT - 20] + "\n" + name, NAME_LIMIT - 12)
        members.append(
            _Member(name=name, values={axis: value for axis, _, value, _ in combination}, overrides=overrides)
        )
    return members


def _listed(runs: Any, *, where: str) -> list[_Member]:
    if is_null(runs):
        return []
    where = f"{where}, runs"
    if isinstance(runs, list):
        named = []
        for index, entry in enumerate(runs):
            over = _flat(entry, where=f"{where}.{index}")
            if "name" not in over:
                raise InputError("a run without `name`", where=f"{where}.{index}", right="{name: ..., key: value, ...}")
            named.append((_text(over.pop("name"), None, where=f"{where}.{index}.name"), over))
    elif isinstance(runs, Mapping):
        named = [(str(name), _flat(over, where=f"{where}.{name}")) for name, over in runs.items()]
    else:
        raise InputError(f"{runs!r} lists no runs", where=where, right="{name: {key: value, ...}}")
    return [
        _Member(name=name, values={k: plain_value(v) for k, v in leaves(over)}, overrides=over) for name, over in named
    ]


def _seeds(tree: dict[str, Any], *, where: str) -> list[int]:
    seeds = plain_value(tree.get("seeds"))
    if seeds is None:
        return []
    if not isinstance(seeds, list) or not seeds or any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
        raise InputError(f"{seeds!r}", where=f"{where}, seeds", right="a list of whole numbers, as in [1, 2, 3]")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"a seed stands twice in {seeds}", where=f"{where}, seeds")
    return seeds


def _switch(tree: dict[str, Any], word: str, *, where: str) -> bool:
    value = plain_value(tree.get(word, False))
    if not isinstance(value, bool):
        raise InputError(f"{value!r}", where=f"{where}, {word}", right="true or false")
    return value


def _check_words(tree: dict[str, Any], origins: Origins, *, where: str) -> None:
    """Name the nearest sweep word or config key for a word that is neither: `axis` is meant to be `axes`."""
    known = [*SWEEP_WORDS, "extends", *load_schema()["classes"]["TrainConfig"]]
    for word in tree:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            right = f"did you mean {near[0]!r}?" if near else f"a sweep's own words are {', '.join(SWEEP_WORDS)}"
            raise InputError(f"unknown key {word!r}", where=f"{origins[word]}, {word}", right=right)
    if "base" in tree and "extends" in tree:
        raise InputError("both `base` and `extends`", where=where, right="they mean the same: keep one")


def _is_given(tree: Mapping[str, Any], dotted: str) -> bool:
    """Whether a tree sets the key, or anything beneath it or above it that is no section."""
    node: Any = tree
    for part in dotted.split("."):
        if not isinstance(node, Mapping):
            return True
        if part not in node:
            return False
        node = node[part]
    return True


def _load_members(
    members: Sequence[_Member],
    *,
    seeds: Sequence[int],
    common: dict[str, Any],
    overrides: Sequence[str],
    path: Path,
    seeds_change_data: bool,
    rule: NodeRule | None,
) -> list[SweepRun]:
    """Every member with every seed, its config loaded under the run's name."""
    runs = []
    for member in members:
        for seed in seeds or (None,):
            name = check_name(member.name if seed is None else f"{member.name}-s{seed}", where=str(path))
            changes: dict[str, Any] = {**member.overrides, "run_name": name}
            # A member's own files come after the sweep's: what the sweep itself says still holds for all.
            parents = [*_as_list(common.get("extends")), *_as_list(changes.pop("extends", None))]
            tree = {**common, "extends": parents}
            if seed is not None:
                if "seed" in changes:
                    raise InputError("sets `seed` beside the sweep's `seeds`", where=f"{path}, run {name}")
                changes["seed"] = seed
                if seeds_change_data:
                    changes["data.seed"] = seed
            changes.update(parse_override(text) for text in overrides)
            try:
                config = load_run_config(tree, changes, relative_to=path.parent)
                if rule is not None:
                    chosen = {key: value for key, value in rule(config).items() if not _is_given(common, key)}
                    config = load_run_config(tree, {**chosen, **changes}, relative_to=path.parent)
            except InputError as error:
                place = f"{path}, run {name}" + (f", {error.where}" if error.where not in (None, "config") else "")
                raise InputError(error.what, where=place, right=error.right) from None
            if (wandb := config.values.get("wandb")) is not None:
                wandb["name"] = name  # one given in the base would be every member's
            runs.append(
                SweepRun(name=name, group=member.name, seed=config.values["seed"], values=member.values, config=config)
            )
    return runs


def load_sweep(path: Path | str, overrides: Sequence[str] = (), *, rule: NodeRule | None = None) -> Sweep:
    """Expand a sweep file, checking every run's config.

    :param overrides: `key=value` strings for every run, as on the command line; they win over the file.
    :param rule: gives each config the settings of the node type that it will run on.
    :raises InputError: for bad configs, repeated runs, unequal budgets, an unknown baseline.
    """
    path = Path(path)
    where = str(path)
    origins: Origins = {}
    tree = read_yaml(path, origins)
    _check_words(tree, origins, where=where)
    common = {key: value for key, value in tree.items() if key not in SWEEP_WORDS}
    if "base" in tree:
        common["extends"] = tree["base"]
    name = check_name(_text(tree.get("name"), path.stem, where=f"{where}, name"), where=f"{where}, name")
    seeds = _seeds(tree, where=where)
    members = _crossed(tree.get("axes"), where=where) + _listed(tree.get("runs"), where=where)
    if not members:
        named = [value for key, value in map(parse_override, overrides) if key == "run_name"]
        given = [text for text in (path.stem, common.get("run_name"), *named) if not is_null(text)]
        members = [_Member(name=str(given[-1]), values={}, overrides={})]
    axis_keys = {
        key for member in members for key in member.overrides if not isinstance(member.overrides[key], Mapping)
    }
    for text in overrides:
        key = parse_override(text)[0]
        if key in axis_keys or (seeds and key in ("seed", "run_name")):
            raise InputError(
                f"{key!r} is what the runs of {where} differ in", where="command line", right="edit the sweep"
            )
    runs = _load_members(
        members,
        seeds=seeds,
        common=common,
        overrides=overrides,
        path=path,
        seeds_change_data=_switch(tree, "seeds_change_data", where=where),
        rule=rule,
    )
    refuse_twins(runs, where=where)
    unequal = _switch(tree, "unequal_budgets", where=where)
    if not unequal:
        check_equal_budgets(runs, where=where)
    baseline = runs[0].group if is_null(tree.get("baseline")) else str(tree["baseline"])
    by_name = {run.name: run.group for run in runs} | {run.group: run.group for run in runs}
    if baseline not in by_name:
        near = difflib.get_close_matches(baseline, by_name, n=1)
        right = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(dict.fromkeys(by_name.values()))}"
        raise InputError(f"baseline {baseline!r} is no run", where=f"{where}, baseline", right=right)
    expected = None
    if not is_null(tree.get("expected")):
        expected = path.parent / str(tree["expected"])
        if not expected.is_file():
            raise InputError(f"no file {expected}", where=f"{where}, expected", right="a paper's figures")
    return Sweep(
        name=name,
        source=path,
        baseline=by_name[baseline],
        runs=runs,
        unequal_budgets=unequal,
        expected=expected,
    )


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """What `sweep.json` holds: all that a comparison needs to know beside the run directories."""
    return {
        "name": sweep.name,
        "baseline": sweep.baseline,
        "budget_checked": not sweep.unequal_budgets,
        "runs": [{"name": r.name, "group": r.group, "seed": r.seed, "values": r.values} for r in sweep.runs],
    }


def write_sweep_json(sweep: Sweep, directory: Path) -> None:
    """Write `sweep.json`, and the paper's figures if the sweep names them, into the sweep's folder."""
    directory.mkdir(parents=True, exist_ok=True)
    if sweep.expected is not None:
        write_atomically(directory / "expected.yaml", sweep.expected.read_bytes())
    write_atomically(directory / "sweep.json", json.dumps(sweep_json(sweep), indent=1, ensure_ascii=False) + "\n")
