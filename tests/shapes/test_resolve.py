"""From config rules to layers: every way to name a width says the same, and errors name the key."""

from __future__ import annotations

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import load_run_config
from olmo_ext.shapes.resolve import resolution_notes

BASE = {"d_model": 128, "n_heads": 4, "n_layers": 4, "rope": True, "include_bias": False}


def config(**model):
    return load_run_config({"model": {**BASE, **model}})


def d_ffs(**model) -> list[tuple[int, ...]]:
    return [layer.ffn.d_ff for layer in config(**model).shape.layers]


def refused(**model) -> str:
    with pytest.raises(InputError) as caught:
        config(**model)
    return str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"ffn": {"d_ff": 256}},
        {"ffn": {"ratio": 2}},
        {"mlp_ratio": 4},
        {"mlp_hidden_size": 512},
        {"mlp_ratio": 2, "activation_type": "gelu"},
        {"mlp_hidden_size": 256, "activation_type": "relu"},
    ],
)
def test_every_way_to_ask_for_256_gives_256(given):
    assert d_ffs(**given) == [(256,)] * 4


def test_hourglass_takes_one_width_or_one_per_sub_mlp():
    assert d_ffs(ffn={"type": "hourglass", "d_ff": 64, "num_sub_mlps": 3}) == [(64, 64, 64)] * 4
    assert d_ffs(ffn={"type": "hourglass", "d_ff": [64, 32]}) == [(64, 32)] * 4
    assert "2 widths for num_sub_mlps 3" in refused(ffn={"type": "hourglass", "d_ff": [64, 32], "num_sub_mlps": 3})
    assert "model.ffn.num_sub_mlps" in refused(ffn={"d_ff": 64, "num_sub_mlps": 2})


def test_taper_multiplies_every_sub_mlps_own_width():
    got = d_ffs(ffn={"type": "hourglass", "d_ff": [64, 128], "taper": {"schedule": "linear", "start": 1.5, "end": 0.5}})
    assert [sum(column) / 4 for column in zip(*got, strict=True)] == [64, 128]
    assert got[0] == (96, 192) and got[-1] == (32, 64)


def test_a_ratio_that_does_not_come_out_whole_is_rounded_and_reported():
    values = config(ffn={"ratio": 0.417, "multiple_of": 8})
    assert resolution_notes(values) == ["ratio 0.417 of 128 is 53.376; d_ff is 56 (+4.92%)"]
    assert resolution_notes(config(ffn={"ratio": 0.5})) == []


def test_a_taper_that_misses_the_mean_says_so():
    values = config(ffn={"d_ff": 101, "taper": {"schedule": "linear", "start": 1.5, "end": 0.5}})
    assert resolution_notes(values) == ["taper: the mean width is 100, -0.990% from d_ff 101 (multiples of 16)"]


