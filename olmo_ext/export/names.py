"""Which tensor of an OLMo checkpoint holds which tensors of a Hugging Face one.

An OLMo matrix may hold several projections one above the other: q, k, v in `att_proj`; in a SwiGLU `ff_proj` the rows
[0, d_ff) are "up" and [d_ff, 2 d_ff) are "gate" (swapped halves load without a message and are wrong).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.errors import InputError
from olmo_ext.shapes.model import LayerShape, ModelShape

CUSTOM = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "gate_attention": "attention.gate_proj",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "attn_norm": "attention_norm",
    "ff_norm": "sub_mlp_norms.{k}",
    "up": "sub_mlps.{k}.up_proj",
    "gate": "sub_mlps.{k}.gate_proj",
    "down": "sub_mlps.{k}.down_proj",
}
"""Names inside `model.layers.<i>` of our own class."""

OLMO2 = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attn_norm": "post_attention_layernorm",
    "ff_norm": "post_feedforward_layernorm",
    "up": "mlp.up_proj",
    "gate": "mlp.gate_proj",
    "down": "mlp.down_proj",
}
"""Names inside `model.layers.<i>` of transformers' Olmo2ForCausalLM."""

OUTER = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.emb_norm": "model.embed_norm",
    "transformer.ln_f": "model.norm",
    "transformer.ff_out": "lm_head",
}

EXPORTABLE_FFN = ("conventional", "hourglass", "hope")
EXPORTABLE_ATTENTION = ("softmax", "gated")


@dataclass(frozen=True)
class Entry:
    """One OLMo module and the Hugging Face modules that its rows are, in order, with their numbers of rows."""

    olmo: str
    parts: tuple[tuple[str, int | None], ...]
    layer: int | None = None


def require_exportable(layer: LayerShape, index: int) -> None:
    """:raises InputError: for a layer that the Hugging Face class cannot represent."""
    for kind, name, known in (
        ("FFN", layer.ffn.type, EXPORTABLE_FFN),
        ("attention", layer.attention.type, EXPORTABLE_ATTENTION),
    ):
        if name not in known:
            raise InputError(
                f"layer {index}: {kind} type {name!r} has no Hugging Face form", right=f"exported: {', '.join(known)}"
            )
    if layer.ffn.options.get("composition", "sequential") != "sequential":
        raise InputError(
            f"layer {index}: independent levels have no Hugging Face form", right="composition: sequential"
        )


def layer_entries(layer: LayerShape, index: int, *, stock: bool, names: Mapping[str, str]) -> Iterator[Entry]:
    """The modules of one layer.

    :param stock: whether OLMo's own block holds it, or a `ShapedBlock`.
    """
    ours, theirs = f"transformer.blocks.{index}.", f"model.layers.{index}."
    mixer, ffn = layer.attention, layer.ffn

    def entry(olmo: str, *parts: tuple[str, int | None], k: int = 0) -> Entry:
        named = tuple((theirs + names[part].format(k=k), rows) for part, rows in parts)
        return Entry(ours + olmo, named, index)

    inner = "" if stock else "attention."
    yield entry(f"{inner}att_proj", ("q", mixer.width), ("k", mixer.kv_width), ("v", mixer.kv_width))
    yield entry(f"{inner}attn_out", ("o", None))
    yield entry(f"{inner}q_norm", ("q_norm", None))
    yield entry(f"{inner}k_norm", ("k_norm", None))
    yield entry("attn_norm", ("attn_norm", None))
    if mixer.type == "gated":
        yield entry("attention.gate_proj", ("gate_attention", None))
    for k, width in enumerate(ffn.d_ff):
        first: list[tuple[str, int | None]] = [("up", width)]
        if ffn.activation == "swiglu":
            first.append(("gate", width))
        prefix = "" if stock else f"sub_mlps.{k}."
        yield entry("ff_norm" if stock else f"ff_norms.{k}", ("ff_norm", None), k=k)
        yield entry(f"{prefix}ff_proj", *first, k=k)
        yield entry(f"{prefix}ff_out", ("down", None), k=k)


def entries(shape: ModelShape, *, stock: list[bool], names: Mapping[str, str]) -> list[Entry]:
    """Every module of a model; those that a config leaves out (QK-norm, an untied head) are simply not met."""
    found = [Entry(olmo, ((theirs, None),)) for olmo, theirs in OUTER.items()]
    for index, layer in enumerate(shape.layers):
        require_exportable(layer, index)
        found += layer_entries(layer, index, stock=stock[index], names=names)
    return found


def to_hugging_face(state: Mapping[str, Any], table: list[Entry]) -> dict[str, Any]:
    """Rename and split an OLMo state dict.

    :raises InputError: for a tensor that the table does not know.
    """
    left = dict(state)
    result: dict[str, Any] = {}
    for entry in table:
        for kind in ("weight", "bias"):
            if (tensor := left.pop(f"{entry.olmo}.{kind}", None)) is None:
                continue
            rows = [tensor.shape[0]] if len(entry.parts) == 1 else [size for _, size in entry.parts]
            for (name, _), part in zip(entry.parts, tensor.split(rows, dim=0), strict=True):
                result[f"{name}.{kind}"] = part.contiguous().clone()
    if left:
        raise InputError(f"tensors without a Hugging Face name: {', '.join(sorted(left)[:5])}")
    return result


def to_olmo(state: Mapping[str, Any], table: list[Entry], *, where: str) -> dict[str, Any]:
    """The inverse of `to_hugging_face`.

    :raises InputError: for a tensor that the table does not know, or half of a fused matrix that is missing.
    """
    import torch

    left = dict(state)
    result: dict[str, Any] = {}
    for entry in table:
        for kind in ("weight", "bias"):
            names = [f"{name}.{kind}" for name, _ in entry.parts]
            met = [name for name in names if name in left]
            if not met:
                continue
            if len(met) != len(names):
                raise InputError(f"{sorted(set(names) - set(met))[0]} is missing", where=where)
            for name, (_, rows) in zip(names, entry.parts, strict=True):
                if rows is not None and left[name].shape[0] != rows:
                    raise InputError(f"{name} has {left[name].shape[0]} rows, not {rows}", where=where)
            result[f"{entry.olmo}.{kind}"] = torch.cat([left.pop(name) for name in names], dim=0)
    if left:
        raise InputError(f"unknown tensors: {', '.join(sorted(left)[:5])}", where=where)
    return result
