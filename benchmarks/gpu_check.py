"""One GPU, under 8 minutes: does it compute what the CPU computes, and how fast is each shape?

    python benchmarks/gpu_check.py [--size 113m] [--seconds 400] [--json FILE]

For conventional, hourglass, tapered and gated shapes at equal non-embedding parameters: logits and gradients in fp32
against the CPU, bf16 against fp32, then training steps (forward, backward, AdamW; bf16 autocast) eager and compiled:
tokens/s, MFU, peak memory, graphs compiled. Prints a JSON line and a table. Without a GPU it says so and exits 0;
exits 1 when a number is wrong. Needs nothing beyond the package and its dependencies. `--device cpu --size tiny
--batch 1 --length 64 --steps 1` runs the script itself where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, run_configs

CORRECTNESS_TOKENS = 64
FP32_TOLERANCE = 1e-4
"""Of the largest logit, and of each gradient's norm: other kernels add up in another order."""

BF16_TOLERANCE = 5e-2


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def loss_and_gradients(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients by name, on the CPU."""
    model.zero_grad(set_to_none=True)
    loss_of(model, tokens).backward()
    with torch.no_grad():
        logits = model(tokens).logits.float().cpu()
    return logits, {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def check_against_cpu(config: Any, device: str) -> dict[str, Any]:
    """Largest relative differences of logits and gradients, GPU fp32 and bf16 against CPU fp32."""
    from olmo_ext.upstream import build_model

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    vocabulary = config.shape.embedding_size
    tokens = torch.randint(0, vocabulary, (2, CORRECTNESS_TOKENS), generator=torch.Generator().manual_seed(0))
    model = build_model(config)
    expected, gradients = loss_and_gradients(model, tokens)
    model = model.to(device)
    found, on_gpu = loss_and_gradients(model, tokens.to(device))
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        low = model(tokens.to(device)).logits.float().cpu()
    scale = expected.abs().max()
    worst = max(
        (on_gpu[name] - gradient).norm() / gradient.norm().clamp(min=1e-12) for name, gradient in gradients.items()
    )
    result = {
        "fp32_logits": float((found - expected).abs().max() / scale),
        "fp32_gradients": float(worst),
        "bf16_logits": float((low - expected).abs().max() / scale),
    }
    right = max(result["fp32_logits"], result["fp32_gradients"]) <= FP32_TOLERANCE
    return result | {"correct": right and result["bf16_logits"] <= BF16_TOLERANCE}


def measure_training(
    config: Any, *, device: str, compiled: bool, batch: int, length: int, steps: int, deadline: float
) -> dict[str, Any]:
    """Median seconds of a training step after warm-up, and what follows from them."""
    from olmo_ext.base.nodes import peak_flops_of_device
    from olmo_ext.upstream import build_model, compile_blocks

    torch.backends.cuda.matmul.allow_tf32 = True
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build_model(config, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    report = compile_blocks(model) if compiled else None
    tokens = torch.randint(0, config.shape.embedding_size, (batch, length), device=device)
    seconds: list[float] = []
    began = time.perf_counter()
    warm_up = 0.0
    for step in range(steps + 3):
        start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        if step >= 3:
            seconds.append(time.perf_counter() - start)
        else:
            warm_up = time.perf_counter() - began
        if time.perf_counter() > deadline and seconds:
            break
    step_seconds = statistics.median(seconds)
    tokens_per_second = tokens.numel() / step_seconds
    peak = peak_flops_of_device(torch.cuda.get_device_name()) if on_gpu else None
    flops = config.counts.training_flops_per_token * tokens_per_second
    return {
        "tokens_per_second": tokens_per_second,
        "step_seconds": step_seconds,
        "mfu": flops / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "warm_up_seconds": warm_up,
        "graphs": report.graphs() if report else None,
        "recompile_limit_hit": report.recompile_limit_hit() if report else None,
        "steps": len(seconds),
        "loss": loss.item(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="113m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=400, help="no new measurement starts after this")
    parser.add_argument("--json", type=Path, help="write the JSON to this file as well")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU")
        return 0
    began = time.perf_counter()
    deadline = began + arguments.seconds
    sizes = {
        "device": arguments.device,
        "batch": arguments.batch,
        "length": arguments.length,
        "steps": arguments.steps,
        "deadline": deadline,
    }
    results: dict[str, Any] = {}
    # The small size shows a wrong kernel as well as a large one, and the CPU is done with it in seconds.
    small = run_configs("tiny", sequence_length=CORRECTNESS_TOKENS)
    configs = run_configs(arguments.size, sequence_length=arguments.length)
    for name, config in configs.items():
        result: dict[str, Any] = {
            "non_embedding": config.counts.non_embedding,
            "check": check_against_cpu(small[name], arguments.device),
        }
        for form in ("eager", "compiled"):
            if time.perf_counter() > deadline:
                result[form] = {"skipped": "out of time"}
                continue
            try:
                result[form] = measure_training(config, compiled=form == "compiled", **sizes)
            except Exception as error:  # noqa: BLE001  (a compiler that fails is a result of this check)
                result[form] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        results[name] = result
    report = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": time.perf_counter() - began,
        "shapes": results,
    }
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    right = all(
        result["check"]["correct"] and all("error" not in result[form] for form in ("eager", "compiled"))
        for result in results.values()
    )
    return 0 if right else 1


def print_table(report: dict[str, Any]) -> None:
    print(f"{report['device']}, torch {report['torch']}, Python {report['python']}, {report['seconds']:.0f} s")
    columns = ("tokens/s", "MFU", "memory", "warm-up", "graphs")
    print(f"{'shape':14} {'form':9} " + " ".join(f"{column:>10}" for column in columns))
    for name, result in report["shapes"].items():
        for form in ("eager", "compiled"):
            row = result[form]
            if "tokens_per_second" not in row:
                print(f"{name:14} {form:9} {row.get('error') or row.get('skipped')}")
                continue
            mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
            memory, graphs = row["peak_memory_bytes"] / 1e9, row["graphs"] if row["graphs"] is not None else "-"
            speed, warm_up = row["tokens_per_second"], row["warm_up_seconds"]
            print(f"{name:14} {form:9} {speed:10,.0f} {mfu:>10} {memory:7.1f} GB {warm_up:8.1f} s {graphs:>10}")
        check = result["check"]
        verdict = "correct" if check["correct"] else "WRONG"
        print(
            f"{'':14} against the CPU: {verdict} (logits {check['fp32_logits']:.1e}, gradients "
            f"{check['fp32_gradients']:.1e} in fp32; logits {check['bf16_logits']:.1e} in bf16)"
        )


if __name__ == "__main__":
    sys.exit(main())
