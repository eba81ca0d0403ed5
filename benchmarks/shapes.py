"""The four shapes that the benchmarks compare, at equal non-embedding parameters (within 1 %)."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 704, "vocab_size": 4096},
    "113m": {"d_model": 768, "n_layers": 12, "n_heads": 12, "d_ff": 3072, "vocab_size": 100352},
}
"""Sizes of the conventional shape; the others follow."""

OLMO2: dict[str, Any] = {
    "rope": True,
    "rope_theta": 500_000,
    "layer_norm_type": "rms",
    "layer_norm_eps": 1e-6,
    "attention_layer_norm": True,
    "include_bias": False,
    "weight_tying": False,
    "init_fn": "normal",
    "init_std": 0.02,
    "init_cutoff_factor": 3.0,
}


def run_configs(size: str, *, sequence_length: int) -> dict[str, Any]:
    """Name -> RunConfig.

    The gated shape pays for its gate (heads * head_dim * d_model) with d_ff, as the paper does; the hourglass has four
    sub-MLPs of a quarter of the width each, so that d and L stay.
    """
    from olmo_ext.config.run_config import load_run_config

    numbers = dict(SIZES[size])
    d_ff, vocabulary = numbers.pop("d_ff"), numbers.pop("vocab_size")
    gated = round((d_ff - numbers["d_model"] / 3) / 16) * 16
    ffns: dict[str, dict[str, Any]] = {
        "conventional": {"d_ff": d_ff},
        "hourglass": {"type": "hourglass", "num_sub_mlps": 4, "d_ff": d_ff // 4},
        "tapered": {"d_ff": d_ff, "taper": {"schedule": "cosine", "start": 1.5, "end": 0.5, "multiple_of": 16}},
        "gated": {"d_ff": gated},
    }
    configs = {}
    for name, ffn in ffns.items():
        model = OLMO2 | numbers | {"vocab_size": vocabulary, "embedding_size": vocabulary, "ffn": ffn}
        model |= {"eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
        model["max_sequence_length"] = sequence_length
        model["attention"] = {"type": "gated" if name == "gated" else "softmax"}
        configs[name] = load_run_config({"model": model, "run_name": name})
    return configs
