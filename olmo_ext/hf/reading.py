"""Reading a Hugging Face folder: its config as a run's values, its tensors, and the names of both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.hf.configs import model_section
from olmo_ext.hf.names import CUSTOM, OLMO2, Entry, entries
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.stock import is_stock_layer


def name_table(model: Mapping[str, Any], shape: ModelShape, model_type: str) -> list[Entry]:
    """The names of a model's tensors on both sides."""
    stock = [is_stock_layer(layer, shape.d_model) for layer in shape.layers]
    return entries(shape, stock=stock, names=OLMO2 if model_type == "olmo2" else CUSTOM)


def read_weights(folder: Path) -> dict[str, Any]:
    """The tensors of `model.safetensors` or of the shards in its index.

    :raises InputError: if there is neither, a shard is missing, or one of the files is torn.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({str(file) for file in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"no index of shards ({type(error).__name__}: {error})"
            raise InputError(what, where=str(index), right="`weight_map`: tensor name -> file") from None
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise InputError("no model.safetensors", where=str(folder), right="weights as safetensors (or OLMo's model.pt)")
    tensors: dict[str, Any] = {}
    for file in files:
        if not (folder / file).is_file():
            raise InputError(f"{file} is missing, which the index names", where=str(folder))
        tensors |= load_safetensors(folder / file)
    return tensors


def load_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"not safetensors, or torn ({error})", where=str(path), right="the whole file") from None


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a run of the model in a Hugging Face folder, and what its config.json holds.

    :raises InputError: if that is no config of a model that we know.
    """
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_text())
    except ValueError as error:
        raise InputError(f"not JSON ({error})", where=str(config_path)) from None
    if not isinstance(config, dict):
        raise InputError("holds no object", where=str(config_path))
    return {"model": model_section(config, where=str(config_path))}, config
