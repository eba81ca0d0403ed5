"""Titans' layers: a memory that learns in context, and what decoding carries of it from token to token."""

import dataclasses

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from olmo_ext.blocks.titans_layer import NeuralMemory
from olmo_ext.hf.attention_olmo_ext import OlmoExtRMSNorm, OlmoExtWindow, make_norm
from olmo_ext.shapes.types.titans_sizes import TitansSizes


def map_tensors(function, value):
    """`function` of every tensor in nested tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(function, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: map_tensors(function, item) for name, item in fields.items()})
    return value


class OlmoExtMemoryLayer(CacheLayerMixin):
    """What one Titans layer carries from token to token, in the place of keys and values; it cannot be cut back."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.length, self.state = 0, None

    def store(self, state, time):
        """:param state: nested tensors with the batch in front."""
        self.state, self.is_initialized = state, True
        self.length += time

    def lazy_initialization(self, key_states, value_states):
        raise NotImplementedError("a memory keeps no keys and values")

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError("a memory keeps no keys and values")

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def offload(self):
        """Small, and read at once: it stays where it is."""

    prefetch = offload

    def reset(self):
        self.length, self.state, self.is_initialized = 0, None, False

    def crop(self, tokens_to_remove):
        if tokens_to_remove:
            raise ValueError("a memory cannot forget its last tokens: no assisted or contrastive decoding with it")

    def reorder_cache(self, beam_idx):
        self.state = map_tensors(lambda t: t.index_select(0, beam_idx.to(t.device)), self.state)

    def batch_repeat_interleave(self, repeats):
        self.state = map_tensors(lambda t: t.repeat_interleave(repeats, dim=0), self.state)

    def batch_select_indices(self, indices):
        self.state = map_tensors(lambda t: t[indices.to(t.device)], self.state)


def place_memories(cache, attention_types):
    """Give every Titans layer its own kind of cache layer, before the first token."""
    for index, kind in enumerate(attention_types):
        if kind != "titans":
            continue
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        layer = cache.layers[index]
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[index] = OlmoExtMemoryLayer()
        elif not isinstance(layer, OlmoExtMemoryLayer):
            raise ValueError(f"layer {index} carries a memory: give a DynamicCache, not one of {type(layer).__name__}")


class OlmoExtTitans(nn.Module):
    """A memory that learns in context, alone (lmm), beside attention over a window (mag), or before it (mal).

    lmm: o(memory(x) * sigmoid(gate(x)));  mag: o(norm(window(x)) * sigmoid(norm(memory(x))));
    mal: o(window(norm(proj(memory(x) * sigmoid(gate(x)))))).
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.sizes = sizes = TitansSizes(**config.layer_titans(layer_idx))
        affine, width = config.norm_affine, sizes.width
        head_norm = OlmoExtRMSNorm(sizes.head_dim, eps=config.norm_eps, affine=affine, bias=config.norm_bias)
        self.memory = NeuralMemory(d_model=config.hidden_size, sizes=sizes, bias=config.use_bias, head_norm=head_norm)
        self.out_gate = nn.Linear(config.hidden_size, width, bias=config.use_bias) if sizes.output_gate else None
        self.window = OlmoExtWindow(config, layer_idx, sizes.window) if sizes.has_attention else None
        if sizes.form == "mag":
            self.window_norm = make_norm(config, width, affine=affine)
            self.memory_norm = make_norm(config, width, affine=affine)
        if sizes.form == "mal":
            self.memory_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)
            self.between_norm = make_norm(config, config.hidden_size, affine=affine)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)

    def forward(self, x, *, angles, mask, keep, cache):
        time = x.shape[1]
        slot = None if cache is None else cache.layers[self.layer_idx]
        state, past = (None, None) if slot is None or slot.state is None else slot.state
        mixed, state = self.memory(x, state, None if keep is None else keep[:, -time:])
        if self.out_gate is not None:
            mixed = mixed * torch.sigmoid(self.out_gate(x).float()).to(mixed.dtype)
        if self.window is not None and self.sizes.form == "mag":
            persistent = None if self.memory.persistent is None else self.memory.persistent()
            attended, past = self.window(x, angles=angles, keep=keep, persistent=persistent, past=past)
            gate = torch.sigmoid(self.memory_norm(mixed).float())
            mixed = self.window_norm(attended) * gate.to(attended.dtype)
        elif self.window is not None:
            between = self.between_norm(self.memory_proj(mixed))
            mixed, past = self.window(between, angles=angles, keep=keep, persistent=None, past=past)
        if slot is not None:
            slot.store((state, past), time)
        return self.o_proj(mixed)
