"""OLMo's initial weights for modules that OLMo does not know.

A residual projection (a Linear named `ff_out` or `attn_out`, or marked `_is_residual`) is drawn as OLMo draws its own;
any other Linear is an input projection; a module with a `reset_parameters(config, layer_id)` does it itself.

OLMo scales residual projections by the 2 branches that each layer adds to the residual stream; a layer of K sub-MLPs
adds 1 + K. The scale follows the branches (K = 1 gives OLMo's numbers):

    normal         init_std everywhere
    mitchell       residual 1/sqrt(fan_in * branches up to this layer's end), others 1/sqrt(d_model)
    full_megatron  residual init_std/sqrt(branches of the whole model), others init_std
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from olmo.config import InitFnType
from olmo.initialization import init_normal
from olmo.model import LayerNormBase
from torch import nn

RESIDUAL_NAMES = ("ff_out", "attn_out")


@dataclass(frozen=True, kw_only=True)
class Branches:
    """How many updates are added to the residual stream."""

    up_to_here: int
    """By layers 0 .. this one, this one included."""

    total: int
    """By the whole model."""


def standard_deviation(linear: nn.Linear, *, residual: bool, config: Any, branches: Branches) -> float:
    """The standard deviation of a Linear's initial weights under `config.init_fn`."""
    if config.init_fn == InitFnType.normal:
        return config.init_std
    if config.init_fn == InitFnType.mitchell:
        return 1 / math.sqrt(linear.in_features * branches.up_to_here if residual else config.d_model)
    if config.init_fn == InitFnType.full_megatron:
        return config.init_std / math.sqrt(branches.total) if residual else config.init_std
    raise NotImplementedError(config.init_fn)


def _initialises_itself(module: nn.Module) -> bool:
    reset = getattr(module, "reset_parameters", None)
    return reset is not None and "layer_id" in inspect.signature(reset).parameters


def initialise(module: nn.Module, *, name: str, config: Any, layer_id: int, branches: Branches) -> None:
    """Draw the initial weights of one module and all below it, in the order of their registration."""
    if _initialises_itself(module):
        module.reset_parameters(config, layer_id)  # type: ignore[operator]
    elif isinstance(module, nn.Linear):
        if getattr(module, "_is_zero", False):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            return
        residual = getattr(module, "_is_residual", False) or name in RESIDUAL_NAMES
        std = standard_deviation(module, residual=residual, config=config, branches=branches)
        cutoff = config.init_cutoff_factor
        if cutoff is None and config.init_fn != InitFnType.normal:
            cutoff = 3.0
        init_normal(module, std=std, init_cutoff_factor=cutoff)
    elif isinstance(module, (LayerNormBase, nn.LayerNorm)):
        module.reset_parameters()
    else:
        for child_name, child in module.named_children():
            initialise(child, name=child_name, config=config, layer_id=layer_id, branches=branches)
