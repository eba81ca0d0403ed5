"""The memory of a Titans layer: projections, convolution, gates and persistent tokens around `titans_memory`.

Needs torch and its two neighbours alone: an exported Hugging Face folder runs a copy of these very files.

B batch, T new tokens, H memory heads, D head_dim, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from olmo_ext.blocks.titans_memory import Gates, Memory, Weights, run_memory
from olmo_ext.shapes.types.titans_sizes import TitansSizes

FORGET_BIAS = -4.0
"""Of alpha's gate: at the start a token forgets 2 % of the memory."""

GATE_SCALE = 0.1
"""The gates' weights start this much smaller than others, so that the biases decide."""


class OwnWeights(nn.Linear):
    """A matrix that is no input projection: drawn for its own fan-in, and read as it is."""

    def reset_parameters(self, config: Any = None, layer_id: int | None = None) -> None:
        if self.weight.device.type == "meta":
            return
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        # A copy: FSDP may free the gathered weight as soon as this returns.
        return self.weight.clone()


class CausalConvolution(OwnWeights):
    """One short filter per channel, over this token and those before it."""

    def forward(self, x: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """
        :param x: [B, channels, T].
        :param tail: the last inputs before it, [B, channels, width - 1].
        """
        weight = self.weight.to(x.dtype).unsqueeze(1)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.conv1d(torch.cat((tail, x), dim=-1), weight, bias, groups=self.out_features)


class MemoryGates(nn.Linear):
    """alpha, theta and eta of every head, before their sigmoids; the bias is there whatever the config says."""

    def reset_parameters(self, config: Any = None, layer_id: int | None = None) -> None:
        if self.weight.device.type == "meta" or config is None:
            return
        nn.init.normal_(self.weight, std=GATE_SCALE * config.init_std)
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.bias[: self.out_features // self.groups], FORGET_BIAS)

    groups: int = 3


class PersistentTokens(nn.Embedding):
    """Learned inputs that stand before every sequence."""

    def reset_parameters(self, config: Any = None, layer_id: int | None = None) -> None:
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight, std=1.0 if config is None else config.init_std)

    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return self.weight.clone()


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """The memory between two calls, and what its convolution still needs."""

    memory: Memory
    tail: torch.Tensor
    """[B, 3 W, conv_width - 1]."""

    seen: torch.Tensor
    """[B] tokens read so far, persistent ones included, modulo the chunk."""


def _order(keep: torch.Tensor) -> torch.Tensor:
    """[B, T] indices that put the tokens that count first, in their order."""
    return torch.argsort((~keep).to(torch.int8), dim=1, stable=True)


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class NeuralMemory(nn.Module):
    """Maps [B, T, d_model] to what the memory returns for each token, [B, T, W]."""

    def __init__(
        self, *, d_model: int, sizes: TitansSizes, bias: bool, head_norm: nn.Module, device: Any = None
    ) -> None:
        """
        :param bias: of the projection and the convolution.
        :param head_norm: a norm over head_dim, computed in the type it is given.
        """
        super().__init__()
        self.sizes = sizes
        heads, dim, width = sizes.heads, sizes.head_dim, sizes.width
        self.att_proj = nn.Linear(d_model, 3 * width, bias=bias, device=device)
        self.conv: CausalConvolution | None = None
        if sizes.conv_width > 1:
            self.conv = CausalConvolution(sizes.conv_width, 3 * width, bias=bias, device=device)
        self.memory_gates = MemoryGates(d_model, sizes.num_gates, bias=True, device=device)
        self.memory_gates.groups = sizes.num_gates // heads
        # Initial weights, per head: rows [h P, (h + 1) P) of the first are W2' of head h.
        inner = sizes.hidden if sizes.depth == 2 else dim
        self.memory_in = OwnWeights(dim, heads * inner, bias=False, device=device)
        self.memory_out: OwnWeights | None = None
        if sizes.depth == 2:
            self.memory_out = OwnWeights(sizes.hidden, heads * dim, bias=False, device=device)
        self.head_norm = head_norm
        self.persistent: PersistentTokens | None = None
        if sizes.persistent_tokens:
            self.persistent = PersistentTokens(sizes.persistent_tokens, d_model, device=device)

    def initial_weights(self, batch: int, dtype: torch.dtype) -> Weights:
        """[B, H, inputs, outputs] of each of the memory's layers."""
        weights = []
        for matrix in (self.memory_in, self.memory_out):
            if matrix is not None:
                weight = matrix().to(dtype).unflatten(0, (self.sizes.heads, -1)).transpose(-1, -2)
                weights.append(weight.unsqueeze(0).expand(batch, -1, -1, -1))
        return tuple(weights)

    def initial_state(self, batch: int, like: torch.Tensor) -> MemoryState:
        wide = torch.promote_types(like.dtype, torch.float32)
        weights = self.initial_weights(batch, wide)
        momentum = tuple(torch.zeros_like(w) for w in weights) if self.sizes.momentum else None
        return MemoryState(
            memory=Memory(weights=weights, momentum=momentum, anchor=weights),
            tail=like.new_zeros(batch, 3 * self.sizes.width, self.sizes.conv_width - 1),
            seen=torch.zeros(batch, device=like.device),
        )

    def gates(self, h: torch.Tensor, wide: torch.dtype) -> Gates:
        """The gates in fp32 (or wider), and their decays as logs."""
        parts = self.memory_gates(h).to(wide).transpose(1, 2).unflatten(1, (-1, self.sizes.heads)).unbind(1)
        step = self.sizes.theta_max * torch.sigmoid(parts[1])
        if self.sizes.momentum:
            # Momentum repeats a step 1 / (1 - eta) times: without this a learned eta makes the memory diverge.
            step = step * torch.sigmoid(-parts[2])
        return Gates(
            log_keep=F.logsigmoid(-parts[0]),
            step=step,
            log_momentum=F.logsigmoid(parts[2]) if self.sizes.momentum else None,
        )

    def forward(
        self, h: torch.Tensor, state: MemoryState | None = None, keep: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, MemoryState]:
        """
        :param keep: [B, T] False for padding, which leaves the memory as it is; None where nothing is padded.
        """
        batch, fresh = h.shape[0], state is None
        added = 0
        if fresh and self.persistent is not None:
            added = self.sizes.persistent_tokens
            h = torch.cat((self.persistent().to(h.dtype).expand(batch, -1, -1), h), dim=1)
            if keep is not None:
                keep = F.pad(keep, (added, 0), value=True)
        order = None if keep is None else _order(keep)
        if keep is not None and order is not None:
            h, keep = _gather(h, order), keep.gather(1, order)
        qkv = self.att_proj(h).transpose(1, 2)
        before = self.initial_state(batch, qkv) if state is None else state
        tail = self._next_tail(qkv, before.tail.to(qkv.dtype), keep)
        if self.conv is not None:
            qkv = self.conv(qkv, before.tail.to(qkv.dtype))
        wide = torch.promote_types(qkv.dtype, torch.float32)
        with torch.autocast(h.device.type, enabled=False):
            heads = F.silu(qkv.to(wide)).unflatten(1, (3, self.sizes.heads, -1)).transpose(-1, -2)
            q, k, v = heads.unbind(1)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            if self.sizes.value_norm:
                # A step follows the error, and nothing else bounds what the memory is asked to return.
                v = F.normalize(v, dim=-1)
        gates = self.gates(h, wide)
        with torch.autocast(h.device.type, enabled=False):
            read, memory = run_memory(
                q,
                k,
                v,
                gates,
                before.memory,
                chunk_size=self.sizes.chunk_size,
                inclusive=self.sizes.inclusive,
                done=None if fresh else before.seen,
                active=keep,
            )
            read = self.head_norm(read.transpose(1, 2)).flatten(2)
        count = h.shape[1] if keep is None else keep.sum(-1)
        seen = (before.seen + count) % self.sizes.chunk_size
        if order is not None:
            read = torch.zeros_like(read).scatter(1, order.unsqueeze(-1).expand_as(read), read)
        return read[:, added:].to(h.dtype), MemoryState(memory=memory, tail=tail, seen=seen)

    def _next_tail(self, qkv: torch.Tensor, tail: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """The last inputs of the convolution that were tokens."""
        length = tail.shape[-1]
        inputs = torch.cat((tail, qkv), dim=-1)
        if keep is None:
            return inputs[..., inputs.shape[-1] - length :]
        index = keep.sum(-1, keepdim=True) + torch.arange(length, device=qkv.device)
        return inputs.gather(2, index.unsqueeze(1).expand(-1, inputs.shape[1], -1))
