"""Writing a Hugging Face folder: weights, config, tokenizer, generation config, code; verified, or not there."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import folder_aside, put_in_place
from olmo_ext.export.card import Origin, model_card
from olmo_ext.hf.configs import CLASSES, hugging_face_config
from olmo_ext.hf.names import require_exportable, to_hugging_face
from olmo_ext.hf.reading import name_table
from olmo_ext.shapes.layers import ModelShape

CODE = (
    "olmo_ext.hf.configuration_olmo_ext",
    "olmo_ext.hf.modeling_olmo_ext",
    "olmo_ext.hf.attention_olmo_ext",
    "olmo_ext.hf.memory_olmo_ext",
    "olmo_ext.blocks.heads",
    "olmo_ext.blocks.mlp",
    "olmo_ext.blocks.window_attention",
    "olmo_ext.blocks.titans_forms",
    "olmo_ext.blocks.titans_layer",
    "olmo_ext.blocks.titans_memory",
    "olmo_ext.shapes.types.titans_sizes",
)
"""Modules that need nothing of ours but each other: side by side they are the folder's code."""
SHARD_BYTES = 5 * 10**9
"""As transformers' `save_pretrained`."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    architecture: str
    parameters: int
    verified_tokens: int
    largest_difference: float
    """Of the logits from the OLMo model's, relative to the largest logit, fp32."""


def write_weights(folder: Path, tensors: Mapping[str, Any], *, shard_bytes: int = SHARD_BYTES) -> None:
    """`model.safetensors`, or shards and their index when it is larger than one file should be."""
    from safetensors.torch import save_file

    shards: list[dict[str, Any]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= size
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def standing_alone(module: str) -> str:
    """The source of one of `CODE` for a folder: it imports the others as its neighbours."""
    package, _, name = module.rpartition(".")
    source = importlib.resources.files(package).joinpath(f"{name}.py").read_text()
    neighbours = {other.rpartition(".")[2] for other in CODE}
    return re.sub(
        r"^from olmo_ext\.[\w.]+\.(\w+) import",
        lambda line: f"from .{line[1]} import" if line[1] in neighbours else line[0],
        source,
        flags=re.MULTILINE,
    )


def write_tokenizer(folder: Path, tokenizer: Any, *, max_length: int) -> None:
    """`tokenizer.json` and what transformers needs beside it.

    :param tokenizer: `olmo_ext.data.tokenizer.Tokenizer`.
    """
    (folder / "tokenizer.json").write_text(tokenizer.base.to_str())
    eos, pad = (tokenizer.base.id_to_token(i) for i in (tokenizer.eos_token_id, tokenizer.pad_token_id))
    special = {"eos_token": eos, "pad_token": pad}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write_json(folder / "tokenizer_config.json", settings | special)
    _write_json(folder / "special_tokens_map.json", special)


def write_folder(folder: Path, olmo: Any, *, model: Mapping[str, Any], shape: ModelShape, tokenizer: Any) -> str:
    """Everything of the Hugging Face folder; returns the architecture's name.

    :param olmo: the OLMo model.
    :param model: the `model` section of its resolved config.
    """
    from olmo_ext.upstream.shaped_model import regrouped

    config = hugging_face_config(model, shape)
    state, _ = regrouped(olmo.state_dict(), 1)
    table = name_table(model, shape, config["model_type"])
    write_weights(folder, to_hugging_face({name: t.float().cpu() for name, t in state.items()}, table))
    _write_json(folder / "config.json", config)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # safetensors makes files that only their owner can read
    ends = {"eos_token_id": model["eos_token_id"], "pad_token_id": model["pad_token_id"]}
    _write_json(folder / "generation_config.json", {"do_sample": False, **ends})
    write_tokenizer(folder, tokenizer, max_length=shape.max_sequence_length)
    if config["model_type"] == "olmo_ext":
        for module in CODE:
            (folder / f"{module.rpartition('.')[2]}.py").write_text(standing_alone(module))
    return CLASSES[config["model_type"]]


def export_model(
    olmo: Any,
    *,
    model: Mapping[str, Any],
    shape: ModelShape,
    tokenizer: Any,
    target: Path,
    origin: Origin,
    length: int = 64,
) -> Exported:
    """Write and verify a folder; it appears under `target` when everything agrees.

    :param origin: what its card says it was made of.
    :param length: tokens of real text per row that the models are compared on; more where a type needs more.
    :raises InputError: for a target that exists, or a model without a Hugging Face form.
    :raises MismatchError: naming the layer that differs; nothing is left behind.
    """
    from olmo_ext.export import equality as verify

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError("exists already", where=str(target), right="name a new folder")
    for index, layer in enumerate(shape.layers):
        require_exportable(layer, index)
    if tokenizer.vocab_size > shape.embedding_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {shape.embedding_size}",
            where=tokenizer.identifier,
            right="name the run's own tokenizer",
        )
    was_training = olmo.training
    try:
        with folder_aside(target) as aside:
            olmo.eval()
            architecture = write_folder(aside, olmo, model=model, shape=shape, tokenizer=tokenizer)
            tokens = verify.real_tokens(tokenizer.encode, length=verify.length_for(shape, least=length))
            hugging_face = verify.load(aside)
            if type(hugging_face).__name__ != architecture:
                raise verify.MismatchError(f"loaded as {type(hugging_face).__name__}, not as {architecture}")
            difference = verify.compare_models(olmo, hugging_face, tokens)
            verify.compare_generation(hugging_face, tokens)
            verify.compare_saved_again(hugging_face, tokens)
            verify.compare_tokenizer(aside, tokenizer.encode)
            parameters = sum(parameter.numel() for parameter in hugging_face.parameters())
            card = model_card(
                hugging_face_config(model, shape),
                shape,
                origin,
                parameters=parameters,
                tokens=tokens.numel(),
                difference=difference,
            )
            (aside / "README.md").write_text(card)
            put_in_place(aside, target)
    finally:
        olmo.train(was_training)
    return Exported(
        path=target,
        architecture=architecture,
        parameters=parameters,
        verified_tokens=tokens.numel(),
        largest_difference=difference,
    )
