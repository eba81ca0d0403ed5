"""Counts against arithmetic done by hand from the papers' formulas."""

from __future__ import annotations

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import load_run_config
from olmo_ext.shapes.budget import printed_interval

OLMO2 = {
    "rope": True,
    "include_bias": False,
    "weight_tying": False,
    "vocab_size": 100278,
    "embedding_size": 100352,
    "max_sequence_length": 4096,
    "layer_norm_type": "rms",
    "attention_layer_norm": True,
}


def counts(budget=None, **model):
    return load_run_config({"model": {**OLMO2, **model}, **({"budget": budget} if budget else {})}).counts


def test_olmo2_1b_has_its_published_number_of_parameters():
    got = counts(d_model=2048, n_heads=16, n_layers=16, mlp_ratio=8)
    assert got.total == 1_484_916_736
    assert got.attention == 16 * 4 * 2048**2 and got.ffn == 16 * 3 * 2048 * 8192
    assert got.non_embedding == 1_073_741_824
    assert got.norm == 2048 * (16 * 4 + 1)


def test_training_flops_at_equal_non_embedding_differ_by_the_padded_head_and_attention():
    wide = counts(d_model=1376, n_heads=16, n_layers=6, ffn={"type": "hourglass", "d_ff": 688, "num_sub_mlps": 4})
    base = counts(d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072})
    assert round(wide.training_flops_per_token / 1e6) == 1916
    assert round(base.training_flops_per_token / 1e6) == 1595
    head = 768 * 100352
    assert base.training_flops_per_token == 6 * (base.non_embedding + head) + 12 * 12 * 768 * 4096
    assert base.training_flops_per_token_causal == 6 * (base.non_embedding + head) + 6 * 12 * 768 * 4096


def test_a_tied_head_has_no_parameters_and_still_costs_its_product():
    tied = counts(d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072}, weight_tying=True)
    free = counts(d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072})
    assert tied.head == 0 and free.head == 768 * 100352
    assert tied.training_flops_per_token == free.training_flops_per_token


def test_narrow_attention_gqa_and_gates():
    d, w, kv = 512, 256, 64
    attention = {"n_heads": 8, "head_dim": 32, "n_kv_heads": 2}
    got = counts(d_model=d, n_heads=8, n_layers=3, ffn={"d_ff": 512}, attention=attention)
    assert got.attention == 3 * (2 * d * w + 2 * d * kv)
    assert got.kv_cache_elements_per_token == 3 * 2 * kv
    assert got.to_json()["kv_cache_bytes_per_token"] == 2 * 3 * 2 * kv
    assert got.norm == 3 * (2 * d + w + kv) + d
    gated = counts(d_model=d, n_heads=8, n_layers=3, ffn={"d_ff": 512}, attention={**attention, "type": "gated"})
    assert gated.attention - got.attention == 3 * d * w
    headwise = {**attention, "type": "gated", "gate": "headwise"}
    headwise = counts(d_model=d, n_heads=8, n_layers=3, ffn={"d_ff": 512}, attention=headwise)
    assert headwise.attention - got.attention == 3 * d * 8


def test_gelu_has_two_matrices_and_biases_count_to_their_group_but_not_to_non_embedding():
    plain = counts(d_model=128, n_heads=4, n_layers=2, activation_type="gelu", ffn={"d_ff": 512})
    assert plain.ffn == 2 * 2 * 128 * 512
    biased = counts(d_model=128, n_heads=4, n_layers=2, activation_type="gelu", ffn={"d_ff": 512}, include_bias=True)
    assert biased.ffn - plain.ffn == 2 * (512 + 128)
    assert biased.attention - plain.attention == 2 * (3 * 128 + 128)
    assert biased.head - plain.head == 100352
    assert biased.norm == 2 * plain.norm
    assert biased.non_embedding == plain.non_embedding


def test_a_taper_of_exact_mean_has_the_same_counts_as_its_base():
    taper = {"schedule": "cosine", "start": 1.5, "end": 0.5}
    base = counts(d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072})
    assert counts(d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072, "taper": taper}) == base


def test_budget_beyond_its_tolerance_says_by_how_much_and_which_width_fits():
    budget = {"non_embedding": "113.25M", "tolerance": "0.5%"}
    with pytest.raises(InputError) as caught:
        counts(budget, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3200})
    assert "+3.12% off 113.25M" in str(caught.value)
    assert "d_ff 3072 instead of 3200 would be -0.00% off" in str(caught.value)
    counts(budget, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072})


def test_budget_that_attention_alone_exceeds_says_so():
    with pytest.raises(InputError, match="even without an FFN it is 18.31M too much"):
        counts({"non_embedding": "10M"}, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 64})


def test_budget_in_training_flops_finds_the_width_that_fits():
    budget = {"training_flops_per_token": 1_594_884_096, "tolerance": "0.1%"}
    assert counts(budget, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072})
    with pytest.raises(InputError, match="d_ff 3072 instead of 3328"):
        counts(budget, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3328})


def test_two_budgets_or_none_are_refused():
    for budget in ({"non_embedding": "1M", "total": "2M"}, {"tolerance": "1%"}):
        with pytest.raises(InputError, match="one of non_embedding, total, training_flops_per_token"):
            counts(budget, d_model=128, n_heads=4, n_layers=2)


def test_printed_counts_hold_for_what_rounds_to_them():
    assert [int(v) for v in printed_interval("28.31M")] == [28_305_000, 28_315_000]
    assert [int(v) for v in printed_interval("45M")] == [44_500_000, 45_500_000]
    for text in ("2.831e7", "2.831E+7", " 28.31 M", "2_8.31M"):
        assert [int(v) for v in printed_interval(text)] == [28_305_000, 28_315_000], text
    assert printed_interval("28,310,000") == printed_interval(28_310_000) == (28_309_999.5, 28_310_000.5)
    with pytest.raises(InputError, match="attention has 28,311,552 weights, which is not 28.4M"):
        counts(
            {"non_embedding": "113.25M", "attention": "28.4M"}, d_model=768, n_heads=12, n_layers=12, ffn={"d_ff": 3072}
        )
