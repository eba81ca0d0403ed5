"""What the model half of the upstream package relies on, and what it changes."""

from __future__ import annotations

import inspect

import pytest
import torch

VALUES = {
    "model": {
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "mlp_ratio": 4,
        "rope": True,
        "include_bias": False,
        "layer_norm_type": "rms",
        "vocab_size": 64,
        "embedding_size": 64,
        "max_sequence_length": 16,
        "weight_tying": False,
        "ffn": {"type": "hourglass", "d_ff": [16, 24], "num_sub_mlps": 2},
        "attention": {"type": ["gated", "softmax"], "head_dim": 12, "gate": "headwise"},
    }
}

SYMBOLS = {
    "olmo.model": {
        "OLMoBlock.build": ["layer_id", "config", "cache"],
        "OLMoBlock._cast_attn_bias": ["bias", "input_dtype"],
        "OLMoBlock._scaled_dot_product_attention": ["self", "q", "k", "v", "attn_mask", "dropout_p", "is_causal"]
        + ["max_doc_len", "cu_doc_lens"],
        "OLMoBlock.set_activation_checkpointing": ["self", "strategy", "checkpoint_func"],
        "OLMo.num_params": ["self", "include_embedding"],
        "OLMo._make_state_dict_compatible": ["self", "state_dict"],
        "LayerNormBase.build": ["config", "size", "kwargs"],
        "RotaryEmbedding.__init__": ["self", "config", "cache"],
        "activation_checkpoint_function": ["cfg"],
        "Dropout": None,
        "LayerNorm": None,
        "BufferCache": None,
        "OLMo.num_fwd_flops": None,
        "OLMo.num_bck_flops": None,
    },
    "olmo.config": {
        "ModelConfig": None,
        "BlockType": None,
        "InitFnType": None,
        "ActivationCheckpointingStrategy": None,
    },
    "olmo.initialization": {"init_normal": ["module", "std", "init_cutoff_factor"]},
}


@pytest.mark.parametrize("module", SYMBOLS)
def test_every_upstream_symbol_that_is_used_exists_with_its_parameters(module):
    import importlib

    import olmo_ext.upstream  # noqa: F401  (patched functions keep the signatures)

    for name, parameters in SYMBOLS[module].items():
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if parameters is not None:
            assert list(inspect.signature(found).parameters) == parameters, name


def test_another_version_of_upstream_is_refused(monkeypatch):
    import importlib.metadata

    from olmo_ext.base.errors import InputError
    from olmo_ext.upstream.version import check_upstream

    check_upstream.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.0")
    with pytest.raises(InputError, match=r"ai2-olmo 0\.7\.0.*pip install ai2-olmo==0\.6\.0"):
        check_upstream()
    monkeypatch.undo()
    check_upstream.cache_clear()
    assert check_upstream() == "0.6.0"


def test_a_plain_upstream_config_is_not_touched_by_the_patches():
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    import olmo_ext.upstream  # noqa: F401

    model = OLMo(
        ModelConfig.new(d_model=16, n_heads=2, n_layers=1, vocab_size=128, embedding_size=128, init_device="cpu")
    )
    assert model.num_params() == sum(p.numel() for p in model.parameters())
    per_token = model.num_params(include_embedding=False)
    assert model.num_fwd_flops == 2 * per_token + 4 * 16 * 1024


def test_the_shape_survives_olmos_own_config_files(tmp_path):
    from olmo.config import TrainConfig
    from olmo.model import OLMo

    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import ShapedModelConfig, build_model
    from olmo_ext.upstream.shaped_model import shape_from_dict, shape_to_dict, shaped_model_config

    config = load_run_config(VALUES)
    assert shape_from_dict(shape_to_dict(config.shape)) == config.shape
    shaped = shaped_model_config(config.model, config.shape)
    train = TrainConfig.new()
    train.model = shaped
    train.save(tmp_path / "config.yaml")
    again = ShapedModelConfig.load(tmp_path / "config.yaml", key="model")
    assert again == shaped and again.model_shape == config.shape
    again.init_device = "cpu"
    torch.manual_seed(config.seed)
    model, ours = OLMo(again), build_model(config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True))


def test_a_shape_that_is_not_the_configs_is_refused():
    import dataclasses

    from olmo_ext.base.errors import InputError
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream.shaped_model import shaped_model_config

    config = load_run_config(VALUES)
    with pytest.raises(InputError, match="2 layers of d_model 32"):
        shaped_model_config(dataclasses.replace(config.model, n_layers=3), config.shape)


def test_other_blocks_than_sequential_take_stock_layers_only():
    from olmo_ext.base.errors import InputError
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import build_model

    with pytest.raises(InputError, match="block_type"):
        build_model(load_run_config(VALUES, ["model.block_type=llama"]))


def test_a_model_loads_from_its_run_directory_the_newest_or_a_named_step(tmp_path):
    from olmo_ext.base.errors import InputError
    from olmo_ext.base.run_directory import RunDirectory
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.training.checkpoint import CheckpointStore, Snapshot
    from olmo_ext.training.load_model import load_model_from_run
    from olmo_ext.upstream import build_model

    config = load_run_config(VALUES)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(InputError, match="config.yaml"):
        load_model_from_run(run.path)
    run.write_config(config.plain())
    with pytest.raises(InputError, match="no complete checkpoint"):
        load_model_from_run(run.path)
    models = {step: build_model(config, seed=step) for step in (1, 2)}
    for step, model in models.items():
        tensors = {"model.safetensors": model.state_dict(), "optimizer.safetensors": {}}
        texts = {"train_state.json": "{}"}
        CheckpointStore(run.checkpoints).write(Snapshot(step=step, tensors=tensors, texts=texts))
    tokens = torch.arange(12)[None]
    for step, expected in ((None, 2), (1, 1)):
        model, loaded = load_model_from_run(run.path, step=step)
        assert not model.training and loaded.shape == config.shape
        assert torch.equal(model(tokens).logits, models[expected].eval()(tokens).logits)
    with pytest.raises(InputError, match="step3"):
        load_model_from_run(run.path, step=3)
    run.write_config(load_run_config(VALUES, ["model.ffn.d_ff=[16,32]"]).plain())
    with pytest.raises(InputError, match=r"step2: .*ff_out.weight is \[32, 24\] in the checkpoint"):
        load_model_from_run(run.path)


def test_building_reads_the_shape_once_whatever_the_number_of_layers(monkeypatch):
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.upstream import build_model, shaped_model

    parsed, read = [], shaped_model.shape_from_dict
    monkeypatch.setattr(shaped_model, "shape_from_dict", lambda content: (parsed.append(1), read(content))[1])
    build_model(
        load_run_config({"model": {"d_model": 32, "n_heads": 4, "rope": True, "n_layers": 200, "ffn": {"d_ff": 24}}}),
        device="meta",
    )
    assert len(parsed) == 1
