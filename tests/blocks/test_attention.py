"""Attention whose width is not d_model, grouped keys, and the gate, against plain references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

WIDE = {"head_dim": 12}
NARROW_GQA = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6}
GATED = {"type": "gated", "head_dim": 12}
HEADWISE = {"type": "gated", "gate": "headwise", "n_kv_heads": 2}
MIXED = {"type": ["softmax", "gated", "softmax"], "n_heads": [2, 4, 3], "head_dim": 16}
HOURGLASS = {"type": "hourglass", "d_ff": 16, "num_sub_mlps": 2}
SHAPES = {"wide": WIDE, "narrow": NARROW_GQA, "gated": GATED, "headwise": HEADWISE, "mixed": MIXED}


def reference(attention, x, theta=10_000.0):
    """Causal softmax attention in plain steps, fp64; RoPE turns the pairs (i, i + head_dim/2)."""
    spec, length, dim = attention.spec, x.shape[1], attention.spec.head_dim
    q, k, v = (x @ attention.att_proj.weight.double().T).split(attention.fused_dims, dim=-1)

    def norm(t, module):
        return module.weight.double() * t / (t.pow(2).mean(-1, keepdim=True) + module.eps).sqrt()

    q, k = norm(q, attention.q_norm), norm(k, attention.k_norm)
    angles = torch.arange(length).double()[:, None] / theta ** (torch.arange(0, dim, 2).double() / dim)

    def turn(t):
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    heads = []
    for head in range(spec.n_heads):
        shared = head * spec.n_kv_heads // spec.n_heads
        own, kept = slice(head * dim, (head + 1) * dim), slice(shared * dim, (shared + 1) * dim)
        scores = turn(q[..., own]) @ turn(k[..., kept]).transpose(1, 2) / dim**0.5
        mask = torch.ones(length, length).triu(1).bool()
        heads.append(scores.masked_fill(mask, -torch.inf).softmax(-1) @ v[..., kept])
    mixed = torch.cat(heads, dim=-1)
    if hasattr(attention, "gate_proj"):
        gate = torch.sigmoid(x @ attention.gate_proj.weight.double().T)
        mixed = mixed * (gate.repeat_interleave(dim, dim=-1) if spec.options.get("gate") == "headwise" else gate)
    return mixed @ attention.attn_out.weight.double().T


@pytest.mark.parametrize("name", SHAPES)
def test_every_width_grouping_and_gate_equals_the_plain_reference(name, built):
    model = built(attention=SHAPES[name], ffn=HOURGLASS)
    x = torch.randn(2, 11, 32)
    for block in model.transformer.blocks:
        torch.nn.init.normal_(block.attention.q_norm.weight)
        found, _ = block.attention(x)
        torch.testing.assert_close(found.double(), reference(block.attention, x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_after", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_decoding_token_by_token_with_the_cache_equals_the_full_forward(name, norm_after, built, tokens):
    model = built(attention=SHAPES[name], ffn=HOURGLASS, norm_after=norm_after).eval()
    full = model(tokens).logits
    past, steps = None, []
    for position in range(tokens.shape[1]):
        output = model(tokens[:, position : position + 1], past_key_values=past, use_cache=True)
        past = output.attn_key_values
        steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), full, rtol=1e-4, atol=1e-5)
    widths = [key.shape[1] * key.shape[3] for key, _ in past]
    assert widths == [block.spec.kv_width for block in attentions(model)]


def attentions(model):
    return [block.attention for block in model.transformer.blocks if hasattr(block, "sub_mlps")]


@pytest.mark.parametrize("name", SHAPES)
def test_olmos_generate_continues_as_greedy_decoding_without_a_cache_does(name, built, tokens):
    model = built(attention=SHAPES[name], ffn=HOURGLASS, init_std=0.2).eval()
    prompt = tokens[:, :5]
    generated = model.generate(prompt, max_steps=6).token_ids[:, 0]
    greedy = prompt
    for _ in range(6):
        greedy = torch.cat((greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    expected = greedy[:, 5:]
    # Once the end-of-text token has come, OLMo repeats it.
    expected[(expected == 63).cumsum(dim=1) > 0] = 63
    assert torch.equal(generated, expected) and (generated != 63).sum() > 6


@pytest.mark.parametrize("name", SHAPES)
def test_no_position_sees_a_later_token(name, built, tokens):
    model = built(attention=SHAPES[name], ffn=HOURGLASS).eval()
    base = model(tokens).logits
    for position in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 62
        difference = (model(changed).logits - base).abs().amax(-1)
        assert difference[:, :position].max() == 0 if position else True
        assert difference[:, position].min() > 0


@pytest.mark.parametrize("name", SHAPES)
def test_padded_positions_do_not_matter(name, built, tokens):
    model = built(attention=SHAPES[name], ffn=HOURGLASS).eval()
    mask = torch.ones_like(tokens)
    mask[:, 12:] = 0
    torch.testing.assert_close(
        model(tokens, attention_mask=mask).logits[:, :12], model(tokens[:, :12]).logits, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
def test_a_closed_form_gate_open_gives_plain_attention_and_at_zero_half_of_it(gate, built):
    shape = {"head_dim": 12, "n_kv_heads": 2}
    plain = built(attention=shape, ffn=HOURGLASS).transformer.blocks[0].attention
    gated = built(attention=shape | {"type": "gated", "gate": gate}, ffn=HOURGLASS, include_bias=True)
    gated = gated.transformer.blocks[0].attention
    gated.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 7, 32)
    torch.nn.init.zeros_(gated.gate_proj.weight)
    torch.testing.assert_close(gated(x)[0], 0.5 * plain(x)[0])
    torch.nn.init.constant_(gated.gate_proj.bias, 30.0)
    torch.testing.assert_close(gated(x)[0], plain(x)[0])


def test_gate_scale_two_and_a_zero_gate_start_as_plain_attention(built):
    plain = built(ffn=HOURGLASS).transformer.blocks[0].attention
    open_ = built(ffn=HOURGLASS, attention={"type": "gated", "gate_scale": 2.0, "gate_init": "zero"})
    open_ = open_.transformer.blocks[0].attention
    assert not open_.gate_proj.weight.any()
    open_.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(open_(x)[0], plain(x)[0])


def test_a_headwise_gate_is_an_elementwise_gate_with_equal_rows_per_head(built):
    elementwise = built(ffn=HOURGLASS, attention={"type": "gated"}).transformer.blocks[0].attention
    headwise = built(ffn=HOURGLASS, attention={"type": "gated", "gate": "headwise"}).transformer.blocks[0].attention
    state = headwise.state_dict()
    state["gate_proj.weight"] = state["gate_proj.weight"].repeat_interleave(8, dim=0)
    elementwise.load_state_dict(state)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(elementwise(x)[0], headwise(x)[0])


def test_permuting_heads_with_their_weights_changes_nothing(built):
    attention = built(ffn=HOURGLASS, attention={"type": "gated"}).transformer.blocks[0].attention
    x = torch.randn(2, 7, 32)
    before = attention(x)[0]
    order = torch.arange(32).view(4, 8)[torch.tensor([2, 0, 3, 1])].flatten()
    with torch.no_grad():
        qkv = attention.att_proj.weight.clone()
        attention.att_proj.weight.copy_(torch.cat([part[order] for part in qkv.chunk(3)]))
        attention.gate_proj.weight.copy_(attention.gate_proj.weight[order])
        attention.attn_out.weight.copy_(attention.attn_out.weight[:, order])
    torch.testing.assert_close(attention(x)[0], before)


def test_the_gate_is_computed_in_fp32_under_autocast(built, monkeypatch):
    attention = built(ffn=HOURGLASS, attention={"type": "gated"}).transformer.blocks[0].attention
    seen = []
    sigmoid = torch.sigmoid
    monkeypatch.setattr(torch, "sigmoid", lambda x: seen.append(x.dtype) or sigmoid(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attention(torch.randn(1, 4, 32))
    assert seen == [torch.float32] and output.dtype == torch.bfloat16


def test_the_default_softmax_attention_beside_gated_layers_is_stock(built):
    from olmo.model import OLMoSequentialBlock

    from olmo_ext.blocks.block import ShapedBlock

    blocks = built(attention={"type": ["softmax", "gated", "softmax"]}).transformer.blocks
    assert [type(block) for block in blocks] == [OLMoSequentialBlock, ShapedBlock, OLMoSequentialBlock]


def test_stock_blocks_of_another_head_size_than_the_models_use_its_rotary_table(built, tokens):
    """OLMo's table is shared under one name and sized by the model's own heads."""
    from olmo.model import OLMoSequentialBlock

    other = built(n_heads=4, attention={"n_heads": 2, "head_dim": 16})
    expected = built(n_heads=2)
    assert all(type(block) is OLMoSequentialBlock for block in other.transformer.blocks)
    assert torch.equal(other(tokens).logits, expected(tokens).logits)


def test_layers_of_two_head_sizes_in_one_model_keep_apart(built, tokens):
    """A config has one head_dim; a shape may have several."""
    import dataclasses

    from olmo_ext.upstream.shaped_model import build_from_model_config, shape_to_dict

    model = built(attention={"head_dim": 12}, ffn=HOURGLASS)
    shape = model.config.model_shape
    layers = list(shape.layers)
    layers[1] = dataclasses.replace(layers[1], attention=dataclasses.replace(layers[1].attention, head_dim=6))
    mixed_shape = dataclasses.replace(shape, layers=tuple(layers))
    mixed = build_from_model_config(dataclasses.replace(model.config, shape=shape_to_dict(mixed_shape)))
    x = torch.randn(2, 11, 32)
    for block in mixed.transformer.blocks:
        found, _ = block.attention(x)
        torch.testing.assert_close(found.double(), reference(block.attention, x.double()), rtol=1e-5, atol=1e-6)
    assert [block.attention.spec.head_dim for block in mixed.transformer.blocks] == [12, 6, 12]


def test_alibi_with_another_head_count_is_refused(built):
    from olmo_ext.base.errors import InputError

    with pytest.raises(InputError, match="ALiBi"):
        built(rope=False, alibi=True, attention={"n_heads": 2, "head_dim": 16})


@pytest.mark.parametrize("head_dim", [8, 12])
def test_alibi_and_learned_positions_work_with_own_widths(head_dim, built, tokens):
    for positions in ({"alibi": True}, {}):
        model = built(rope=False, attention={"head_dim": head_dim}, ffn=HOURGLASS, **positions)
        assert F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten()).isfinite()
        assert sum(p.numel() for p in model.parameters()) == model.num_params()
