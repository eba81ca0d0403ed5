"""A run's config as a Hugging Face config, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES
from olmo_ext.shapes.stock import is_stock_layer

CLASSES = {"olmo2": "Olmo2ForCausalLM", "olmo_ext": "OlmoExtForCausalLM"}
AUTO_MAP = {
    "AutoConfig": "configuration_olmo_ext.OlmoExtConfig",
    "AutoModel": "modeling_olmo_ext.OlmoExtModel",
    "AutoModelForCausalLM": "modeling_olmo_ext.OlmoExtForCausalLM",
}
NORM_TYPES = {"rms": "rms", "default": "default", "low_precision": "default"}


def _by_layer(shape: ModelShape) -> dict[str, Any]:
    """Heads, and what the layers' types say of themselves: one value, or one per layer where they differ."""
    of_layers: list[dict[str, Any]] = [
        {
            "num_attention_heads": layer.attention.n_heads,
            "num_key_value_heads": layer.attention.n_kv_heads,
            **FFN_TYPES.get(layer.ffn.type).exported_config(layer.ffn),
            **ATTENTION_TYPES.get(layer.attention.type).exported_config(layer.attention),
        }
        for layer in shape.layers
    ]
    entries: dict[str, Any] = {}
    for key in dict.fromkeys(key for of_layer in of_layers for key in of_layer):
        values = [of_layer[key] for of_layer in of_layers if key in of_layer]
        same = all(value == values[0] for value in values)
        entries[key] = values[0] if same else [of_layer.get(key) for of_layer in of_layers]
    return entries


