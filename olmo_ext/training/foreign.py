"""Checkpoints that a run may start from: ours, OLMo's unsharded ones, and Hugging Face folders. Nothing is unpickled
beyond plain tensors and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import ModelConfig, plain_section
from olmo_ext.config.run_config import differing_keys, load_run_config
from olmo_ext.hf.names import to_olmo
from olmo_ext.hf.reading import name_table, read_config, read_weights
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.training import checkpoint
from olmo_ext.training.tensor_state import OptimizerState, Tensors
from olmo_ext.upstream.parameter_names import clean_name

MEANING = [
    *("norm_after", "attention_layer_norm", "layer_norm_type", "layer_norm_eps", "activation_type"),
    *("rope", "rope_theta", "weight_tying", "include_bias", "scale_logits"),
]
"""Keys that change what a model computes with the same tensors."""


@dataclass(kw_only=True)
class CheckpointContent:
    """The parts of a checkpoint that were read; `None` for a part that was not asked for."""

    weights: Tensors
    moments: OptimizerState | None = None
    state: Mapping[str, Any] | None = None
    """`step`, `tokens`, `epoch`, `examples_seen_this_epoch`."""


def load_foreign(
    load_path: str, *, model: ModelConfig, shape: ModelShape, with_optimizer: bool, with_position: bool
) -> CheckpointContent:
    """Read the parts that are asked for.

    :param model: the `model` section of the run that starts, with its shape.
    :param with_optimizer: False for `reset_optimizer_state`.
    :param with_position: False for `reset_trainer_state`.
    :raises InputError: if `load_path` is no checkpoint, or lacks a part that is asked for.
    """
    if "://" in load_path:
        raise InputError(
            "checkpoints are read from disks only", where=f"load_path {load_path}", right="download it first"
        )
    path = Path(load_path)
    if path.name == "latest":
        path = path.resolve()
    if (path / checkpoint.MARKER).is_file():
        return _ours(path, with_optimizer=with_optimizer, with_position=with_position)
    if (path / "model.pt").is_file():
        return _olmo_unsharded(path, with_optimizer=with_optimizer, with_position=with_position)
    if (path / "config.json").is_file():
        return _hugging_face(path, model, shape, with_optimizer=with_optimizer, with_position=with_position)
    raise InputError(
        "no checkpoint",
        where=f"load_path {path}",
        right="a checkpoints/step<N> folder, an unsharded OLMo checkpoint (model.pt), or a Hugging Face folder",
    )


def _ours(path: Path, *, with_optimizer: bool, with_position: bool) -> CheckpointContent:
    checkpoint.require_complete(path)
    if (with_optimizer or with_position) and "tokens" not in checkpoint.read_train_state(path):
        raise _weights_only("an imported model's checkpoint", f"load_path {path}")
    return CheckpointContent(
        weights=checkpoint.load_model_state(path),
        moments=checkpoint.load_optimizer_state(path) if with_optimizer else None,
        state=checkpoint.read_train_state(path) if with_position else None,
    )


def _weights_only(what: str, where: str) -> InputError:
    right = "reset_optimizer_state: true and reset_trainer_state: true"
    return InputError(f"{what} holds weights only", where=where, right=right)


def _load_plain(path: Path) -> dict[Any, Any]:
    """:raises InputError: if the file holds more than tensors, numbers and text, or no table of them."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise InputError("no such file", where=str(path)) from None
    except Exception as error:  # noqa: BLE001  (torch raises many kinds)
        raise InputError(
            f"cannot be read as plain tensors ({str(error).splitlines()[0]})",
            where=str(path),
            right="files that would run code when loaded are refused",
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"holds a {type(content).__name__}", where=str(path), right="a table, as OLMo saves it")
    return content


def _olmo_unsharded(path: Path, *, with_optimizer: bool, with_position: bool) -> CheckpointContent:
    if with_position:
        # train.pt holds paths and pickled random state; torch refuses it as data, and we do not run it.
        raise InputError(
            "the step of an OLMo checkpoint is in train.pt, which only unpickling could read",
            where=f"load_path {path}",
            right="reset_trainer_state: true",
        )
    weights = {clean_name(str(name)): tensor for name, tensor in _load_plain(path / "model.pt").items()}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name} is no tensor", where=str(path / "model.pt"), right="a model's state alone")
    moments = _olmo_moments(_load_plain(path / "optim.pt"), path) if with_optimizer else None
    return CheckpointContent(weights=weights, moments=moments)


def _olmo_moments(content: Mapping[str, Any], path: Path) -> OptimizerState:
    """Optimizer state by parameter name: FSDP saves names, DDP the numbers that `param_groups` gives names to.

    :raises InputError: for parameters without a name, and for what is no optimizer's state.
    """
    where, right = str(path / "optim.pt"), "reset_optimizer_state: true"
    names: dict[Any, str] = {}
    moments: OptimizerState = {}
    try:
        for group in content["param_groups"]:
            names.update(zip(group["params"], group.get("param_names", group["params"]), strict=True))
        for key, own in content["state"].items():
            name = names.get(key, key)
            if not isinstance(name, str):
                raise InputError(f"no name for parameter {key}", where=where, right=right)
            moments[clean_name(name)] = {
                kind: value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                for kind, value in own.items()
            }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"no optimizer's state ({type(error).__name__}: {error})", where=where, right=right) from None
    return moments


def _hugging_face(
    path: Path, model: ModelConfig, shape: ModelShape, *, with_optimizer: bool, with_position: bool
) -> CheckpointContent:
    where = f"load_path {path}"
    if with_optimizer or with_position:
        raise _weights_only("a Hugging Face folder", where)
    values, config = read_config(path)
    loaded = load_run_config(values)
    theirs, ours = ({key: getattr(section, key) for key in MEANING} for section in (loaded.model, model))
    for meaning, of in ((theirs, loaded.shape), (ours, shape)):
        meaning["n_heads, n_kv_heads"] = [(each.attention.n_heads, each.attention.n_kv_heads) for each in of.layers]
    if differing := differing_keys(ours, theirs, "model"):
        raise InputError(
            f"the folder's weights mean something else: {'; '.join(differing)}", where=where, right="the same settings"
        )
    tensors = {name: tensor.float() for name, tensor in read_weights(path).items()}
    if shape.weight_tying:
        tensors.pop("lm_head.weight", None)
    table = name_table(plain_section(model), shape, config["model_type"])
    return CheckpointContent(weights=to_olmo(tensors, table, where=where))
