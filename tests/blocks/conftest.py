"""Tiny models: d_model 32, 4 heads, 3 layers, 64 tokens of vocabulary, fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

MODEL: dict[str, Any] = {
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "mlp_ratio": 4,
    "rope": True,
    "layer_norm_type": "rms",
    "attention_layer_norm": True,
    "include_bias": False,
    "vocab_size": 64,
    "embedding_size": 64,
    "max_sequence_length": 24,
    "weight_tying": False,
    "init_fn": "normal",
    "init_cutoff_factor": 3.0,
    "eos_token_id": 63,
    "pad_token_id": 62,
}


def tiny_config(**model: Any) -> Any:
    """A resolved run config; keyword arguments are keys of the model section."""
    from olmo_ext.config.run_config import load_run_config

    return load_run_config({"model": {**copy.deepcopy(MODEL), **model}, "seed": 7})


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    return tiny_config


@pytest.fixture(scope="session")
def built() -> Callable[..., Any]:
    """Builds the model of a tiny config on the CPU."""

    def build(*, device: str = "cpu", seed: int | None = None, **model: Any) -> Any:
        from olmo_ext.upstream import build_model

        return build_model(tiny_config(**model), device=device, seed=seed)

    return build


@pytest.fixture(scope="session")
def grads() -> Callable[..., dict[str, torch.Tensor]]:
    return gradients


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    return torch.randint(0, 62, (2, 16), generator=torch.Generator().manual_seed(1))
