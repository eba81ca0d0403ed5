"""From a YAML file and overrides to one fully resolved, typed, checked run config. No torch.

Order: `extends` (deep merge, later wins) < the file < the command line; then `${...}` interpolation, plugins, the
corpus' keys, types and defaults, the shape, the budget.
"""

from __future__ import annotations

import copy
import dataclasses
import glob
import importlib
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.secrecy import SECRET_VARIABLE, refuse_credentials
from olmo_ext.base.sections import TrainConfig, plain_section
from olmo_ext.base.yaml_tree import Origins, dump_yaml, leaves, merge, parse_yaml, read_scalar, read_yaml, set_key
from olmo_ext.config.ranges import contradiction
from olmo_ext.config.schedulers import SCHEDULERS
from olmo_ext.config.schema import DEFAULT_ORDER_SEED, coerce_class
from olmo_ext.shapes.budget import BudgetReport, check_budget
from olmo_ext.shapes.counts import ShapeCounts, count
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.resolve import resolve_shape

NOT_IDENTITY = {
    "model": ("init_device", "precision", "flash_attention", "block_group_size"),
    "data": ("paths", "datasets", "label_mask_paths", "num_workers", "pin_memory", "prefetch_factor")
    + ("persistent_workers", "timeout", "subset", "corpus"),
    "optimizer": ("metrics_log_interval", "record_update_metrics"),
    "tokenizer": ("identifier",),
}
"""Keys that may change when a run is started again; where data and tokenizer lie is no part of the run, and which they
are stands in the data fingerprint."""

IDENTITY = (
    *("model", "data", "optimizer", "scheduler", "tokenizer", "seed", "epoch", "global_train_batch_size"),
    *("max_duration", "max_grad_norm", "max_grad_norm_ratio", "fast_forward_batches"),
    *("softmax_auxiliary_loss", "auxiliary_loss_multiplier"),
)
CORPUS_KEYS = (
    *("model.vocab_size", "model.embedding_size", "model.eos_token_id", "model.pad_token_id", "tokenizer.identifier"),
    *("data.paths", "data.memmap_dtype", "evaluators"),
)
"""What `data.corpus` fills."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig):
    """One run, fully resolved: every key of its config, typed, and what follows from them."""

    source: Path | None
    shape: ModelShape
    counts: ShapeCounts
    budget_report: BudgetReport | None

    def plain(self) -> dict[str, Any]:
        """Every key of the config as YAML holds it; what `config.yaml` of a run holds."""
        return {f.name: plain_section(getattr(self, f.name)) for f in dataclasses.fields(TrainConfig)}

    def identity(self) -> dict[str, Any]:
        """What makes this the same run when it is started again: model, data, optimizer, schedule, seeds, batch."""
        kept = {key: plain_section(getattr(self, key)) for key in IDENTITY}
        for section, names in NOT_IDENTITY.items():
            for name in names:
                kept[section].pop(name, None)
        return kept

    def dump(self) -> str:
        """The config as YAML that loads to the same values, alone."""
        return dump_yaml(self.plain(), width=2**16)


def differing_keys(ours: Any, theirs: Any, key: str = "") -> list[str]:
    """Dotted keys at which two identities differ, with both values."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        differing = []
        for word in {**ours, **theirs}:
            path = f"{key}.{word}" if key else word
            differing += differing_keys(ours.get(word), theirs.get(word), path)
        return differing
    return [] if ours == theirs else [f"{key}: {theirs!r} -> {ours!r}"]


