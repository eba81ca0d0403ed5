"""OLMo models of any shape: `olmo.model.OLMo(config)` builds one block per layer from a `ShapedModelConfig`.

What is patched in `olmo.model`, each for `ShapedModelConfig` alone (an OLMo ModelConfig behaves as ever):

- `OLMoBlock.build`: stock has one config for all layers and a closed list of blocks.
- `OLMo.num_params`: stock counts the untied head as non-embedding, and only the local shard under FSDP.
- `OLMo.num_fwd_flops`, `num_bck_flops`: stock counts the embedding table in the backward pass alone, and d_model as the
  attention width.
- `OLMo._make_state_dict_compatible`: stock recognises block groups, and renames legacy norms, by its own blocks' names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard, cast

import torch
from olmo.config import BlockType, ModelConfig
from olmo.model import OLMo, OLMoBlock

from olmo_ext.base import sections
from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import plain_section
from olmo_ext.blocks.attention import cache_for
from olmo_ext.blocks.block import ShapedBlock
from olmo_ext.blocks.initialise import Branches
from olmo_ext.config.run_config import RunConfig
from olmo_ext.shapes.counts import ShapeCounts, count
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec, LayerShape, ModelShape
from olmo_ext.shapes.stock import is_stock_layer
from olmo_ext.upstream.parameter_names import clean_name
from olmo_ext.upstream.version import check_upstream


@dataclass
class ShapedModelConfig(ModelConfig):
    """OLMo's ModelConfig and the resolved shape."""

    shape: dict[str, Any] = field(default_factory=dict)
    """The shape as plain data (`shape_to_dict`), so that OmegaConf can write and read it with the rest. Empty in the
    configs of single stock layers."""

    @cached_property
    def model_shape(self) -> ModelShape:
        return shape_from_dict(self.shape)


