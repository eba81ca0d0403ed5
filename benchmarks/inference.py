"""Prefill and decode speed and KV-cache size of several shapes, side by side: equal FLOPs is not equal speed.

The exported model class runs with random weights; rounds of all shapes are interleaved and medians are shown.

    python benchmarks/inference.py [CONFIG.yaml ...] [--lengths 256 1024] [--decode 16] [--device cuda] [--json]

Without configs: conventional, hourglass, tapered and gated at equal non-embedding parameters (`--size tiny` or `113m`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from shapes import SIZES, run_configs

from olmo_ext.base.sections import plain_section
from olmo_ext.config.run_config import load_run_config
from olmo_ext.hf.configs import hugging_face_config
from olmo_ext.hf.configuration_olmo_ext import OlmoExtConfig
from olmo_ext.hf.modeling_olmo_ext import CACHE_KEY, OlmoExtForCausalLM


def build(config: Any, *, device: str, dtype: torch.dtype, length: int) -> OlmoExtForCausalLM:
    """The exported form of a config, with random weights and room for `length` positions."""
    values = hugging_face_config(plain_section(config.model), config.shape, allow_native=False)
    ours = OlmoExtConfig(**values | {"max_position_embeddings": max(length, config.shape.max_sequence_length)})
    torch.manual_seed(0)
    model = OlmoExtForCausalLM(ours).eval()
    torch.nn.Module.to(model, device=device, dtype=dtype)
    return model


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache's tensors take."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        tensors = [*cache.key_cache, *cache.value_cache]
    else:
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.inference_mode()
def measure_once(model: OlmoExtForCausalLM, tokens: torch.Tensor, *, decode: int) -> dict[str, float]:
    """Seconds of one prefill and of `decode` single-token steps after it, and the cache's bytes per token."""
    device = tokens.device.type
    wait(device)
    start = time.perf_counter()
    output = model(tokens, use_cache=True, logits_to_keep=1)
    wait(device)
    prefill = time.perf_counter() - start
    cache = getattr(output, CACHE_KEY)
    size = cache_bytes(cache)
    token = output.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(decode):
        output = model(token, past_key_values=cache, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
    wait(device)
    return {"prefill": prefill, "decode": time.perf_counter() - start, "cache": size}


def measure(configs: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per shape and length."""
    dtype = getattr(torch, arguments.dtype)
    longest = max(arguments.lengths) + arguments.decode
    models = {
        name: build(config, device=arguments.device, dtype=dtype, length=longest) for name, config in configs.items()
    }
    rows = []
    for length in arguments.lengths:
        smallest = min(config.shape.embedding_size for config in configs.values())
        tokens = torch.randint(0, smallest, (arguments.batch, length), device=arguments.device)
        times: dict[str, list[dict[str, float]]] = {name: [] for name in models}
        for model in models.values():
            measure_once(model, tokens, decode=2)
        for _ in range(arguments.rounds):
            for name, model in models.items():
                times[name].append(measure_once(model, tokens, decode=arguments.decode))
        for name, found in times.items():
            prefill, decode = (statistics.median(row[key] for row in found) for key in ("prefill", "decode"))
            counted = configs[name].counts.kv_cache_elements_per_token * torch.finfo(dtype).bits // 8
            per_token = found[0]["cache"] / tokens.numel()
            if per_token != counted:
                raise SystemExit(f"{name}: the cache takes {per_token} bytes a token, counted were {counted}")
            rows.append(
                {
                    "shape": name,
                    "non_embedding": configs[name].counts.non_embedding,
                    "length": length,
                    "batch": arguments.batch,
                    "prefill_tokens_per_second": tokens.numel() / prefill,
                    "decode_tokens_per_second": arguments.batch * arguments.decode / decode,
                    "kv_cache_bytes_per_token": counted,
                    "kv_cache_bytes": int(found[0]["cache"]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 1024])
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded after each prefill")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    configs = {path.stem: load_run_config(path, check_budget_too=False) for path in arguments.configs}
    configs = configs or run_configs(arguments.size, sequence_length=max(arguments.lengths))
    rows = measure(configs, arguments)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(
        f"{'shape':24} {'length':>7} {'prefill tok/s':>14} {'decode tok/s':>13} {'KV bytes/tok':>13} {'KV cache':>10}"
    )
    for row in rows:
        print(
            f"{row['shape']:24} {row['length']:7,} {row['prefill_tokens_per_second']:14,.0f} "
            f"{row['decode_tokens_per_second']:13,.1f} {row['kv_cache_bytes_per_token']:13,} "
            f"{row['kv_cache_bytes'] / 1e6:7.2f} MB"
        )
    print(f"{arguments.device}, {arguments.dtype}, batch {arguments.batch}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
