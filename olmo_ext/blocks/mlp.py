"""One MLP: OLMo's feed-forward part with a width of its own. Needs torch alone, as exported folders copy this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def swiglu(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """up * SiLU(gate)."""
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {"swiglu": swiglu, "gelu": F.gelu, "relu": F.relu}


class MLP(nn.Module):
    """`ff_out(act(ff_proj(x)))`; [batch, time, d_model] to an update of the same shape."""

    def __init__(self, *, d_model: int, d_ff: int, activation: str, config: Any) -> None:
        """
        :param d_ff: inner width of one branch.
        :param activation: `swiglu`, `gelu` or `relu`.
        :param config: OLMo's ModelConfig (bias, device).
        """
        super().__init__()
        self.d_ff, self.activation = d_ff, activation
        self.branches = 2 if activation == "swiglu" else 1
        place = {"bias": config.include_bias, "device": config.init_device}
        self.ff_proj = nn.Linear(d_model, self.branches * d_ff, **place)
        self.ff_out = nn.Linear(d_ff, d_model, **place)
        self.act = ACTIVATIONS[activation]
        self.checkpoint_function: Any = None
        """Set by the block under fine-grained activation checkpointing: recompute the activation in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = self.ff_proj(x).chunk(self.branches, dim=-1)  # with SwiGLU the first half is `up`, as in OLMo
        if self.checkpoint_function is None:
            return self.ff_out(self.act(*branches))
        return self.ff_out(self.checkpoint_function(self.act, *branches))

    def extra_repr(self) -> str:
        return f"d_ff={self.d_ff}, activation={self.activation}"
