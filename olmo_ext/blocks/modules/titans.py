"""The torch modules of Titans: the memory, the window's attention, and their three compositions.

Decoding: a layer's cache is a pair of tensors, as OLMo's own, with the batch in front. The first has no elements and
tells OLMo how many tokens are past, [B, 1, past, 0]; the second, [B, state], holds everything in fp32: OLMo's beam
search may expand and reorder both like keys and values.

B batch, T new tokens, H memory heads, D head_dim, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from olmo.model import LayerNorm, RMSLayerNorm
from torch import nn

from olmo_ext.blocks.modules.titans_memory import Gates, Memory, Weights, run_memory
from olmo_ext.blocks.modules.window import WindowAttention
from olmo_ext.blocks.titans import TitansSizes
from olmo_ext.errors import InputError
from olmo_ext.shapes.model import AttentionSpec

Cache = tuple[torch.Tensor, torch.Tensor]

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

    def __init__(self, *, d_model: int, sizes: TitansSizes, config: Any) -> None:
        super().__init__()
        self.sizes = sizes
        place = {"bias": config.include_bias, "device": config.init_device}
        bare = {"bias": False, "device": config.init_device}
        heads, dim, width = sizes.heads, sizes.head_dim, sizes.width
        self.att_proj = nn.Linear(d_model, 3 * width, **place)
        self.conv = CausalConvolution(sizes.conv_width, 3 * width, **place) if sizes.conv_width > 1 else None
        self.memory_gates = MemoryGates(d_model, sizes.num_gates, bias=True, device=config.init_device)
        self.memory_gates.groups = sizes.num_gates // heads
        # Initial weights, per head: rows [h P, (h + 1) P) of the first are W2' of head h.
        inner = sizes.hidden if sizes.depth == 2 else dim
        self.memory_in = OwnWeights(dim, heads * inner, **bare)
        self.memory_out = OwnWeights(sizes.hidden, heads * dim, **bare) if sizes.depth == 2 else None
        self.head_norm = RMSLayerNorm(config, size=dim)
        self.persistent = (
            PersistentTokens(sizes.persistent_tokens, d_model, device=config.init_device)
            if sizes.persistent_tokens
            else None
        )

    def initial_weights(self, batch: int, dtype: torch.dtype) -> Weights:
        """[B, H, inputs, outputs] of each of the memory's layers."""
        found = []
        for matrix in (self.memory_in, self.memory_out):
            if matrix is not None:
                weight = matrix().to(dtype).unflatten(0, (self.sizes.heads, -1)).transpose(-1, -2)
                found.append(weight.unsqueeze(0).expand(batch, -1, -1, -1))
        return tuple(found)

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
        return Gates(
            log_keep=F.logsigmoid(-parts[0]),
            step=self.sizes.theta_max * torch.sigmoid(parts[1]),
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


class TitansMixer(nn.Module):
    """OLMo's attention contract (see `AttentionType.build`)."""

    def __init__(self, *, d_model: int, spec: AttentionSpec, sizes: TitansSizes, config: Any, cache: Any) -> None:
        super().__init__()
        self.spec, self.sizes, self.config = spec, sizes, config
        place = {"bias": config.include_bias, "device": config.init_device}
        self.memory = NeuralMemory(d_model=d_model, sizes=sizes, config=config)
        self.out_gate = nn.Linear(d_model, sizes.width, **place) if sizes.output_gate else None
        self.window: WindowAttention | None = None
        if sizes.has_attention:
            self.window = WindowAttention(d_model=d_model, spec=spec, window=sizes.window, config=config, cache=cache)
        if sizes.form == "mag":
            self.window_norm = LayerNorm.build(config, size=spec.width)
            self.memory_norm = LayerNorm.build(config, size=sizes.width)
        if sizes.form == "mal":
            self.memory_proj = nn.Linear(sizes.width, d_model, **place)
            self.between_norm = LayerNorm.build(config, size=d_model)
        self.attn_out = nn.Linear(spec.width, d_model, **place)
        self.attn_out._is_residual = True  # type: ignore[assignment]
        self.checkpoint_function: Any = None
        """Set by the block under fine-grained activation checkpointing: the whole mixing is computed again."""

    def forward(
        self,
        h: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Cache | None]:
        """
        :raises InputError: for document masks, and for an attention bias that is not causal with padding.
        """
        if max_doc_len is not None or cu_doc_lens is not None:
            raise InputError(
                "the memory of Titans does not begin anew at each document",
                where="model.attention.type titans",
                right="data.generate_doc_lengths: false",
            )
        past = 0 if layer_past is None else layer_past[0].shape[-2]
        keep = kept_positions(attention_bias, past=past, time=h.shape[1])
        keep = None if keep is None else keep.expand(h.shape[0], -1)
        if self.checkpoint_function is None or layer_past is not None or use_cache:
            mixed, present = self.mix(h, keep, layer_past, use_cache)
        else:
            mixed, present = self.checkpoint_function(self.mix, h, keep, None, False)
        return self.attn_out(mixed), present

    def mix(
        self, h: torch.Tensor, keep: torch.Tensor | None, layer_past: Cache | None, use_cache: bool
    ) -> tuple[torch.Tensor, Cache | None]:
        """Everything before the output projection.

        :param keep: [B, past + T] False for padding.
        """
        batch, time, _ = h.shape
        past = 0 if layer_past is None else layer_past[0].shape[-2]
        state, keys_values = (None, None) if layer_past is None else self._unpack(layer_past[1], past)
        mixed, state = self.memory(h, state, None if keep is None else keep[:, past:])
        if self.out_gate is not None:
            mixed = mixed * torch.sigmoid(self.out_gate(h).float()).to(mixed.dtype)
        present_keys = None
        if self.window is not None and self.sizes.form == "mag":
            persistent = None if self.memory.persistent is None else self.memory.persistent()
            attended, present_keys = self.window(h, keys_values, keep, persistent, start=past)
            gate = torch.sigmoid(self.memory_norm(mixed).float())
            mixed = self.window_norm(attended) * gate.to(attended.dtype)
        elif self.window is not None:
            between = self.between_norm(self.memory_proj(mixed))
            mixed, present_keys = self.window(between, keys_values, keep, None, start=past)
        if not use_cache:
            return mixed, None
        length = h.new_empty(batch, 1, past + time, 0)
        return mixed, (length, self._pack(state, present_keys))

    # -- the decoding state as one tensor ----------------------------------------------------------------------------

    def _pack(self, state: MemoryState, keys_values: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        memory = state.memory
        parts = [*memory.weights, *(memory.momentum or ())]
        if self.sizes.chunk_size > 1:
            parts += memory.anchor
        parts += [state.tail, state.seen, *(keys_values or ())]
        wide = torch.promote_types(memory.weights[0].dtype, torch.float32)
        return torch.cat([part.reshape(len(state.seen), -1).to(wide) for part in parts], dim=1)

    def _unpack(self, packed: torch.Tensor, past: int) -> tuple[MemoryState, tuple[torch.Tensor, torch.Tensor] | None]:
        sizes, spec, at = self.sizes, self.spec, 0

        def take(*shape: int) -> torch.Tensor:
            nonlocal at
            part = packed[:, at : at + math.prod(shape)].reshape(len(packed), *shape)
            at += math.prod(shape)
            return part

        heads, dim, hidden = sizes.heads, sizes.head_dim, sizes.hidden
        shapes = ((heads, dim, hidden), (heads, hidden, dim)) if sizes.depth == 2 else ((heads, dim, dim),)
        weights = tuple(take(*shape) for shape in shapes)
        momentum = tuple(take(*shape) for shape in shapes) if sizes.momentum else None
        anchor = tuple(take(*shape) for shape in shapes) if sizes.chunk_size > 1 else weights
        tail = take(3 * sizes.width, sizes.conv_width - 1)
        seen = take(1)[:, 0]
        keys_values = None
        if self.window is not None:
            kept = (spec.n_kv_heads, min(past, sizes.window - 1), spec.head_dim)
            keys_values = (take(*kept), take(*kept))
        memory = Memory(weights=weights, momentum=momentum, anchor=anchor)
        return MemoryState(memory=memory, tail=tail, seen=seen), keys_values


def kept_positions(attention_bias: torch.Tensor | None, *, past: int, time: int) -> torch.Tensor | None:
    """Which positions are tokens, [B, past + time], read off the bias that OLMo makes of a padding mask.

    :raises InputError: if the bias forbids more than later positions and padding.
    """
    if attention_bias is None:
        return None
    length = past + time
    allowed = attention_bias[:, 0, past:length, :length] > torch.finfo(attention_bias.dtype).min / 2
    keep = allowed[:, -1]
    rows = torch.arange(past, length, device=keep.device)
    causal = torch.arange(length, device=keep.device) <= rows[:, None]
    if not bool((allowed == (causal & keep[:, None])).all()):
        raise InputError(
            "an attention bias that is not causal with padding has no meaning for a memory",
            where="model.attention.type titans",
            right="an attention_mask, or no bias",
        )
    return None if bool(keep.all()) else keep
