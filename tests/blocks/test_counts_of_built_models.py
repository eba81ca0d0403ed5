"""Counts made without building equal the built model, group by group."""

from __future__ import annotations

import itertools

import pytest

FFN = {
    "conventional": {"d_ff": 48},
    "tapered": {"d_ff": 64, "taper": {"schedule": "cosine", "start": 1.5, "end": 0.5, "multiple_of": 4}},
    "hourglass": {"type": "hourglass", "d_ff": [16, 24], "num_sub_mlps": 2},
    "tapered hourglass": {
        "type": "hourglass",
        "d_ff": 32,
        "num_sub_mlps": 2,
        "taper": {"groups": [1.5, 1.0, 0.5], "multiple_of": 4},
    },
}
ATTENTION = {
    "default": {},
    "narrow gqa": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6},
    "gated": {"type": "gated"},
    "headwise list": {"type": ["gated", "softmax", "gated"], "gate": "headwise", "head_dim": 10},
}
OLMO = {
    "olmo2": {"norm_after": True},
    "biased, tied": {"include_bias": True, "weight_tying": True, "layer_norm_type": "default"},
    "gelu, learned positions": {"activation_type": "gelu", "rope": False, "embedding_layer_norm": True},
    "plain norms": {"layer_norm_with_affine": False, "attention_layer_norm_with_affine": False},
}


def group_of(name: str) -> str:
    if ".wte." in name or ".wpe." in name:
        return "embedding"
    if "norm" in name or ".ln_f." in name:
        return "norm"
    if name.startswith("transformer.ff_out."):
        return "head"
    return "attention" if any(word in name for word in ("att_proj", "attn_out", "gate_proj")) else "ffn"


@pytest.mark.parametrize("ffn,attention,olmo", list(itertools.product(FFN, ATTENTION, OLMO)))
def test_counts_equal_the_built_model_by_group(ffn, attention, olmo, tiny):
    from olmo_ext.upstream import build_model

    config = tiny(ffn=FFN[ffn], attention=ATTENTION[attention], **OLMO[olmo])
    model = build_model(config, device="meta")
    found = dict.fromkeys(("embedding", "attention", "ffn", "norm", "head"), 0)
    matrices = 0
    for name, parameter in model.named_parameters():
        found[group_of(name)] += parameter.numel()
        if group_of(name) in ("attention", "ffn") and parameter.dim() == 2:
            matrices += parameter.numel()
    counted = config.counts.parameters()
    assert {group: counted[group] for group in found} == found
    assert counted["non_embedding"] == matrices == model.num_params(include_embedding=False)
    assert counted["total"] == model.num_params() == sum(found.values())
    assert model.num_fwd_flops + model.num_bck_flops == config.counts.training_flops_per_token
