"""Which tensor of an OLMo checkpoint holds which tensors of a Hugging Face one.

An OLMo matrix may hold several projections one above the other: q, k, v in `att_proj`; in a SwiGLU `ff_proj` the rows
[0, d_ff) are "up" and [d_ff, 2 d_ff) are "gate" (swapped halves load without a message and are wrong).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.registry import Registry
from olmo_ext.shapes.layers import LayerShape, ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, AttentionType, ExportedModule, FFNType

CUSTOM = {
    "attention": "attention.",
    "attn_norm": "attention_norm",
    "sub_mlp": "sub_mlps.{k}.",
    "ff_norm": "sub_mlp_norms.{k}",
}
"""Where the parts of a layer are inside `model.layers.<i>` of our own class."""

OLMO2 = {
    "attention": "self_attn.",
    "attn_norm": "post_attention_layernorm",
    "sub_mlp": "mlp.",
    "ff_norm": "post_feedforward_layernorm",
}
"""The same in transformers' Olmo2ForCausalLM, whose attention and MLP have our class's names inside."""

OUTER = {
    "transformer.wte": "model.embed_tokens",
    "transformer.wpe": "model.embed_positions",
    "transformer.emb_norm": "model.embed_norm",
    "transformer.ln_f": "model.norm",
    "transformer.ff_out": "lm_head",
}


@dataclass(frozen=True)
class Entry:
    """One OLMo module and the Hugging Face modules that its rows are, in order, with their numbers of rows."""

    olmo: str
    parts: tuple[tuple[str, int | None], ...]
    layer: int | None = None


def _with_a_form(registry: Registry[Any], base: Any) -> str:
    types = (registry.get(name) for name in registry)
    return ", ".join(known.name for known in types if type(known).exported_modules is not base.exported_modules)


def require_exportable(layer: LayerShape, index: int) -> None:
    """:raises InputError: for a layer that the Hugging Face class cannot represent."""
    mixer, ffn = ATTENTION_TYPES.get(layer.attention.type), FFN_TYPES.get(layer.ffn.type)
    if mixer.exported_modules(layer.attention) is None:
        raise InputError(
            f"layer {index}: attention type {mixer.name!r} has no Hugging Face form",
            right=f"exported: {_with_a_form(ATTENTION_TYPES, AttentionType)}",
        )
    if any(ffn.exported_modules(width, layer.ffn) is None for width in layer.ffn.d_ff):
        raise InputError(
            f"layer {index}: FFN type {ffn.name!r} has no Hugging Face form",
            right=f"exported: {_with_a_form(FFN_TYPES, FFNType)}",
        )


def layer_entries(layer: LayerShape, index: int, *, stock: bool, names: Mapping[str, str]) -> Iterator[Entry]:
    """The modules of one layer; inside mixer and sub-MLPs each registered type says its own.

    :param stock: whether OLMo's own block holds it, or a `ShapedBlock`.
    """
    ours, theirs = f"transformer.blocks.{index}.", f"model.layers.{index}."

    def inside(modules: list[ExportedModule] | None, *, olmo: str, hugging_face: str) -> Iterator[Entry]:
        for module in modules or ():
            parts = tuple((theirs + hugging_face + name, rows) for name, rows in module.theirs)
            yield Entry(ours + olmo + module.ours, parts, index)

    mixer, ffn = ATTENTION_TYPES.get(layer.attention.type), FFN_TYPES.get(layer.ffn.type)
    modules = mixer.exported_modules(layer.attention)
    yield from inside(modules, olmo="" if stock else "attention.", hugging_face=names["attention"])
    yield Entry(f"{ours}attn_norm", ((theirs + names["attn_norm"], None),), index)
    for k, width in enumerate(layer.ffn.d_ff):
        place = "" if stock else f"sub_mlps.{k}."
        modules = ffn.exported_modules(width, layer.ffn)
        yield from inside(modules, olmo=place, hugging_face=names["sub_mlp"].format(k=k))
        norm = "ff_norm" if stock else f"ff_norms.{k}"
        yield Entry(ours + norm, ((theirs + names["ff_norm"].format(k=k), None),), index)


def entries(shape: ModelShape, *, stock: list[bool], names: Mapping[str, str]) -> list[Entry]:
    """Every module of a model; those that a config leaves out (QK-norm, an untied head) are simply not met."""
    table = [Entry(olmo, ((theirs, None),)) for olmo, theirs in OUTER.items()]
    for index, layer in enumerate(shape.layers):
        require_exportable(layer, index)
        table += layer_entries(layer, index, stock=stock[index], names=names)
    return table


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
