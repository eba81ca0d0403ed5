from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEXT = "".join(
    f"The {n}th river of the valley is {n * 7} miles long. It has {n % 9} bridges and a mill.\n" for n in range(900)
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE of 512 entries."""
    from olmo_ext.data.tokenizer import train_bpe

    return train_bpe([TEXT], vocab_size=512)


def build_olmo(tokenizer: Any, *, seed: int = 0, norm_after: bool = False, **options: Any) -> Any:
    """A tiny stock OLMo model in eval mode."""
    import torch
    from olmo.config import ActivationType, LayerNormType, ModelConfig
    from olmo.model import OLMo

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "mlp_hidden_size": 96,
        "activation_type": ActivationType.swiglu,
        "layer_norm_type": LayerNormType.rms,
        "rope": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "include_bias": False,
        "weight_tying": False,
        "max_sequence_length": 256,
        "vocab_size": tokenizer.vocab_size,
        "embedding_size": tokenizer.vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "norm_after": norm_after,
        "init_std": 0.2,
        "init_device": "cpu",
    }
    return OLMo(ModelConfig(**(settings | options))).eval()


@pytest.fixture(scope="session")
def olmo(tokenizer: Any) -> Any:
    return build_olmo(tokenizer)


@pytest.fixture(scope="session")
def model(olmo: Any) -> Any:
    from olmo_ext.evals.target import EvaluatedModel

    return EvaluatedModel(olmo, max_sequence_length=256)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
