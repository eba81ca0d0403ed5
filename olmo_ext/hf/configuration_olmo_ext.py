"""Configuration of OLMo-style models whose layers differ in shape. Needs transformers alone."""

from transformers import PretrainedConfig

ATTENTIONS = ("softmax", "gated", "titans")
GATES = ("elementwise", "headwise")
MLP_TYPES = ("swiglu", "gelu", "relu")
NORMS = ("rms", "default")

DEFAULTS = {
    "vocab_size": 100352,
    "hidden_size": 768,
    "intermediate_size": None,
    "num_sub_mlps": 1,
    "parallel_sub_mlps": False,
    "mlp_type": "swiglu",
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": None,
    "head_dim": 64,
    "attention_types": "softmax",
    "attention_gate": "elementwise",
    "gate_scale": 1.0,
    "titans": None,
    "norm_after": False,
    "norm_type": "rms",
    "norm_eps": 1e-6,
    "norm_affine": True,
    "norm_bias": False,
    "qk_norm": True,
    "qk_norm_affine": True,
    "use_bias": False,
    "clip_qkv": None,
    "rope": True,
    "rope_theta": 500000.0,
    "embedding_norm": False,
    "scale_logits": False,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "use_cache": True,
}


def per_layer(value, num_layers, name):
    """One value per layer, from a list or a single value."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * num_layers
    if len(values) != num_layers:
        raise ValueError(f"{name} has {len(values)} entries for {num_layers} layers")
    return values


class OlmoExtConfig(PretrainedConfig):
    """Keys beside the usual ones:

    - `intermediate_size`: a list with one entry per layer; an entry is the inner width of each of the layer's sub-MLPs,
      or a list with one width per sub-MLP. Never a single number, so that no class of uniform layers takes it.
    - `num_sub_mlps`: sub-MLPs per layer, each with its own norm and residual; with `parallel_sub_mlps` all of a layer's
      read what attention has left, instead of one after the other.
    - `mlp_type`: `swiglu` (gate, up, down), `gelu` or `relu` (up, down).
    - `num_attention_heads`, `num_key_value_heads`: a number, or one per layer. `head_dim` is free of hidden_size.
    - `attention_types`: `softmax`, `gated` or `titans`, per layer; `attention_gate` (`elementwise`, `headwise`) and
      `gate_scale` of the gated ones.
    - `titans`: the sizes of the memory of the `titans` layers (see `titans_sizes.py`), one for all or one per layer.
    - `norm_after`: norms act on each update before it is added (OLMo-2), not on the input of each part.
    - `qk_norm`: a norm over the whole query and key vectors.
    """

    model_type = "olmo_ext"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"init_std": "initializer_range"}

    def __init__(self, **settings):
        values = {name: settings.pop(name, default) for name, default in DEFAULTS.items()}
        layers, widths = values["num_hidden_layers"], values["intermediate_size"]
        if widths is None:
            widths = [4 * values["hidden_size"]] * layers
        if not isinstance(widths, (list, tuple)):
            raise ValueError(f"intermediate_size {widths!r} is not a list with one entry per layer")
        values["intermediate_size"] = per_layer(widths, layers, "intermediate_size")
        values["attention_types"] = per_layer(values["attention_types"], layers, "attention_types")
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        for name, value in values.items():
            setattr(self, name, value)
        self.check()
        super().__init__(**{"tie_word_embeddings": False, **settings})

    def check(self):
        """:raises ValueError: for a setting, or a layer, that no class here computes."""
        for name, value, known in [
            ("mlp_type", self.mlp_type, MLP_TYPES),
            ("norm_type", self.norm_type, NORMS),
            ("attention_gate", self.attention_gate, GATES),
            *(("attention_types", kind, ATTENTIONS) for kind in self.attention_types),
        ]:
            if value not in known:
                raise ValueError(f"{name} {value!r} is none of {', '.join(known)}")
        for layer in range(self.num_hidden_layers):
            self.layer_widths(layer)
            if self.attention_types[layer] == "titans" and not isinstance(self.of_layer("titans", layer), dict):
                raise ValueError(f"layer {layer}: no sizes of its memory under `titans`")
            if self.of_layer("num_attention_heads", layer) % self.of_layer("num_key_value_heads", layer):
                raise ValueError(f"layer {layer}: key-value heads do not divide the heads")

    def layer_widths(self, layer):
        """Inner width of each sub-MLP of a layer."""
        entry = self.intermediate_size[layer]
        return per_layer(entry, self.num_sub_mlps, f"intermediate_size of layer {layer}")

    def of_layer(self, name, layer):
        """A layer's own value of a setting that is one for all layers or one per layer."""
        return per_layer(getattr(self, name), self.num_hidden_layers, name)[layer]
