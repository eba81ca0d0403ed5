"""Hope's memory system as an FFN: the hourglass stack in one composition, a sum of readers in the other."""

from __future__ import annotations

import pytest
import torch

from olmo_ext.base.errors import InputError

LEVELS = {"d_ff": [24, 16, 12]}
HOPE = {"type": "hope", **LEVELS, "update_periods": [1, 4, 16]}
INDEPENDENT = {**HOPE, "composition": "independent"}


@pytest.mark.parametrize("norm_after", [False, True])
def test_the_sequential_levels_are_the_hourglass_stack_to_the_bit(norm_after, built, grads, tokens):
    hope = built(ffn=HOPE, norm_after=norm_after)
    stack = built(ffn={"type": "hourglass", **LEVELS}, norm_after=norm_after)
    assert hope.state_dict().keys() == stack.state_dict().keys()
    ours, theirs = grads(hope, tokens), grads(stack, tokens)
    for name, parameter in stack.named_parameters():
        assert torch.equal(hope.state_dict()[name], parameter), name
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("norm_after", [False, True])
def test_independent_levels_all_read_what_attention_left_and_are_added(norm_after, built):
    block = built(ffn=INDEPENDENT, norm_after=norm_after).transformer.blocks[0]
    x = torch.randn(2, 5, 32)
    expected = x.clone()
    for norm, mlp in zip(block.ff_norms, block.sub_mlps, strict=True):
        expected = expected + (norm(mlp(x)) if norm_after else mlp(norm(x)))
    torch.testing.assert_close(block.feed_forward(x), expected)
    # The order of the levels is nothing to them.
    block.ff_norms, block.sub_mlps = block.ff_norms[::-1], block.sub_mlps[::-1]
    torch.testing.assert_close(block.feed_forward(x), expected)


@pytest.mark.parametrize("ffn", [HOPE, INDEPENDENT])
def test_levels_with_zero_output_matrices_leave_the_first_level_alone(ffn, built, tokens):
    model = built(ffn=ffn)
    single = built(ffn={"type": "hope", "d_ff": [24]})
    for block in model.transformer.blocks:
        for mlp in block.sub_mlps[1:]:
            torch.nn.init.zeros_(mlp.ff_out.weight)
    single.load_state_dict({key: model.state_dict()[key] for key in single.state_dict()})
    torch.testing.assert_close(model(tokens).logits, single(tokens).logits)


@pytest.mark.parametrize("ffn", [HOPE, INDEPENDENT])
def test_counts_equal_the_built_model_and_periods_cost_nothing(ffn, built, tiny, tokens):
    config, plain = tiny(ffn=ffn), tiny(ffn={"type": "hourglass", **LEVELS})
    assert config.counts == plain.counts
    model = built(ffn=ffn).eval()
    assert config.counts.total == sum(parameter.numel() for parameter in model.parameters())
    past, parts = None, []
    for position in range(tokens.shape[1]):
        output = model(tokens[:, position : position + 1], past_key_values=past, use_cache=True)
        past = output.attn_key_values
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_the_taper_acts_on_every_level_and_keeps_each_mean(tiny):
    taper = {"schedule": "cosine", "start": 1.5, "end": 0.5, "multiple_of": 2}
    layers = tiny(ffn={**HOPE, "taper": taper}).shape.layers
    assert [layer.ffn.d_ff for layer in layers] == [(36, 24, 18), (24, 16, 12), (12, 8, 6)]


def test_the_periods_reach_the_shape_and_come_back_from_the_models_config(tiny):
    from olmo_ext.training.update_periods import periods_of
    from olmo_ext.upstream.shaped_model import shape_from_dict, shaped_model_config

    config = tiny(ffn=HOPE)
    assert periods_of(config.shape) == (1, 4, 16)
    kept = shaped_model_config(config.model, config.shape)
    assert periods_of(kept.model_shape) == (1, 4, 16) and shape_from_dict(kept.shape).layers == config.shape.layers
    assert periods_of(tiny(ffn={"type": "hope", **LEVELS}).shape) == (1, 1, 1)
    assert periods_of(tiny(ffn={"d_ff": 24}).shape) == (1,)


def test_diagnosis_finds_every_level(built):
    from olmo_ext.evals.taps import find_taps

    for ffn in (HOPE, INDEPENDENT):
        assert [len(tap.ffn) for tap in find_taps(built(ffn=ffn))] == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"update_periods": [1, 2]}, "2 update_periods for 3"),
        ({"update_periods": [1, 2, 0]}, "positive whole"),
        ({"update_periods": 4}, "no list"),
        ({"composition": "nested"}, "sequential, independent"),
        ({"update_period": [1, 1, 1]}, "did you mean 'update_periods'"),
    ],
)
def test_a_wrong_option_is_named(options, word, tiny):
    with pytest.raises(InputError, match=word):
        tiny(ffn={"type": "hope", **LEVELS, **options})
