"""Hugging Face folders and OLMo checkpoints as run directories, so that they are evaluated, diagnosed and continued."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import folder_aside, put_in_place
from olmo_ext.base.sections import plain_section
from olmo_ext.hf.configs import disagreement
from olmo_ext.hf.names import to_olmo
from olmo_ext.hf.reading import load_safetensors, name_table, read_config, read_weights

UNSHARDED = ("model.safetensors", "model.pt")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The run directory that was made."""

    path: Path
    kind: str
    parameters: int
    verified: bool
    """Whether the Hugging Face model was run and agrees; an OLMo checkpoint has nothing to compare with."""


def _olmo_checkpoint(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not YAML ({' '.join(str(error).split())[:100]})", where=str(path)) from None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("model"), Mapping):
        raise InputError("no model section", where=str(path), right="the config.yaml that OLMo wrote")
    # A `shape` is what `ShapedModelConfig` adds; the rules it came from stand in a run's own config.
    model = {key: value for key, value in raw["model"].items() if key not in ("shape", "init_device", "precision")}
    kept = {"model": model}
    if isinstance(raw.get("tokenizer"), Mapping):
        kept["tokenizer"] = dict(raw["tokenizer"])
    return kept


def _olmo_state(folder: Path) -> dict[str, Any]:
    import torch

    if (folder / "model.safetensors").is_file():
        return load_safetensors(folder / "model.safetensors")
    try:
        state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (pickle's errors have no common class)
        reason = " ".join(str(error).split())[:100]
        raise InputError(f"holds more than tensors, or is torn ({reason})", where=str(folder / "model.pt")) from None
    if not isinstance(state, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise InputError("holds no tensors by name", where=str(folder / "model.pt"), right="OLMo's state dict")
    return dict(state)


def import_model(source: Path, target: Path, *, say: Callable[[str], None] = lambda text: None) -> Imported:
    """Make a run directory with one checkpoint, step 0, of the model in `source`.

    :param say: is told what the run has to do without.
    :raises InputError: for a folder of another kind, missing or unknown tensors, a target that exists.
    :raises MismatchError: if the Hugging Face model computes something else; nothing is left behind.
    """
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import build_model
    from olmo_ext.upstream.shaped_model import renamed_since_2023

    if not source.is_dir():
        raise InputError("no such folder", where=str(source))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("exists already", where=str(target), right="name a new run directory")
    config: dict[str, Any] | None = None
    if (source / "config.json").is_file():
        values, config = read_config(source)
    elif (source / "config.yaml").is_file() and any((source / name).is_file() for name in UNSHARDED):
        values = _olmo_checkpoint(source)
    else:
        raise InputError(
            "neither a Hugging Face folder (config.json) nor an unsharded OLMo checkpoint (config.yaml, model.pt)",
            where=str(source),
        )
    values["run_name"] = target.name
    with folder_aside(target) as aside:
        tokenizer = _copy_tokenizer(source, aside, target, values, say=say)
        run = load_run_config(values)
        if config is not None and "olmo_model" in config:
            if what := disagreement(config, plain_section(run.model), run.shape):
                raise InputError(what, where=str(source / "config.json"), right="the file that `olmo-ext export` wrote")
        model = build_model(run, device="meta").to_empty(device="cpu")
        if config is not None:
            table = name_table(plain_section(run.model), run.shape, config["model_type"])
            tensors = read_weights(source)
            if run.shape.weight_tying:
                tensors.pop("lm_head.weight", None)
            state = to_olmo({name: t.float() for name, t in tensors.items()}, table, where=str(source))
        else:
            # Upstream's reader knows the names of older checkpoints; ours regroups blocks of any kind.
            state = {name: t.float() for name, t in _olmo_state(source).items()}
            if "ffn" not in values["model"]:
                state = renamed_since_2023(model, state)
        state, _ = model._make_state_dict_compatible(state)
        _load(model, state, source)
        model.eval()
        if config is not None:
            _verify(model, source, config["model_type"], tokenizer, run)
        _write_run(aside, run, model, source)
        put_in_place(aside, target)
    return Imported(
        path=target,
        kind=config["model_type"] if config else "OLMo checkpoint",
        parameters=run.counts.total,
        verified=config is not None,
    )


def _load(model: Any, state: Mapping[str, Any], source: Path) -> None:
    expected = model.state_dict()
    missing, extra = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    if missing or extra:
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} is not in the model"
        raise InputError(f"tensor {what} ({len(missing)} missing, {len(extra)} unknown)", where=str(source))
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise InputError(
                f"tensor {name} is {list(tensor.shape)}, the config says {list(expected[name].shape)}",
                where=str(source),
            )
    model.load_state_dict(state)
    model.config.init_device = "cpu"


def _copy_tokenizer(
    source: Path, aside: Path, target: Path, values: dict[str, Any], *, say: Callable[[str], None]
) -> Any:
    """The folder's tokenizer, kept with the run; the vocabulary is what it has, the embedding may be padded."""
    from olmo_ext.data.tokenizer import load_tokenizer

    ends = {key: values["model"].get(key) for key in ("eos_token_id", "pad_token_id")}
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", aside / "tokenizer.json")
        tokenizer = load_tokenizer(aside / "tokenizer.json", **ends)
        values["tokenizer"] = {"identifier": str((target / "tokenizer.json").resolve())}
        size = values["model"].get("embedding_size") or values["model"].get("vocab_size", 0)
        values["model"]["embedding_size"] = size
        if 0 < size < tokenizer.vocab_size:
            raise InputError(
                f"{tokenizer.vocab_size:,} ids, the model has {size:,} rows",
                where=str(source / "tokenizer.json"),
                right="the tokenizer that the model was trained with",
            )
        if size:
            values["model"]["vocab_size"] = tokenizer.vocab_size
        return tokenizer
    identifier = values.get("tokenizer", {}).get("identifier")
    # Weights alone are worth importing; whoever needs text names a tokenizer then.
    if not identifier:
        say(f"{source} brings no tokenizer (no tokenizer.json): the run has none of its own")
        return None
    try:
        return load_tokenizer(identifier, **ends)
    except InputError as error:
        say(f"imported without a tokenizer, which cannot be read: {error}")
        return None


def _verify(model: Any, source: Path, kind: str, tokenizer: Any, run: Any) -> None:
    import torch

    from olmo_ext.export import equality as verify

    length = verify.length_for(run.shape, least=32)
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, run.model.vocab_size, (2, length), generator=generator)
    else:
        tokens = verify.real_tokens(tokenizer.encode, length=length)
    verify.compare_models(model, verify.load_with_our_code(source, kind), tokens)


def _write_run(folder: Path, run: Any, model: Any, source: Path) -> None:
    from olmo_ext.base.run_directory import RunDirectory, RunState
    from olmo_ext.training import checkpoint
    from olmo_ext.training.provenance import build_provenance, shape_json

    directory = RunDirectory(folder)
    directory.write_config(run.plain())
    directory.write_shape(shape_json(run))
    provenance = build_provenance(device="cpu", world_size=1, data={})
    directory.write_provenance(provenance | {"imported_from": str(source.resolve())})
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    train_state = {"format": checkpoint.FORMAT, "step": 0, "imported_from": str(source.resolve())}
    snapshot = checkpoint.Snapshot(
        step=0,
        tensors={checkpoint.MODEL: weights, checkpoint.OPTIMIZER: {}},
        texts={checkpoint.TRAIN_STATE: json.dumps(train_state, indent=1), checkpoint.CONFIG: run.dump()},
    )
    checkpoint.CheckpointStore(directory.checkpoints).write(snapshot)
    directory.write_state(RunState(status="done", reason=f"imported from {source.resolve()}"))