def _read_with_parents(path: Path, origins: Origins, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    resolved = Path(os.path.realpath(path))
    if resolved in chain:
        raise InputError("`extends` comes back to this file", where=str(path))
    own: Origins = {}
    tree = read_yaml(path, own)
    tree = _extend(tree, path.parent, origins, (*chain, resolved), str(path))
    origins.update(own)
    return tree


def _extend(tree: dict[str, Any], folder: Path, origins: Origins, chain: tuple[Path, ...], name: str) -> dict[str, Any]:
    tree = dict(tree)
    parents = tree.pop("extends", [])
    merged: dict[str, Any] = {}
    for parent in parents if isinstance(parents, list) else [parents]:
        if not isinstance(parent, str):
            raise InputError(f"{parent!r} is no path", where=f"{name}, extends", right="one path or a list of paths")
        if not (folder / str(parent)).exists():
            raise InputError(f"no such file {folder / str(parent)}", where=f"{name}, extends")
        merged = merge(merged, _read_with_parents(folder / str(parent), origins, chain))
    return merge(merged, tree)


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` or `--key=value`: the dotted key and the value, read as YAML is read in a file."""
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
        raise InputError(f"override {text!r}", where="command line", right="write key=value, as in model.d_model=512")
    if key == "run_name":
        _refuse_empty_name(value, {key: "command line"})
    if not value.lstrip().startswith(("[", "{", '"', "'")):
        # Free text: no YAML rules for colons, hashes or signs inside a bare word.
        return key, read_scalar(value)
    return key, parse_yaml(value, name=f"command line, {key}")


def apply_overrides(
    tree: dict[str, Any], overrides: Sequence[str] | Mapping[str, Any], origins: Origins
) -> dict[str, Any]:
    """A copy of the tree with `key=value` strings, or a mapping of dotted keys, set."""
    tree = copy.deepcopy(tree)
    given = overrides.items() if isinstance(overrides, Mapping) else [parse_override(text) for text in overrides]
    for key, value in given:
        set_key(tree, key, value, where="command line")
        origins[key] = "command line"
    return tree


def _interpolate(tree: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """Resolve `${...}` as OmegaConf does, with OLMo's `path.glob` and `path.choose`."""
    dynamic = [(key, text) for key, text in leaves(tree) if isinstance(text, str) and "${" in text]
    if not dynamic:
        return tree
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, text in dynamic:
        if (match := re.search(r"oc\.env:\s*(\w+)", text)) and SECRET_VARIABLE.search(match[1]):
            raise InputError(
                f"environment variable {match[1]} would be written into the run's folder",
                where=origins.get(key, key),
                right="secrets stay in the environment",
            )

    def choose(*paths: str) -> str:
        for path in paths:
            if "://" in path or Path(path).exists():
                return path
        raise FileNotFoundError(f"none of {', '.join(paths)} exists")

    with warnings.catch_warnings():
        # Renamed in OmegaConf 2.4; the name of 2.3 goes on working.
        warnings.simplefilter("ignore", UserWarning)
        OmegaConf.register_new_resolver("path.choose", choose, replace=True)
        OmegaConf.register_new_resolver(
            "path.glob", lambda *p: sorted(f for g in p for f in glob.glob(g)), replace=True
        )
    config = OmegaConf.create(copy.deepcopy(tree))
    tree = copy.deepcopy(tree)
    for key, text in dynamic:
        try:
            value = OmegaConf.select(config, key, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, FileNotFoundError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{text!r} cannot be resolved: {reason}", where=f"{origins.get(key, '')}, {key}") from None
        set_key(tree, key, value, where=key)
    return tree


def import_plugins(names: Any) -> None:
    """Import the modules under `plugins:`; each registers its types. The current folder is searched too."""
    if not names:
        return
    if not isinstance(names, list):
        raise InputError(f"{names!r} is not a list", where="plugins", right="a list of Python modules")
    if os.getcwd() not in sys.path and "" not in sys.path:
        # Last: the copy of a plugin that a queued run was frozen with comes first.
        sys.path.append(os.getcwd())
    for name in names:
        try:
            importlib.import_module(str(name))
        except ImportError as error:
            raise InputError(
                f"plugin {str(name)!r} cannot be imported ({error})",
                where="plugins",
                right="a module that is installed or lies in the current folder",
            ) from None


def merged_tree(path: Path) -> dict[str, Any]:
    """What a config file and those that it extends say, without defaults or checks."""
    return _read_with_parents(path, {})


def _legacy(tree: dict[str, Any]) -> None:
    """Spellings that OLMo itself still accepts."""
    value = tree.get("activation_checkpointing")
    if isinstance(value, bool):
        tree["activation_checkpointing"] = "whole_layer" if value else None


def _with_corpus(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill what a corpus folder knows (paths, dtype, vocabulary, validation set) beneath what the config says.

    A config that says all of it, as a run's own does, loads where the folder is no more: it was moved, or only the
    weights are wanted.
    """
    data = tree.get("data")
    corpus = data.get("corpus") if isinstance(data, dict) else None
    if corpus is None or all(_is_set(tree, key) for key in CORPUS_KEYS):
        return tree
    from olmo_ext.config.corpus_manifest import corpus_config

    return merge(corpus_config(Path(str(corpus))), tree)


def _is_set(tree: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(tree, Mapping) or tree.get(part) is None:
            return False
        tree = tree[part]
    return True


def _refuse_empty_name(name: Any, origins: Origins) -> None:
    """A name that was given and is empty, such as an unset variable of a shell: another run would be meant than the one
    called like the file. `run_name:` with nothing behind it is YAML's null, in a file."""
    if isinstance(name, str) and not name.strip():
        where = f"{origins.get('run_name', '')}, run_name".removeprefix(", ")
        raise InputError("is empty", where=where, right="a name, or null for the file's")


def load_run_config(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    check_budget_too: bool = True,
    relative_to: Path | None = None,
    places: Mapping[str, str] | None = None,
) -> RunConfig:
    """Load, merge, type and check one run.

    :param source: a YAML file, or its content as a mapping (then `extends` is relative to `relative_to`).
    :param overrides: `key=value` strings as on the command line, or a mapping of dotted keys.
    :param places: dotted key -> file and line, where a mapping's keys and overrides come from.
    :param check_budget_too: whether a `budget` that the shape misses is an error.
    :raises InputError: one line with file, line and key path.
    """
    origins: Origins = {}
    if isinstance(source, Mapping):
        name, path = "config", None
        tree = _extend(dict(source), relative_to or Path.cwd(), origins, (), name)
    else:
        path = Path(source)
        name = str(path)
        tree = _read_with_parents(path, origins)
    tree = apply_overrides(tree, overrides, origins)
    origins.update(places or {})
    _refuse_empty_name(tree.get("run_name"), origins)
    if path is not None and tree.get("run_name") is None:
        tree["run_name"] = path.stem
    tree = _interpolate(tree, origins)
    for key, leaf in leaves(tree):
        if isinstance(leaf, str):
            refuse_credentials(leaf, where=f"{origins.get(key, '')}, {key}".removeprefix(", "))
    import_plugins(tree.get("plugins"))
    _legacy(tree)
    tree = _with_corpus(tree)
    run = coerce_class(TrainConfig, tree, key="", origins=origins, options={})
    if run.data.seed is None:
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, seed=DEFAULT_ORDER_SEED))
    shape = resolve_shape(run, where=name)
    if (wrong := contradiction(run)) is not None:
        key, what, right = wrong
        raise InputError(what, where=f"{origins.get(key, name)}, {key}", right=right)
    if (wrong_options := SCHEDULERS.get(run.scheduler.name).check(plain_section(run.scheduler))) is not None:
        raise InputError(wrong_options, where=f"{origins.get('scheduler', name)}, scheduler")
    counts = count(shape)
    report = None
    if run.budget is not None:
        report = check_budget(run.budget, counts, shape, where=name, enforce=check_budget_too)
    return RunConfig(**vars(run), source=path, shape=shape, counts=counts, budget_report=report)
