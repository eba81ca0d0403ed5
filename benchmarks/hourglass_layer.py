"""The hourglass FFN of one layer against the bare matrix products of the same sizes.

Forward and backward, fp32, CPU by default; K sub-MLPs, each with RMSNorm, SwiGLU and residual. The products are what
no implementation can avoid: three forward and six backward ones per sub-MLP. Rounds are interleaved, medians are
compared, so a busy machine touches both sides alike.

    python benchmarks/hourglass_layer.py [--d-model 512] [--num-sub-mlps 4] [--d-ff 256] [--tokens 2048] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from olmo.config import ModelConfig
from torch import nn

import olmo_ext.upstream  # noqa: F401  (silences and checks upstream)
from olmo_ext.blocks.block import ShapedBlock
from olmo_ext.blocks.initialise import Branches
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec, LayerShape


class HourglassStack(nn.Module):
    """The FFN half of our block alone: what `ShapedBlock.forward` does after attention."""

    def __init__(self, *, d_model: int, d_ff: int, num_sub_mlps: int, norm_after: bool) -> None:
        super().__init__()
        config = ModelConfig.new(
            d_model=d_model,
            n_heads=8,
            rope=True,
            include_bias=False,
            layer_norm_type="rms",
            residual_dropout=0.0,
            norm_after=norm_after,
            init_device="cpu",
        )
        layer = LayerShape(
            ffn=FFNSpec(type="hourglass", d_ff=(d_ff,) * num_sub_mlps),
            attention=AttentionSpec(type="softmax", n_heads=8, n_kv_heads=8, head_dim=d_model // 8),
        )
        self.block = ShapedBlock(0, config, {}, layer=layer, branches=Branches(up_to_here=5, total=5))
        self.block.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.feed_forward(x)


class MatrixProducts:
    """Every product of the stack's forward and backward on preallocated results."""

    def __init__(self, *, d_model: int, d_ff: int, num_sub_mlps: int, tokens: int, device: str) -> None:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device)

        self.x, self.hidden, self.inner = random(tokens, d_model), random(tokens, 2 * d_ff), random(tokens, d_ff)
        self.first = [random(2 * d_ff, d_model) for _ in range(num_sub_mlps)]
        self.second = [random(d_model, d_ff) for _ in range(num_sub_mlps)]
        self.out = random(tokens, d_model)

    def __call__(self) -> None:
        for first, second in zip(self.first, self.second, strict=True):
            torch.mm(self.x, first.T)
            torch.mm(self.inner, second.T)
            torch.mm(self.out, second)
            torch.mm(self.out.T, self.inner)
            torch.mm(self.hidden, first)
            torch.mm(self.hidden.T, self.x)


def seconds(function: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each side, and their ratios to the matrix products."""
    size = {key: getattr(arguments, key) for key in ("d_model", "d_ff", "num_sub_mlps")}
    torch.manual_seed(0)
    stack = HourglassStack(**size, norm_after=arguments.norm_after).to(arguments.device)
    compiled = torch.compile(stack)
    x = torch.randn(1, arguments.tokens, arguments.d_model, device=arguments.device, requires_grad=True)
    upstream = torch.randn_like(x)

    def training(module: Callable) -> Callable[[], None]:
        def run() -> None:
            for parameter in stack.parameters():
                parameter.grad = None
            x.grad = None
            module(x).backward(upstream)

        return run

    sides: dict[str, Callable[[], None]] = {
        "matrix products": MatrixProducts(**size, tokens=arguments.tokens, device=arguments.device),
        "eager": training(stack),
        "compiled": training(compiled),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(3):
        for function in sides.values():
            seconds(function, arguments.device)
    for _ in range(arguments.rounds):
        for name, function in sides.items():
            times[name].append(seconds(function, arguments.device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["matrix products"]
    return medians | {f"{name} / matrix products": medians[name] / base for name in ("eager", "compiled")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--d-ff", type=int, default=256)
    parser.add_argument("--num-sub-mlps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--norm-after", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value:.2f}" if "/" in name else f"{name:28} {value * 1e3:.1f} ms")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")


if __name__ == "__main__":
    main()
