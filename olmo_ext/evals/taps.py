"""Where in a model the residual stream, the updates and the FFN's inner activations can be read, per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from olmo_ext.base.errors import InputError


@dataclass(frozen=True, kw_only=True)
class FFNTap:
    """One FFN update: `residual + update`."""

    residual: nn.Module
    """Its input is the residual stream before the update is added."""

    update: nn.Module
    """Its output is the update as it is added (after the norm where the norm stands behind the FFN)."""

    inner: nn.Module | None
    """Its input is the inner activation [.., d_ff]; None where the type does not say."""


@dataclass(frozen=True, kw_only=True)
class LayerTap:
    block: nn.Module
    """Maps the residual stream at the layer's start to that at its end."""

    attention: nn.Module
    """Its output is attention's update as it is added."""

    ffn: tuple[FFNTap, ...]
    """One per sub-MLP."""


def _inner_projection(mlp: nn.Module) -> nn.Module | None:
    """The matrix that maps the inner activation back, under the names that it has in known FFNs."""
    for name in ("ff_out", "down_proj", "c_proj", "w2"):
        if isinstance(module := getattr(mlp, name, None), nn.Module):
            return module
    return None


def _shaped(block: Any, norm_after: bool) -> LayerTap:
    """Our blocks and our exported layers, which name their norms in Hugging Face's way."""
    exported = hasattr(block, "sub_mlp_norms")
    norms = block.sub_mlp_norms if exported else block.ff_norms
    attention_norm = block.attention_norm if exported else block.attn_norm
    parts = [
        FFNTap(residual=mlp if norm_after else norm, update=norm if norm_after else mlp, inner=_inner_projection(mlp))
        for norm, mlp in zip(norms, block.sub_mlps, strict=True)
    ]
    return LayerTap(block=block, attention=attention_norm if norm_after else block.attention, ffn=tuple(parts))


def _sequential(block: Any, norm_after: bool) -> LayerTap:
    part = FFNTap(
        residual=block.ff_proj if norm_after else block.ff_norm,
        update=block.ff_norm if norm_after else block.ff_out,
        inner=block.ff_out,
    )
    return LayerTap(block=block, attention=block.attn_norm if norm_after else block.attn_out, ffn=(part,))


def _gpt2(block: Any) -> LayerTap:
    part = FFNTap(residual=block.ln_2, update=block.mlp, inner=block.mlp.c_proj)
    return LayerTap(block=block, attention=block.attn, ffn=(part,))


def _llama(block: Any) -> LayerTap:
    part = FFNTap(residual=block.post_attention_layernorm, update=block.mlp, inner=block.mlp.down_proj)
    return LayerTap(block=block, attention=block.self_attn, ffn=(part,))


def _olmo2(block: Any) -> LayerTap:
    part = FFNTap(residual=block.mlp, update=block.post_feedforward_layernorm, inner=block.mlp.down_proj)
    return LayerTap(block=block, attention=block.post_attention_layernorm, ffn=(part,))


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda block: all(hasattr(block, name) for name in names)


def _tap(block: Any, norm_after: bool) -> LayerTap | None:
    """The layer's tap by the names of its modules; the more particular architecture is asked for first."""
    if _has("sub_mlps", "ff_norms", "attention", "attn_norm")(block) or _has("sub_mlps", "sub_mlp_norms")(block):
        return _shaped(block, norm_after)
    if _has("ff_proj", "ff_out", "ff_norm", "attn_norm", "attn_out")(block):
        return _sequential(block, norm_after)
    if _has("ln_1", "ln_2", "attn", "mlp")(block) and hasattr(block.mlp, "c_proj"):
        return _gpt2(block)
    if not (_has("mlp", "self_attn", "post_attention_layernorm")(block) and hasattr(block.mlp, "down_proj")):
        return None
    if _has("input_layernorm")(block) and not _has("post_feedforward_layernorm")(block):
        return _llama(block)
    if _has("post_feedforward_layernorm")(block) and not _has("input_layernorm")(block):
        return _olmo2(block)
    return None


def _layers(model: Any) -> list[nn.Module] | None:
    for path in ("transformer.blocks", "transformer.h", "model.layers", "layers", "blocks", "h"):
        part = model
        for name in path.split("."):
            part = getattr(part, name, None)
        if isinstance(part, nn.ModuleList) and len(part):
            return list(part)
    groups = getattr(getattr(model, "transformer", None), "block_groups", None)
    if isinstance(groups, nn.ModuleList):
        return [block for group in groups for block in group.children()]
    return None


def find_taps(model: Any) -> list[LayerTap]:
    """The taps of every layer: OLMo's models, ours included, and GPT-2, Llama and OLMo-2 of Hugging Face.

    :raises InputError: naming the first layer whose modules are unknown.
    """
    layers = _layers(model)
    if layers is None:
        raise InputError(f"{type(model).__name__} has no list of layers that is known", right=_KNOWN)
    config = getattr(model, "config", None)
    taps = []
    for number, block in enumerate(layers):
        own = getattr(block, "config", config)
        tap = _tap(block, bool(getattr(own, "norm_after", False)))
        if tap is None:
            names = ", ".join(name for name, _ in block.named_children())
            raise InputError(f"layer {number} is a {type(block).__name__} with {names}", right=_KNOWN)
        taps.append(tap)
    return taps


_KNOWN = "known are OLMo's blocks and the layers of GPT-2, Llama and OLMo-2 in Hugging Face's naming"


def first_tensor(value: Any) -> torch.Tensor:
    """A module's output or input, which may be a tuple or given by keyword."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value
