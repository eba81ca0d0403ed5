"""A conventional untapered config is stock OLMo, to the last bit."""

from __future__ import annotations

import pytest
import torch

CASES = {
    "olmo2": {"norm_after": True},
    "pre-norm": {},
    "gpt2": {
        "activation_type": "gelu",
        "include_bias": True,
        "layer_norm_type": "default",
        "rope": False,
        "weight_tying": True,
        "attention_layer_norm": False,
    },
    "gqa": {"n_kv_heads": 2, "clip_qkv": 0.5},
    "mitchell": {"init_fn": "mitchell", "init_cutoff_factor": None},
    "megatron in groups": {"init_fn": "full_megatron", "n_layers": 4, "block_group_size": 2},
    "alibi, relu": {"rope": False, "alibi": True, "activation_type": "relu"},
    "llama block": {"block_type": "llama"},
    "odd hidden size": {"mlp_hidden_size": 90},
    "dropout": {"residual_dropout": 0.3, "attention_dropout": 0.2, "embedding_dropout": 0.1},
}


def stock_model(config):
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    values = {k: v for k, v in config.plain()["model"].items() if k not in ("ffn", "attention")}
    torch.manual_seed(config.seed)
    return OLMo(ModelConfig.new(**values | {"init_device": "cpu"}))


@pytest.mark.parametrize("case", CASES)
def test_names_weights_loss_and_gradients_are_stock_olmos_to_the_bit(case, tiny, grads, tokens):
    from olmo_ext.upstream import build_model

    config = tiny(**CASES[case])
    ours, stock = build_model(config), stock_model(config)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert {type(block) for block in ours.modules()} == {type(block) for block in stock.modules()}
    state = stock.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())
    results = []
    for model in (ours, stock):
        torch.manual_seed(0)
        logits = model(tokens).logits
        torch.manual_seed(0)
        results.append((logits, grads(model, tokens)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], gradient) for name, gradient in results[1][1].items())


def test_a_tapered_conventional_model_is_stock_blocks_of_different_widths(built, tokens):
    from olmo.config import ModelConfig
    from olmo.model import BufferCache, OLMoSequentialBlock

    model = built(ffn={"d_ff": 64, "taper": {"widths": [96, 64, 32]}})
    x = torch.randn(2, 16, 32)
    for block, width in zip(model.transformer.blocks, (96, 64, 32), strict=True):
        assert type(block) is OLMoSequentialBlock and block.ff_out.in_features == width
        fields = ModelConfig.__dataclass_fields__
        own = ModelConfig(**{k: getattr(model.config, k) for k in fields} | {"mlp_hidden_size": 2 * width})
        stock = OLMoSequentialBlock(block.layer_id, own, BufferCache())
        stock.load_state_dict(block.state_dict())
        assert torch.equal(stock(x)[0], block(x)[0])


def test_the_callers_random_state_is_untouched_and_the_seed_alone_decides(built):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = built(seed=1, ffn={"type": "hourglass", "d_ff": 16, "num_sub_mlps": 2})
    assert torch.equal(torch.rand(3), expected)
    second = built(seed=1, ffn={"type": "hourglass", "d_ff": 16, "num_sub_mlps": 2})
    other = built(seed=2, ffn={"type": "hourglass", "d_ff": 16, "num_sub_mlps": 2})
    states = [model.state_dict() for model in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["transformer.wte.weight"], states[2]["transformer.wte.weight"])
