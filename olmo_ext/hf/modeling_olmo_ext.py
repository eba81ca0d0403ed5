"""OLMo-style decoder whose layers differ in shape. Needs torch, transformers and the files beside it; no downloads.

B batch, T new positions, S past and new positions, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from olmo_ext.blocks.mlp import ACTIVATIONS
from olmo_ext.blocks.titans_layer import MemoryGates, OwnWeights, PersistentTokens
from olmo_ext.hf.attention_olmo_ext import OlmoExtAttention, OlmoExtRMSNorm, make_norm
from olmo_ext.hf.configuration_olmo_ext import OlmoExtConfig
from olmo_ext.hf.memory_olmo_ext import OlmoExtTitans, place_memories

# transformers 5 renames `past_key_values` to `cache`; outputs and arguments follow the installed version.
CACHE_KEY = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class OlmoExtMLP(nn.Module):
    """One sub-MLP: down(SiLU(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, config, width):
        super().__init__()
        self.act = ACTIVATIONS[config.mlp_type]
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        swiglu = config.mlp_type == "swiglu"
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias) if swiglu else None
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)

    def forward(self, x):
        gate = () if self.gate_proj is None else (self.gate_proj(x),)
        return self.down_proj(self.act(self.up_proj(x), *gate))


class OlmoExtLayer(nn.Module):
    """Attention, then the layer's sub-MLPs, each with its norm and residual."""

    def __init__(self, config, layer_idx):
        super().__init__()
        widths = config.layer_widths(layer_idx)
        self.norm_after, self.parallel = config.norm_after, config.parallel_sub_mlps
        mixer = OlmoExtTitans if config.attention_types[layer_idx] == "titans" else OlmoExtAttention
        self.attention = mixer(config, layer_idx)
        self.attention_norm = make_norm(config, config.hidden_size, affine=config.norm_affine)
        self.sub_mlps = nn.ModuleList(OlmoExtMLP(config, width) for width in widths)
        self.sub_mlp_norms = nn.ModuleList(
            make_norm(config, config.hidden_size, affine=config.norm_affine) for _ in widths
        )

    def update(self, part, norm, x, **arguments):
        return norm(part(x, **arguments)) if self.norm_after else part(norm(x), **arguments)

    def forward(self, x, *, angles, mask, keep, cache):
        x = x + self.update(self.attention, self.attention_norm, x, angles=angles, mask=mask, keep=keep, cache=cache)
        start = x
        for norm, mlp in zip(self.sub_mlp_norms, self.sub_mlps, strict=True):
            x = x + self.update(mlp, norm, start if self.parallel else x)
        return x


class OlmoExtPreTrainedModel(PreTrainedModel):
    config_class = OlmoExtConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["OlmoExtLayer"]
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (OwnWeights, MemoryGates, PersistentTokens)):
            if not getattr(module.weight, "_is_hf_initialized", False):
                module.reset_parameters(self.config)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, OlmoExtRMSNorm):
            if module.weight is not None:
                nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class OlmoExtModel(OlmoExtPreTrainedModel):
    """Embedding, layers and the final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.has_memory = "titans" in config.attention_types
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None if config.rope else nn.Embedding(config.max_position_embeddings, config.hidden_size)
        affine = config.norm_affine
        self.embed_norm = make_norm(config, config.hidden_size, affine=affine) if config.embedding_norm else None
        self.layers = nn.ModuleList(OlmoExtLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size, affine=affine)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def angles(self, position_ids):
        """cos and sin, [B, 1, T, D/2], fp32 whatever the model's type."""
        dim = self.config.head_dim
        powers = torch.arange(0, dim, 2, device=position_ids.device, dtype=torch.float) / dim
        # The inverse first, as OLMo does: at position 4096 another order of rounding is 4e-4 of a radian.
        turns = position_ids[:, None, :, None].float() * (1.0 / self.config.rope_theta**powers)
        return turns.cos(), turns.sin()

    def keep(self, attention_mask, *, time, past):
        """Which positions are tokens, for the memories: [B, S], or None where all are."""
        if attention_mask is None or not self.has_memory:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[1] != past + time:
            raise ValueError(f"a memory takes an attention_mask of {past + time} positions, past ones included")
        keep = attention_mask.bool()
        return None if bool(keep.all()) else keep

    def mask(self, attention_mask, *, time, past, device):
        """What each new position may look at, [B or 1, 1, T, S], True where it may; None for plain causal."""
        if attention_mask is not None and attention_mask.dim() == 4:
            return attention_mask
        padded = attention_mask is not None and not bool(attention_mask.bool().all())
        if past == 0 and not padded:
            return None
        positions = torch.arange(past + time, device=device)
        mask = (positions[None, :] <= positions[past:, None])[None, None]
        if padded:
            # A padding position looks at itself, or its softmax would have nothing to divide by.
            own = (positions[None, :] == positions[past:, None])[None, None]
            mask = mask & attention_mask.bool()[:, None, None, : past + time] | own
        return mask

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        cache=None,
        **kwargs,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        if use_cache and cache is None:
            cache = DynamicCache()
        if cache is not None and self.has_memory:
            place_memories(cache, self.config.attention_types)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        time = x.shape[1]
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + time]
            else:
                position_ids = torch.arange(past, past + time, device=x.device)[None]
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        angles = self.angles(position_ids) if self.config.rope else None
        keep = self.keep(attention_mask, time=time, past=past)
        mask = self.mask(attention_mask, time=time, past=past, device=x.device)
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x, angles=angles, mask=mask, keep=keep, cache=cache)
        x = self.norm(x)
        states.append(x)
        kept = {CACHE_KEY: cache if use_cache else None}
        output = BaseModelOutputWithPast(
            last_hidden_state=x, hidden_states=tuple(states) if output_hidden_states else None, **kept
        )
        return output if return_dict is not False else output.to_tuple()


class OlmoExtForCausalLM(OlmoExtPreTrainedModel, GenerationMixin):
    """The decoder with its output projection."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = OlmoExtModel(config)
        # What transformers asks before it decodes speculatively: a memory cannot take back rejected tokens.
        self._is_stateful = self.model.has_memory
        bias = config.use_bias and not config.tie_word_embeddings
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=bias)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cache=cache,
        )
        x = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        if self.config.scale_logits:
            logits = logits / self.config.hidden_size**0.5
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **{CACHE_KEY: getattr(output, CACHE_KEY)}
        )
        return result if return_dict is not False else result.to_tuple()