def shape_to_dict(shape: ModelShape) -> dict[str, Any]:
    """The shape as dicts and lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return plain(dataclasses.asdict(shape))


def shape_from_dict(content: Mapping[str, Any]) -> ModelShape:
    """The inverse of `shape_to_dict`."""
    layers = tuple(
        LayerShape(
            ffn=FFNSpec(**{**layer["ffn"], "d_ff": tuple(layer["ffn"]["d_ff"])}),
            attention=AttentionSpec(**layer["attention"]),
        )
        for layer in content["layers"]
    )
    return ModelShape(**{**content, "layers": layers})


def shaped_model_config(model: sections.ModelConfig, shape: ModelShape) -> ShapedModelConfig:
    """OLMo's typed config for a shape.

    :param model: the `model` section of a resolved config; ours (`ffn`, `attention`) is left out, the shape says it.
    """
    check_upstream()
    known = {key: value for key, value in plain_section(model).items() if key not in ("ffn", "attention")}
    config = ShapedModelConfig.new(**known, shape=shape_to_dict(shape))
    if config.n_layers != shape.n_layers or config.d_model != shape.d_model:
        raise InputError(
            f"the shape has {shape.n_layers} layers of d_model {shape.d_model}",
            where="model",
            right=f"n_layers {config.n_layers} and d_model {config.d_model} are configured",
        )
    if config.alibi and any(layer.attention.n_heads != config.n_heads for layer in shape.layers):
        raise InputError(
            "ALiBi has one slope per head of the whole model",
            where="model.attention.n_heads",
            right=str(config.n_heads),
        )
    return config


def stock_layer_config(layer: LayerShape, config: ModelConfig) -> ModelConfig:
    """One layer's own copy of the config. OLMo's `mlp_hidden_size` counts both halves of SwiGLU."""
    d_ff = layer.ffn.d_ff[0]
    changes: dict[str, Any] = {
        "mlp_hidden_size": 2 * d_ff if layer.ffn.activation == "swiglu" else d_ff,
        "activation_type": type(config.activation_type)(layer.ffn.activation),
        "n_heads": layer.attention.n_heads,
        "n_kv_heads": layer.attention.n_kv_heads,
        "multi_query_attention": None,
    }
    if isinstance(config, ShapedModelConfig):
        changes["shape"] = {}
    return dataclasses.replace(config, **changes)


def _branches(shape: ModelShape, layer_id: int) -> Branches:
    per_layer = [1 + layer.ffn.num_sub_mlps for layer in shape.layers]
    return Branches(up_to_here=sum(per_layer[: layer_id + 1]), total=sum(per_layer))


def build_block(layer_id: int, config: ShapedModelConfig, cache: Any) -> OLMoBlock:
    """The block of one layer: OLMo's own where it fits, else a `ShapedBlock`."""
    shape = config.model_shape
    layer = shape.layers[layer_id]
    if is_stock_layer(layer, config.d_model):
        own_cache = cache_for(cache, layer.attention.head_dim, config.d_model // config.n_heads)
        return _STOCK["build"](OLMoBlock, layer_id, stock_layer_config(layer, config), own_cache)
    if config.block_type != BlockType.sequential:
        raise InputError(
            f"block_type {str(config.block_type)!r} has stock layers only",
            where="model.block_type",
            right="sequential, for any other FFN or attention",
        )
    return ShapedBlock(layer_id, config, cache, layer=layer, branches=_branches(shape, layer_id))


def regrouped(state_dict: dict[str, Any], group_size: int) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Tensor names for `group_size`, from names saved under any group size and any wrapper."""
    grouped = re.compile(r"transformer\.block_groups\.(\d+)\.(\d+)\.")
    sizes = [int(match[2]) + 1 for key in state_dict if (match := grouped.search(key))]
    saved_size = max(sizes, default=1)
    renamed: dict[str, Any] = {}
    origin: dict[str, set[str]] = {}
    for key, tensor in state_dict.items():
        name = clean_name(key)
        if match := grouped.match(name):
            layer = int(match[1]) * saved_size + int(match[2])
            name = f"transformer.blocks.{layer}.{name[match.end() :]}"
        if group_size > 1 and (match := re.match(r"transformer\.blocks\.(\d+)\.", name)):
            group, place = divmod(int(match[1]), group_size)
            name = f"transformer.block_groups.{group}.{place}.{name[match.end() :]}"
        renamed[name] = tensor
        origin[key] = {name}
    return renamed, origin


_STOCK: dict[str, Any] = {}
"""Upstream's own functions, as found before patching."""


def renamed_since_2023(model: OLMo, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A stock checkpoint's tensors under today's names, by upstream's own reader."""
    return _STOCK["compatible"](model, state_dict)[0]


def _counts(model: OLMo) -> ShapeCounts:
    return count(cast(ShapedModelConfig, model.config).model_shape)


def _patch() -> None:
    """Put the functions below in upstream's place, once."""
    if _STOCK:
        return
    check_upstream()
    stock = {
        "build": OLMoBlock.build.__func__,  # type: ignore[attr-defined]
        "num_params": OLMo.num_params,
        "num_fwd_flops": OLMo.num_fwd_flops.fget,  # type: ignore[attr-defined]
        "num_bck_flops": OLMo.num_bck_flops.fget,  # type: ignore[attr-defined]
        "compatible": OLMo._make_state_dict_compatible,
    }

    def shaped(config: Any) -> TypeGuard[ShapedModelConfig]:
        return isinstance(config, ShapedModelConfig)

    def build(cls: type[OLMoBlock], layer_id: int, config: ModelConfig, cache: Any) -> OLMoBlock:
        return build_block(layer_id, config, cache) if shaped(config) else stock["build"](cls, layer_id, config, cache)

    def num_params(self: OLMo, include_embedding: bool = True) -> int:
        """All parameters, or (without embedding) the weight matrices of attention and FFN; not the local shard."""
        if not shaped(self.config):
            return stock["num_params"](self, include_embedding)
        counts = _counts(self)
        return counts.total if include_embedding else counts.non_embedding

    def num_fwd_flops(self: OLMo) -> Any:
        """Forward FLOPs per token."""
        return _counts(self).forward_flops_per_token if shaped(self.config) else stock["num_fwd_flops"](self)

    def num_bck_flops(self: OLMo) -> Any:
        """Backward FLOPs per token."""
        if not shaped(self.config):
            return stock["num_bck_flops"](self)
        counts = _counts(self)
        return counts.training_flops_per_token - counts.forward_flops_per_token

    def compatible(self: OLMo, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, set[str]]]:
        """Rename a state dict's tensors to this model's block groups."""
        if not shaped(self.config):
            return stock["compatible"](self, state_dict)
        return regrouped(state_dict, self.config.block_group_size)

    _STOCK.update(stock)
    OLMoBlock.build = classmethod(build)  # type: ignore[method-assign,assignment]
    OLMo.num_params = num_params  # type: ignore[method-assign]
    OLMo.num_fwd_flops = property(num_fwd_flops)  # type: ignore[method-assign,assignment]
    OLMo.num_bck_flops = property(num_bck_flops)  # type: ignore[method-assign,assignment]
    OLMo._make_state_dict_compatible = compatible  # type: ignore[method-assign]


_patch()


def build_model(config: RunConfig, *, device: str | torch.device = "cpu", seed: int | None = None) -> OLMo:
    """The model of a run, with its initial weights.

    The weights are drawn on the CPU from a generator seeded with `seed`, before any wrapping: the same for every
    device, strategy and world size, and for stock shapes those of `torch.manual_seed(seed); OLMo(config)`. The
    caller's random state is left as it was.

    :param device: where the model ends up; `meta` builds it without weights.
    :param seed: the run's `seed` by default.
    """
    model_config = shaped_model_config(config.model, config.shape)
    return build_from_model_config(model_config, device=device, seed=config.seed if seed is None else seed)


def build_from_model_config(
    model_config: ShapedModelConfig, *, device: str | torch.device = "cpu", seed: int = 0
) -> OLMo:
    """`build_model` for a model config alone."""
    device = torch.device(device)
    model_config = dataclasses.replace(model_config, init_device="meta" if device.type == "meta" else "cpu")
    with torch.random.fork_rng(devices=[]):
        # NOTE: `torch.manual_seed` would seed the accelerators' generators too, which fork_rng does not restore.
        torch.default_generator.manual_seed(seed)
        model = OLMo(model_config)
    return model if device.type in ("meta", "cpu") else model.to(device)
