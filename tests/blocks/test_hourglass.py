"""Sub-MLPs with norms and residuals of their own, against the formula and inside everything OLMo does to blocks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

K3 = {"type": "hourglass", "d_ff": [16, 24, 10], "num_sub_mlps": 3}


def rms(x, norm):
    return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)


def formula(block, u, norm_after):
    """h_{i+1} = h_i + W_u (SiLU(W_d1 norm(h_i)) * (W_d2 norm(h_i))), or the norm on the update."""
    for norm, mlp in zip(block.ff_norms, block.sub_mlps, strict=True):
        up, gate = mlp.ff_proj.weight.chunk(2)
        x = u if norm_after else rms(u, norm)
        update = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), mlp.ff_out.weight)
        u = u + (rms(update, norm) if norm_after else update)
    return u


@pytest.mark.parametrize("norm_after", [False, True])
def test_the_layer_is_the_papers_formula(norm_after, built):
    model = built(ffn=K3, norm_after=norm_after)
    block = model.transformer.blocks[1]
    with torch.no_grad():
        for norm in (*block.ff_norms, block.attn_norm):
            norm.weight.uniform_(0.5, 1.5)
        x = torch.randn(2, 9, 32)
        mixed, _ = block.attention(x if norm_after else rms(x, block.attn_norm))
        u = x + (rms(mixed, block.attn_norm) if norm_after else mixed)
        torch.testing.assert_close(block(x)[0], formula(block, u, norm_after), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_after", [False, True])
def test_one_sub_mlp_is_the_conventional_layer(norm_after, built, tokens):
    conventional = built(ffn={"d_ff": 40}, norm_after=norm_after)
    hourglass = built(ffn={"type": "hourglass", "d_ff": 40}, norm_after=norm_after)
    renames = {"att_proj": "attention.att_proj", "attn_out": "attention.attn_out", "q_norm": "attention.q_norm"}
    renames |= {"k_norm": "attention.k_norm", "ff_norm": "ff_norms.0", "ff_proj": "sub_mlps.0.ff_proj"}
    renames |= {"ff_out": "sub_mlps.0.ff_out"}
    state = {}
    for name, tensor in conventional.state_dict().items():
        parts = name.split(".")
        if parts[1] == "blocks":
            parts[3] = renames.get(parts[3], parts[3])
        state[".".join(parts)] = tensor
    hourglass.load_state_dict(state)
    torch.testing.assert_close(hourglass(tokens).logits, conventional(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [None, "whole_layer", "one_in_two", "one_in_three", "one_in_four"]
    + ["one_in_eight", "two_in_three", "three_in_four", "fine_grained"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_activation_checkpointing_strategy_gives_equal_gradients(strategy, compiled, built, grads, tokens):
    from olmo.config import ActivationCheckpointingStrategy, CompilerConfig

    from olmo_ext.upstream import compile_blocks

    shape = {"ffn": K3, "attention": {"type": "gated", "head_dim": 12}, "residual_dropout": 0.2, "n_layers": 4}
    model = built(**shape)
    torch.manual_seed(3)
    reference = grads(model, tokens)
    model = built(**shape)
    model.set_activation_checkpointing(strategy and ActivationCheckpointingStrategy(strategy))
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, CompilerConfig(backend="aot_eager"))
    torch.manual_seed(3)
    found = grads(model, tokens)
    for name, gradient in reference.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_dropout_acts_once_per_branch(built, monkeypatch):
    from olmo_ext.blocks import block as module

    calls = []
    monkeypatch.setattr(module.Dropout, "forward", lambda self, x: calls.append(self.p) or x)
    block = built(ffn=K3, residual_dropout=0.25).transformer.blocks[0]
    block(torch.randn(1, 4, 32))
    assert calls == [0.25] * 4


@pytest.mark.parametrize("init", ["normal", "mitchell", "full_megatron"])
def test_initial_weights_follow_olmos_rules_with_the_real_number_of_branches(init, built):
    model = built(
        d_model=256, n_layers=2, n_heads=8, init_fn=init, ffn={"type": "hourglass", "d_ff": 192, "num_sub_mlps": 3}
    )
    for layer, block in enumerate(model.transformer.blocks):
        branches = 4 * (layer + 1)
        inner, width = 192, 256
        expected = {
            "normal": {"in": 0.02, "out": 0.02, "attn": 0.02},
            "mitchell": {
                "in": 1 / math.sqrt(256),
                "out": 1 / math.sqrt(inner * branches),
                "attn": 1 / math.sqrt(width * branches),
            },
            "full_megatron": {"in": 0.02, "out": 0.02 / math.sqrt(8), "attn": 0.02 / math.sqrt(8)},
        }[init]
        # A normal distribution cut at 3 sigma has 0.9866 of its standard deviation.
        for weight, kind in [
            (block.attention.att_proj.weight, "in"),
            (block.attention.attn_out.weight, "attn"),
            *((mlp.ff_proj.weight, "in") for mlp in block.sub_mlps),
            *((mlp.ff_out.weight, "out") for mlp in block.sub_mlps),
        ]:
            assert weight.std().item() == pytest.approx(0.9866 * expected[kind], rel=0.03)
            assert weight.abs().max() <= 3 * expected[kind] + 1e-7
        assert all(torch.equal(norm.weight, torch.ones(256)) for norm in block.ff_norms)


def test_an_odd_init_that_olmo_lacks_is_refused_as_olmo_refuses_it(built):
    with pytest.raises(NotImplementedError):
        built(ffn=K3, init_fn="kaiming_normal")


def test_block_groups_change_names_and_nothing_else(built, tokens):
    plain, grouped = built(n_layers=4, ffn=K3), built(n_layers=4, ffn=K3, block_group_size=2)
    assert torch.equal(plain(tokens).logits, grouped(tokens).logits)
    for source, target in ((plain, grouped), (grouped, plain)):
        state, renamed = target._make_state_dict_compatible(dict(source.state_dict()))
        target.load_state_dict(state)
        assert set(renamed) == set(source.state_dict())
    assert torch.equal(plain(tokens).logits, grouped(tokens).logits)


@pytest.mark.parametrize("decay", [True, False])
def test_olmos_optimizer_groups_take_every_parameter_once(decay, tiny):
    from olmo.config import TrainConfig
    from olmo.optim import get_param_groups

    from olmo_ext.upstream import build_model

    model = build_model(tiny(ffn=K3, attention={"type": "gated"}, include_bias=True))
    config = TrainConfig.new(optimizer={"decay_norm_and_bias": decay, "decay_embeddings": False})
    groups = get_param_groups(config, model)
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_two_matrix_sub_mlps_with_biases_count_and_compute(activation, built):
    model = built(ffn=K3, activation_type=activation, include_bias=True)
    assert sum(p.numel() for p in model.parameters()) == model.num_params()
    mlp = model.transformer.blocks[0].sub_mlps[1]
    torch.nn.init.normal_(mlp.ff_proj.bias)
    x = torch.randn(3, 32)
    inner = getattr(F, activation)(x @ mlp.ff_proj.weight.T + mlp.ff_proj.bias)
    torch.testing.assert_close(mlp(x), inner @ mlp.ff_out.weight.T + mlp.ff_out.bias)


STRATEGIES = ["by_block", "by_block_and_size", "by_block_group", "by_block_group_and_size", "size_based", "one_in_two"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fsdp_wraps_by_every_policy_with_equal_loss_and_weights(strategy, built, tokens):
    import torch.distributed as dist
    from olmo.config import FSDPWrapStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = built(n_layers=4, ffn=K3, block_group_size=2 if "group" in strategy else 1, attention={"head_dim": 12})
    plain = model(tokens).logits.detach()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=model.get_fsdp_wrap_policy(FSDPWrapStrategy(strategy)),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        num_wrapped = sum(isinstance(m, FullyShardedDataParallel) for m in wrapped.modules())
        assert num_wrapped >= {"by_block": 5, "by_block_and_size": 7, "by_block_group": 3}.get(strategy, 1)
        logits = wrapped(tokens).logits
        torch.testing.assert_close(logits, plain, rtol=0, atol=0)
        logits.sum().backward()
        assert model.num_params() == sum(
            p.numel() for p in built(n_layers=4, ffn=K3, attention={"head_dim": 12}).parameters()
        )
    finally:
        dist.destroy_process_group()
