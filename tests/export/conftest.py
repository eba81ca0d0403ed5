"""Tiny runs with a tokenizer of their own, exported once per kind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

MODEL: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "rope": True,
    "rope_theta": 500000,
    "layer_norm_type": "rms",
    "layer_norm_eps": 1e-6,
    "attention_layer_norm": True,
    "include_bias": False,
    "norm_after": True,
    "vocab_size": 300,
    "embedding_size": 384,
    "max_sequence_length": 48,
    "weight_tying": False,
    "init_fn": "normal",
    "init_cutoff_factor": 3.0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "mlp_ratio": 4,
}

KINDS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo2 gqa, tied": {"n_kv_heads": 2, "weight_tying": True},
    "pre-norm": {"norm_after": False},
    "tapered": {"ffn": {"d_ff": 64, "taper": {"widths": [96, 64, 32]}}},
    "hourglass": {
        "norm_after": False,
        "ffn": {"type": "hourglass", "d_ff": [16, 24], "num_sub_mlps": 2},
        "attention": {"head_dim": 12, "n_kv_heads": 2},
    },
    "gated taper": {
        "ffn": {"type": "hourglass", "d_ff": 32, "num_sub_mlps": 2, "taper": {"widths": [48, 32, 16]}},
        "attention": {"type": ["gated", "softmax", "gated"], "gate_scale": 2.0},
    },
    "hope": {"norm_after": False, "ffn": {"type": "hope", "d_ff": [24, 16], "update_periods": [1, 4]}},
    "independent levels": {
        "ffn": {"type": "hope", "d_ff": [24, 16, 8], "update_periods": [1, 2, 4], "composition": "independent"}
    },
    "titans": {"attention": {"type": "titans", "chunk_size": 5, "theta_max": 0.05}},
    "linear memory, persistent tokens": {
        "include_bias": True,
        "norm_after": False,
        "attention": {
            "type": "titans",
            "chunk_size": 4,
            "memory_depth": 1,
            "persistent_tokens": 3,
            "read": "exclusive",
            "n_heads": [2, 4, 2],
            "head_dim": 8,
        },
    },
    "titans mag": {
        "attention": {
            "type": "titans",
            "form": "mag",
            "window": 6,
            "chunk_size": 20,
            "theta_max": 0.02,
            "value_norm": False,
            "persistent_tokens": 2,
            "n_kv_heads": 2,
            "memory_heads": 2,
        },
        "ffn": {"d_ff": 64, "taper": {"widths": [96, 64, 32]}},
    },
    "titans mal": {
        "norm_after": False,
        "layer_norm_type": "default",
        "bias_for_layer_norm": True,
        "clip_qkv": 0.7,
        "attention": {
            "type": "titans",
            "form": "mal",
            "window": 6,
            "chunk_size": 1,
            "momentum": False,
            "conv_width": 1,
            "theta_max": 0.1,
        },
    },
    "titans among attention": {
        "attention": {"type": ["softmax", "titans", "gated"], "chunk_size": 5, "theta_max": 0.05}
    },
    "headwise, heads by layer": {
        "attention": {"type": "gated", "gate": "headwise", "n_heads": [2, 4, 3], "head_dim": 8}
    },
    "gpt2": {
        "activation_type": "gelu",
        "include_bias": True,
        "layer_norm_type": "default",
        "rope": False,
        "weight_tying": True,
        "attention_layer_norm": False,
        "norm_after": False,
    },
    "rarities": {
        "activation_type": "relu",
        "embedding_layer_norm": True,
        "scale_logits": True,
        "clip_qkv": 0.7,
        "bias_for_layer_norm": True,
        "attention_layer_norm_with_affine": False,
        "n_layers": 4,
        "block_group_size": 2,
    },
}
NATIVE = ("olmo2", "olmo2 gqa, tied")
TITANS = ("titans", "linear memory, persistent tokens", "titans mag", "titans mal", "titans among attention")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    from olmo_ext.data.tokenizer import train_bpe

    texts = [(__doc__ or "") + Path(__file__).read_text()]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe(texts, vocab_size=300).base.to_str())
    return path


@pytest.fixture(scope="session")
def make_run(tmp_path_factory, tokenizer_file):
    """A run directory with one checkpoint; norms and biases are no ones and zeros, so that a lost one shows."""

    def make(kind: str, *, std: float = 0.2) -> Path:
        import torch

        from olmo_ext.base.run_directory import RunDirectory
        from olmo_ext.config.run_config import load_run_config
        from olmo_ext.training import checkpoint
        from olmo_ext.upstream import build_model

        model = {**copy.deepcopy(MODEL), **copy.deepcopy(KINDS[kind]), "init_std": std}
        config = load_run_config({"model": model, "tokenizer": {"identifier": str(tokenizer_file)}, "seed": 3})
        built = build_model(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if "norm" in name or "ln_f" in name or name.endswith("bias"):
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        run = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
        run.write_config(config.plain())
        store = checkpoint.CheckpointStore(run.checkpoints)
        tensors = {checkpoint.MODEL: built.state_dict(), checkpoint.OPTIMIZER: {}}
        store.write(checkpoint.Snapshot(step=5, tensors=tensors, texts={checkpoint.TRAIN_STATE: '{"format": 1}'}))
        return run.path

    return make


@pytest.fixture(scope="session")
def exported(make_run, tmp_path_factory):
    """(run directory, exported folder) of a kind; made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def export(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            from olmo_ext.base.sections import plain_section
            from olmo_ext.data.tokenizer import load_tokenizer
            from olmo_ext.export.card import origin_of
            from olmo_ext.export.folder import export_model
            from olmo_ext.training.load_model import load_model_from_run

            run = make_run(kind)
            model, config = load_model_from_run(run)
            section = config.model
            tokenizer = load_tokenizer(config.tokenizer.identifier, eos_token_id=0, pad_token_id=1)
            target = tmp_path_factory.mktemp("exports") / "model"
            origin = origin_of(run / "checkpoints/step5", "a-run")
            export_model(
                model,
                model=plain_section(section),
                shape=config.shape,
                tokenizer=tokenizer,
                target=target,
                origin=origin,
            )
            made[kind] = (run, target)
        return made[kind]

    return export


@pytest.fixture(scope="session", autouse=True)
def dynamic_modules(tmp_path_factory):
    """Where transformers copies a folder's code: not the home directory."""
    import transformers.dynamic_module_utils as dynamic

    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(str(folder))
        yield folder