def is_native(model: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether transformers' own Olmo2ForCausalLM is this model: OLMo-2's form with equal, conventional layers."""
    wanted = {
        "norm_after": True,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "attention_layer_norm": True,
        "attention_layer_norm_with_affine": True,
        "activation_type": "swiglu",
        "include_bias": False,
        "rope": True,
        "clip_qkv": None,
        "scale_logits": False,
        "embedding_layer_norm": False,
        "block_type": "sequential",
    }
    return (
        all(model[key] == value for key, value in wanted.items())
        and not shape.bias_for_layer_norm
        and len(set(map(repr, shape.layers))) == 1
        and is_stock_layer(shape.layers[0], shape.d_model)
    )


def _common(model: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.embedding_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "max_position_embeddings": shape.max_sequence_length,
        "initializer_range": model["init_std"],
        "tie_word_embeddings": shape.weight_tying,
        "bos_token_id": None,
        "eos_token_id": model["eos_token_id"],
        "pad_token_id": model["pad_token_id"],
        "use_cache": True,
        # transformers 5 writes `dtype`, 4 reads `torch_dtype`.
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def hugging_face_config(model: Mapping[str, Any], shape: ModelShape, *, allow_native: bool = True) -> dict[str, Any]:
    """`config.json` of a run.

    :param model: the `model` section of its resolved config.
    :param allow_native: whether a shape that transformers' own Olmo2 has becomes that.
    :raises InputError: for what neither class can represent.
    """
    if model["alibi"]:
        raise InputError("ALiBi has no Hugging Face form here", where="model.alibi", right="rope: true")
    if model["block_type"] != "sequential":
        raise InputError(f"block_type {model['block_type']!r} has no Hugging Face form here", where="model.block_type")
    if allow_native and is_native(model, shape):
        layer = shape.layers[0]
        return {
            "model_type": "olmo2",
            "architectures": [CLASSES["olmo2"]],
            **_common(model, shape),
            "intermediate_size": layer.ffn.d_ff[0],
            "num_attention_heads": layer.attention.n_heads,
            "num_key_value_heads": layer.attention.n_kv_heads,
            "hidden_act": "silu",
            "rms_norm_eps": model["layer_norm_eps"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_theta": float(model["rope_theta"]),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(model["rope_theta"])},
        }
    widths = [list(layer.ffn.d_ff) if len(set(layer.ffn.d_ff)) > 1 else layer.ffn.d_ff[0] for layer in shape.layers]
    return {
        "model_type": "olmo_ext",
        "architectures": [CLASSES["olmo_ext"]],
        "auto_map": AUTO_MAP,
        **_common(model, shape),
        "intermediate_size": widths,
        "num_sub_mlps": shape.layers[0].ffn.num_sub_mlps,
        "head_dim": shape.layers[0].attention.head_dim,
        **_by_layer(shape),
        "norm_after": shape.norm_after,
        "norm_type": NORM_TYPES[model["layer_norm_type"]],
        "norm_eps": model["layer_norm_eps"],
        "norm_affine": shape.layer_norm_with_affine,
        "norm_bias": shape.bias_for_layer_norm,
        "qk_norm": shape.attention_layer_norm,
        "qk_norm_affine": shape.attention_layer_norm_with_affine,
        "use_bias": shape.include_bias,
        "clip_qkv": model["clip_qkv"],
        "rope": model["rope"],
        "rope_theta": float(model["rope_theta"]),
        "embedding_norm": shape.embedding_layer_norm,
        "scale_logits": model["scale_logits"],
        # The rule behind the numbers, for `olmo-ext import`.
        "olmo_model": dict(model),
    }


def disagreement(config: Mapping[str, Any], model: Mapping[str, Any], shape: ModelShape) -> str | None:
    """What a folder's `config.json` says of its layers otherwise than the run made of its `olmo_model` would, if
    anything: one of the two was edited, or another version of this package wrote the folder."""
    expected = hugging_face_config(model, shape, allow_native=False)
    for key in ("intermediate_size", "num_sub_mlps", "head_dim", *_by_layer(shape)):
        # transformers leaves out what equals its class's default.
        if key in config and config[key] != expected[key]:
            return f"{key} is {config[key]}, its olmo_model makes it {expected[key]}"
    return None


def model_section(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The `model` section of a run from a Hugging Face `config.json` of type olmo2 or olmo_ext.

    :raises InputError: for another type, or a RoPE scaling that OLMo does not have.
    """
    kind = config.get("model_type")
    if kind not in CLASSES:
        raise InputError(
            f"model_type {kind!r}", where=where, right=f"a folder of type {' or '.join(CLASSES)}, or an OLMo checkpoint"
        )
    if kind == "olmo_ext":
        if not isinstance(config.get("olmo_model"), dict):
            raise InputError("no olmo_model section", where=where, right="a folder written by `olmo-ext export`")
        return dict(config["olmo_model"])
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default":
        raise InputError(f"RoPE scaling {rope_type!r}, which OLMo does not have", where=where)
    try:
        section: dict[str, Any] = {
            "d_model": config["hidden_size"],
            "n_layers": config["num_hidden_layers"],
            "vocab_size": config["vocab_size"],
            "embedding_size": config["vocab_size"],
            "max_sequence_length": config["max_position_embeddings"],
            "weight_tying": bool(config.get("tie_word_embeddings", False)),
            "rope": True,
            "rope_theta": int(rope.get("rope_theta") or config.get("rope_theta") or 10_000),
            "init_std": config.get("initializer_range", 0.02),
            "block_type": "sequential",
        }
        for name in ("eos_token_id", "pad_token_id"):
            value = config.get(name)
            value = value[0] if isinstance(value, list) else value
            if value is not None and value >= 0:
                section[name] = value
        section |= _olmo2_section(config, where)
    except KeyError as error:
        raise InputError(f"key {error} is missing", where=where) from None
    section.setdefault("eos_token_id", config["vocab_size"] - 1)
    section.setdefault("pad_token_id", section["eos_token_id"])
    return section


def _olmo2_section(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise InputError("attention_bias without FFN bias, which OLMo does not have", where=where)
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(f"hidden_act {config['hidden_act']!r}", where=where, right="silu")
    heads = config["num_attention_heads"]
    return {
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "norm_after": True,
        "layer_norm_type": "rms",
        "layer_norm_eps": config.get("rms_norm_eps", 1e-5),
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "attention_layer_norm": True,
        "include_bias": False,
        "activation_type": "swiglu",
        "ffn": {"type": "conventional", "d_ff": config["intermediate_size"]},
        "attention": {"type": "softmax", "head_dim": config.get("head_dim") or config["hidden_size"] // heads},
    }
