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

A file with none of these words is a plain config: a sweep of one run. More than 10,000 runs are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.base.files import write_atomically
from olmo_ext.base.sweep_directory import SweepDirectory
from olmo_ext.base.yaml_tree import Origins, read_yaml
from olmo_ext.config.fairness import check_equal_budgets, refuse_twins
from olmo_ext.config.groups import Group, as_list, check_name, check_run_name, groups_of, name_text, seeds_of
from olmo_ext.config.run_config import RunConfig, load_run_config, parse_override
from olmo_ext.config.schema import SWEEP_WORDS, coerce, load_schema
from olmo_ext.config.sweep_run import SweepRun

NodeRule = Callable[[RunConfig], Mapping[str, Any]]
"""Settings (dotted keys) that fit a config to a node type; they win over `extends`, not over the file itself."""


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


def is_sweep_file(path: Path | str) -> bool:
    """Whether a YAML file is a sweep rather than a plain config."""
    return not set(SWEEP_WORDS).isdisjoint(read_yaml(Path(path)))


def _switch(tree: dict[str, Any], word: str, *, where: str) -> bool:
    value = tree.get(word, False)
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is no switch", where=f"{where}, {word}", right="true or false")
    return value


def _text(value: Any, word: str, origins: Origins) -> str:
    return str(coerce(value, {"type": "str", "optional": False}, key=word, origins=origins))


def _check_words(tree: dict[str, Any], origins: Origins, *, where: str) -> None:
    """Name the nearest sweep word or config key for a word that is neither: `axis` is meant to be `axes`."""
    known = [*SWEEP_WORDS, "extends", *load_schema()["classes"]["TrainConfig"]]
    for word in tree:
        if word not in known:
            right = did_you_mean(word, known, otherwise=f"a sweep's own words are {', '.join(SWEEP_WORDS)}")
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


def _places(origins: Origins, member: Group, where: str) -> Origins:
    """Where each key of a member was set: in the sweep's own part, in its entry, or by an axis."""
    entry = f"runs.{member.name}."
    own = {key.removeprefix(entry): place for key, place in origins.items() if key.startswith(entry)}
    return origins | {key: origins.get(f"axes.{key}", where) for key in member.overrides} | own


def _load_members(
    members: Sequence[Group],
    *,
    seeds: Sequence[int],
    common: dict[str, Any],
    origins: Origins,
    overrides: Sequence[str],
    path: Path,
    seeds_change_data: bool,
    rule: NodeRule | None,
) -> list[SweepRun]:
    """Every member with every seed, its config loaded under the run's name."""
    runs = []
    for member in members:
        for seed in seeds or (None,):
            name = check_run_name(member.name if seed is None else f"{member.name}-s{seed}", where=str(path))
            changes: dict[str, Any] = {**member.overrides, "run_name": name}
            # A member's own files come after the sweep's: what the sweep itself says still holds for all.
            parents = [*as_list(common.get("extends")), *as_list(changes.pop("extends", None))]
            tree = {**common, "extends": parents}
            if seed is not None:
                if "seed" in changes:
                    raise InputError(
                        "sets `seed` beside the sweep's `seeds`", where=f"{path}, run {name}", right="one of the two"
                    )
                changes["seed"] = seed
                if seeds_change_data:
                    changes["data.seed"] = seed
            places = _places(origins, member, str(path))
            given = dict(map(parse_override, overrides))
            changes.update(given)
            places.update(dict.fromkeys(given, "command line"))
            try:
                config = load_run_config(tree, changes, relative_to=path.parent, places=places)
                if rule is not None:
                    chosen = {key: value for key, value in rule(config).items() if not _is_given(common, key)}
                    config = load_run_config(tree, {**chosen, **changes}, relative_to=path.parent, places=places)
            except InputError as error:
                place = f"{path}, run {name}" + (f", {error.where}" if error.where not in (None, "config") else "")
                raise InputError(error.what, where=place, right=error.right) from None
            if config.wandb is not None:
                # One given in the base would be every member's.
                config = dataclasses.replace(config, wandb=dataclasses.replace(config.wandb, name=name))
            runs.append(SweepRun(name=name, group=member.name, seed=config.seed, values=member.values, config=config))
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
    name = check_name(name_text(tree.get("name"), path.stem, where=f"{where}, name"), where=f"{where}, name")
    seeds = seeds_of(tree, where=where)
    members = groups_of(tree, num_seeds=max(1, len(seeds)), where=where)
    if not members:
        named = [value for key, value in map(parse_override, overrides) if key == "run_name"]
        given = [text for text in (path.stem, common.get("run_name"), *named) if text is not None]
        places = {"run_name": "command line"} if named else origins
        members = [Group(name=_text(given[-1], "run_name", places), values={}, overrides={})]
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
        origins=origins,
        overrides=overrides,
        path=path,
        seeds_change_data=_switch(tree, "seeds_change_data", where=where),
        rule=rule,
    )
    refuse_twins(runs, where=where)
    unequal = _switch(tree, "unequal_budgets", where=where)
    if not unequal:
        check_equal_budgets(runs, where=where)
    baseline = runs[0].group if tree.get("baseline") is None else _text(tree["baseline"], "baseline", origins)
    by_name = {run.name: run.group for run in runs} | {run.group: run.group for run in runs}
    if baseline not in by_name:
        right = did_you_mean(baseline, by_name, otherwise=f"one of {', '.join(dict.fromkeys(by_name.values()))}")
        raise InputError(f"baseline {baseline!r} is no run", where=f"{where}, baseline", right=right)
    expected = None
    if tree.get("expected") is not None:
        expected = path.parent / _text(tree["expected"], "expected", origins)
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
    SweepDirectory(directory).write_description(sweep_json(sweep))
