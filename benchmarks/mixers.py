"""Forward and backward of one layer's mixer, of each type, against softmax attention of equal width, by length.

fp32, batch 2. On a CPU one thread's processor time is measured, on a GPU the clock. Rounds are interleaved and medians
compared, so a busy machine touches all sides alike.
Softmax attention's cost per token grows with the length, that of a memory does not. If `titans-pytorch` can be imported
(no dependency of ours; `pip install titans-pytorch`), its `NeuralMemory` runs beside ours at the same heads, head size,
chunk and momentum, with normalised q and k, a memory of two layers as wide as ours, and its own defaults otherwise: it
has no convolution, no output gate and no norm of values, and averages the decay over each chunk, so it computes
something else.

    python benchmarks/mixers.py [--d-model 256] [--lengths 256,512,1024,2048] [--rounds 5] [--device cpu] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from olmo.config import ModelConfig
from torch import nn

import olmo_ext.upstream  # noqa: F401  (silences and checks upstream)
from olmo_ext.blocks.initialise import Branches, initialise
from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.registry import ATTENTION_TYPES

HEAD_DIM = 64
CHUNK = 64


MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "gated": ("gated", {}),
    "titans lmm": ("titans", {"chunk_size": CHUNK}),
    "titans lmm, bare": ("titans", {"chunk_size": CHUNK, "conv_width": 0, "output_gate": False, "value_norm": False}),
    "titans lmm, linear": ("titans", {"chunk_size": CHUNK, "memory_depth": 1}),
    "titans lmm, chunk 16": ("titans", {"chunk_size": 16}),
    "titans mag": ("titans", {"form": "mag", "window": 256, "chunk_size": CHUNK}),
}
"""Label -> type and options; `bare` has no convolution, output gate or norm of values, as `NeuralMemory` has none."""


class Mixer(nn.Module):
    """One registered type, built and drawn as a layer would."""

    def __init__(self, kind: str, options: dict[str, Any], *, d_model: int, length: int) -> None:
        super().__init__()
        heads = d_model // HEAD_DIM
        config = ModelConfig.new(
            d_model=d_model,
            n_heads=heads,
            rope=True,
            include_bias=False,
            layer_norm_type="rms",
            attention_layer_norm=True,
            attention_dropout=0.0,
            max_sequence_length=length,
            init_device="cpu",
        )
        spec = AttentionSpec(type=kind, n_heads=heads, n_kv_heads=heads, head_dim=HEAD_DIM, options=options)
        self.mixer = ATTENTION_TYPES.get(kind).build(d_model, spec, config, 0, {})
        branches = Branches(up_to_here=2, total=2)
        initialise(self.mixer, name="attention", config=config, layer_id=0, branches=branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x)[0]


class Theirs(nn.Module):
    """titans-pytorch's memory."""

    def __init__(self, *, d_model: int) -> None:
        super().__init__()
        from titans_pytorch import MemoryMLP, NeuralMemory

        self.memory = NeuralMemory(
            dim=d_model,
            chunk_size=CHUNK,
            heads=d_model // HEAD_DIM,
            dim_head=HEAD_DIM,
            momentum=True,
            qk_rmsnorm=True,
            model=MemoryMLP(HEAD_DIM, depth=2, expansion_factor=2.0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory(x)[0]


def seconds(module: nn.Module, x: torch.Tensor) -> float:
    """One forward and backward pass."""

    def wait() -> None:
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    clock = time.perf_counter if x.device.type == "cuda" else time.process_time
    module.zero_grad(set_to_none=True)
    wait()
    began = clock()
    module(x).pow(2).mean().backward()
    wait()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--lengths", default="256,512,1024,2048")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(text) for text in arguments.lengths.split(",")]
    rows = []
    for length in lengths:
        torch.manual_seed(0)
        modules: dict[str, nn.Module] = {
            label: Mixer(kind, options, d_model=arguments.d_model, length=length)
            for label, (kind, options) in MIXERS.items()
        }
        try:
            modules["titans-pytorch"] = Theirs(d_model=arguments.d_model)
        except ImportError:
            pass
        x = torch.randn(arguments.batch, length, arguments.d_model, device=arguments.device, requires_grad=True)
        times: dict[str, list[float]] = {label: [] for label in modules}
        for module in modules.values():
            seconds(module.to(arguments.device), x)
        for _ in range(arguments.rounds):
            for label, module in modules.items():
                times[label].append(seconds(module, x))
        for label, found in times.items():
            median = statistics.median(found)
            rows.append(
                {
                    "mixer": label,
                    "length": length,
                    "seconds": median,
                    "microseconds_per_token": 1e6 * median / (arguments.batch * length),
                    "against_softmax": median / statistics.median(times["softmax"]),
                }
            )
    if arguments.json:
        print(json.dumps(rows))
        return
    print(
        f"d_model {arguments.d_model}, batch {arguments.batch}, {torch.get_num_threads()} threads, {arguments.device}"
    )
    print(f"{'mixer':22s} {'length':>7s} {'ms':>9s} {'us/token':>9s} {'x softmax':>9s}")
    for row in sorted(rows, key=lambda row: (list(times).index(row["mixer"]), row["length"])):
        print(
            f"{row['mixer']:22s} {row['length']:7d} {1e3 * row['seconds']:9.1f} {row['microseconds_per_token']:9.1f}"
            f" {row['against_softmax']:9.2f}"
        )


if __name__ == "__main__":
    main()
