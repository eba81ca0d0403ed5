"""Titans' layers: a memory that learns in context, and what decoding carries of it from token to token."""

import dataclasses
from functools import partial

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from olmo_ext.blocks.titans_forms import TitansForm
from olmo_ext.hf.attention_olmo_ext import OlmoExtRMSNorm, layer_heads, make_norm
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


class OlmoExtTitans(TitansForm):
    """A memory that learns in context, with its output projection and its place in the cache."""

    def __init__(self, config, layer_idx):
        sizes = TitansSizes(**config.of_layer("titans", layer_idx))
        affine = config.norm_affine
        super().__init__(
            d_model=config.hidden_size,
            sizes=sizes,
            bias=config.use_bias,
            head_norm=OlmoExtRMSNorm(sizes.head_dim, eps=config.norm_eps, affine=affine, bias=config.norm_bias),
            make_norm=partial(make_norm, config, affine=affine),
            window=layer_heads(config, layer_idx),
        )
        self.layer_idx = layer_idx
        self.o_proj = nn.Linear(sizes.width, config.hidden_size, bias=config.use_bias)

    def forward(self, x, *, angles, mask, keep, cache):
        slot = None if cache is None else cache.layers[self.layer_idx]
        state, past = (None, None) if slot is None or slot.state is None else slot.state
        mixed, state, past = self.compose(x, state, past, angles=angles, keep=keep)
        if slot is not None:
            slot.store((state, past), x.shape[1])
        return self.o_proj(mixed)
