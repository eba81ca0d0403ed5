"""The benchmark scripts of blocks and export run; their figures are no tests."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("shapes", "gpu_check", "inference", "hourglass_layer"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", ["tiny", "113m"])
def test_the_compared_shapes_have_equal_budgets(size, script):
    budgets = [
        config.counts.non_embedding for config in script("shapes").run_configs(size, sequence_length=64).values()
    ]
    assert len(budgets) == 4 and max(budgets) / min(budgets) < 1.01


def test_without_a_gpu_the_check_says_so_and_succeeds(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert script("gpu_check").main() == 0
    assert capsys.readouterr().out.strip() == "no GPU"


def test_the_check_finds_a_model_that_computes_something_else(script, monkeypatch):
    """Its comparison runs with the CPU in the GPU's place, where fp32 differs by nothing, then with a damaged copy."""
    gpu_check = script("gpu_check")
    config = script("shapes").run_configs("tiny", sequence_length=64)["gated"]
    result = gpu_check.check_against_cpu(config, "cpu")
    assert result["correct"] and result["fp32_gradients"] == 0 and 0 < result["bf16_logits"] < 0.05
    whole, calls = gpu_check.loss_and_gradients, []

    def damaged(model, tokens):
        logits, gradients = whole(model, tokens)
        calls.append(1)
        return (logits if len(calls) == 1 else logits + 0.01), gradients

    monkeypatch.setattr(gpu_check, "loss_and_gradients", damaged)
    assert not gpu_check.check_against_cpu(config, "cpu")["correct"]


def test_inference_measures_every_shape_and_its_cache_is_what_was_counted(script):
    inference, shapes = script("inference"), script("shapes")
    arguments = argparse.Namespace(lengths=[8, 16], decode=2, rounds=1, batch=2, device="cpu", dtype="float32")
    rows = inference.measure(shapes.run_configs("tiny", sequence_length=64), arguments)
    assert [(row["shape"], row["length"]) for row in rows] == [
        (name, length) for length in (8, 16) for name in ("conventional", "hourglass", "tapered", "gated")
    ]
    assert all(row["kv_cache_bytes"] == row["length"] * 2 * row["kv_cache_bytes_per_token"] for row in rows)


def test_the_hourglass_benchmark_times_the_blocks_own_feed_forward(script):
    import torch

    stack = script("hourglass_layer").HourglassStack(d_model=64, d_ff=16, num_sub_mlps=3, norm_after=False)
    x = torch.randn(1, 5, 64)
    block = stack.block
    expected = x
    for norm, mlp in zip(block.ff_norms, block.sub_mlps, strict=True):
        expected = expected + mlp(norm(expected))
    torch.testing.assert_close(stack(x), expected)