def test_widths_of_every_layer_need_no_d_ff_and_go_beside_one_that_is_their_mean():
    for given, listed, num_notes in (
        ({"d_ff": 65}, [80, 64, 64, 51], 1),  # within rounding of the mean 64.75, which the note says
        ({"ratio": 0.5}, [96, 64, 64, 32], 0),
        ({"d_ff": None}, [96, 64, 64, 64], 0),
    ):
        resolved = config(ffn={**given, "taper": {"widths": listed}})
        assert [layer.ffn.d_ff for layer in resolved.shape.layers] == [(width,) for width in listed]
        assert len(resolution_notes(resolved)) == num_notes
    # OLMo's own d_ff of 256 is nobody's wish here, so multiple_of does not speak of it.
    assert d_ffs(ffn={"multiple_of": 48, "taper": {"widths": [96, 48, 48, 96]}})[0] == (96,)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ffn": {"d_ff": 64}}, "d_ff 64 disagree"),
        ({"ffn": {"d_ff": [96, 64], "type": "hourglass"}}, "d_ff [96, 64] disagree"),
        ({"ffn": {"ratio": 0.5}}, "ratio 0.5 (d_ff 64) disagree"),
        ({"ffn": {}, "mlp_hidden_size": 128}, "mlp_hidden_size 128 (d_ff 64) disagree"),
    ],
)
def test_widths_of_every_layer_that_miss_a_width_given_beside_them_are_refused(given, named):
    message = refused(**{**given, "ffn": {**given["ffn"], "taper": {"widths": [128, 96, 96, 64]}}})
    assert f"model.ffn.taper.widths: widths of mean 96 and {named}; set {named.split()[0]} to null" in message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mlp_hidden_size": 333}, ["model.mlp_hidden_size", "333 is odd"]),
        ({"ffn": {"d_ff": 100, "multiple_of": 16}}, ["model.ffn.d_ff", "100 is no multiple of multiple_of 16"]),
        ({"ffn": {"d_ff": 0}}, ["model.ffn.d_ff", "0 is no positive"]),
        ({"ffn": {"d_ff": "1365.33"}}, ["model.ffn.d_ff", "1365.33"]),
        ({"ffn": {"d_ff": 256, "ratio": 0.5}}, ["model.ffn.d_ff", "disagree"]),
        ({"ffn": {"d_ff": 256}, "mlp_hidden_size": 256}, ["model.ffn.d_ff", "mlp_hidden_size", "disagree"]),
        ({"ffn": {"d_ff": 64, "taper": {"start": 1.5, "end": 0.5}}}, ["model.ffn.taper", "nothing given"]),
        ({"ffn": {"d_ff": 64, "taper": {"schedule": "cosine", "start": 1.5}}}, ["model.ffn.taper", "needs end"]),
        ({"ffn": {"d_ff": 64, "taper": {"schedule": "cosin", "start": 1, "end": 1}}}, ["unknown schedule 'cosin'"]),
        ({"ffn": {"d_ff": 64, "taper": {"widths": [64, 64]}}}, ["2 widths for 4 layers"]),
        ({"ffn": {"d_ff": 64, "taper": {"groups": [1.0, -1.0]}}}, ["must be positive"]),
        ({"ffn": {"type": "conventionall", "d_ff": 64}}, ["did you mean 'conventional'"]),
        ({"n_heads": 3}, ["model.n_heads", "3 heads do not divide d_model 128"]),
        ({"attention": {"head_dim": 43}}, ["model.attention.head_dim", "43 is odd"]),
        ({"attention": {"n_heads": [4, 4]}}, ["model.attention.n_heads", "2 entries for 4 layers"]),
        ({"attention": {"n_heads": [4, 4, 2, 2]}}, ["model.attention.head_dim", "heads differ by layer"]),
        ({"attention": {"n_kv_heads": 3}}, ["model.attention.n_kv_heads", "3 does not divide 4 heads"]),
        ({"vocab_size": 600, "embedding_size": 512}, ["model.embedding_size", "512 rows for a vocabulary of 600"]),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_key(given, words):
    message = refused(**given)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_attention_width_may_differ_from_d_model_and_by_layer():
    layers = config(attention={"head_dim": 16, "n_heads": [8, 8, 4, 2], "n_kv_heads": 2}).shape.layers
    assert [layer.attention.width for layer in layers] == [128, 128, 64, 32]
    assert {layer.attention.kv_width for layer in layers} == {32}
    types = ["gated", "softmax", "gated", "softmax"]
    layers = config(attention={"type": types, "gate": "headwise"}).shape.layers
    assert [layer.attention.type for layer in layers] == types
    assert layers[0].attention.options["gate"] == "headwise" and not layers[1].attention.options


def test_an_odd_head_dim_is_fine_without_rotary_embeddings():
    assert config(rope=False, attention={"head_dim": 43}).shape.positional_embedding


def test_multi_query_attention_has_one_key_value_head():
    assert config(multi_query_attention=True).shape.layers[0].attention.n_kv_heads == 1
    assert config(n_kv_heads=2).shape.layers[0].attention.n_kv_heads == 2
