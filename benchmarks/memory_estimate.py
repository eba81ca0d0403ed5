"""The memory estimate against the measured peak of a training step on the CPU, in fp32.

    python benchmarks/memory_estimate.py            # prints a table; exits 1 if one is off by more than 15 %

Each case runs in a process of its own: two steps of two micro-batches with OLMo's loss and AdamW. Measured is the peak
of the resident memory during the second step, less what the process held before the model was built.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT = 0.15
COMMON: dict[str, Any] = {
    "rope": True,
    "include_bias": False,
    "weight_tying": False,
    "layer_norm_type": "rms",
    "attention_layer_norm": True,
    "max_sequence_length": 512,
}
SMALL, LARGE = {"vocab_size": 4096, "embedding_size": 4096}, {"vocab_size": 50304, "embedding_size": 50304}
TAPER = {"schedule": "cosine", "start": 1.5, "end": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "conventional": {**SMALL, "d_model": 256, "n_heads": 4, "n_layers": 8, "ffn": {"d_ff": 1024}},
    "conventional, large vocabulary": {**LARGE, "d_model": 256, "n_heads": 4, "n_layers": 4, "ffn": {"d_ff": 1024}},
    "conventional, norm_after": {
        **SMALL, "d_model": 256, "n_heads": 4, "n_layers": 8, "norm_after": True, "ffn": {"d_ff": 768},
    },
    "tapered": {**SMALL, "d_model": 256, "n_heads": 4, "n_layers": 8, "ffn": {"d_ff": 1024, "taper": TAPER}},
    "hourglass, K 4": {
        **SMALL, "d_model": 384, "n_heads": 6, "n_layers": 4,
        "ffn": {"type": "hourglass", "d_ff": 192, "num_sub_mlps": 4},
    },
    "narrow attention": {
        **SMALL, "d_model": 384, "n_heads": 6, "n_layers": 6, "attention": {"head_dim": 32},
        "ffn": {"type": "hourglass", "d_ff": 256, "num_sub_mlps": 2},
    },
    "gated attention": {
        **SMALL, "d_model": 256, "n_heads": 4, "n_layers": 8, "attention": {"type": "gated"}, "ffn": {"d_ff": 768},
    },
    "gelu": {
        **SMALL, "d_model": 256, "n_heads": 4, "n_layers": 8, "activation_type": "gelu", "ffn": {"d_ff": 1024},
    },
    "chunked loss": {
        **SMALL, "d_model": 256, "n_heads": 4, "n_layers": 4, "ffn": {"d_ff": 512}, "_loss": "chunked",
    },
    "chunked loss, large vocabulary": {
        **LARGE, "d_model": 256, "n_heads": 4, "n_layers": 4, "ffn": {"d_ff": 1024}, "_loss": "chunked",
    },
    "whole_layer checkpointing": {
        **SMALL, "d_model": 256, "n_heads": 4, "n_layers": 12, "ffn": {"d_ff": 1024}, "_checkpointing": "whole_layer",
    },
}  # fmt: skip
MICRO_BATCH = 8


def run_config(case: str) -> tuple[Any, str | None]:
    """The case's config and its checkpointing strategy."""
    from olmo_ext.config.run_config import load_run_config

    model = dict(CASES[case])
    checkpointing, loss = model.pop("_checkpointing", None), model.pop("_loss", "full")
    values = {"precision": "fp32", "softmax_auxiliary_loss": True, "loss": loss}
    config = load_run_config({"model": {**COMMON, **model}, **values})
    return config, checkpointing


def resident(key: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure(case: str) -> int:
    """Peak bytes of the second step."""
    import torch
    from olmo.config import ActivationCheckpointingStrategy
    from olmo.train import cross_entropy_loss

    from olmo_ext.upstream import build_model
    from olmo_ext.upstream.chunked_loss import IGNORED, chunked_loss, loss_in_place_of_logits

    torch.set_num_threads(1)
    config, checkpointing = run_config(case)
    length, vocabulary = config.shape.max_sequence_length, config.model.vocab_size
    # What the first matrix product and optimizer step allocate once is no part of the model.
    warm = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(warm.parameters())
    warm(torch.ones(64, 64)).sum().backward()
    optimizer.step()
    before = resident("VmRSS")
    model = build_model(config, device="cpu", seed=1)
    if checkpointing:
        model.set_activation_checkpointing(ActivationCheckpointingStrategy(checkpointing))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(2):
        if step == 1:
            Path("/proc/self/clear_refs").write_text("5")
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            ids = torch.randint(0, vocabulary, (MICRO_BATCH, length))
            if config.loss == "chunked":
                labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
                compute = functools.partial(chunked_loss, labels=labels, z_multiplier=1e-5)
                with loss_in_place_of_logits(model, compute):
                    (model(input_ids=ids).logits[0] / ids.numel()).backward()
                continue
            logits = model(input_ids=ids).logits
            flat = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
            loss, z_loss = cross_entropy_loss(
                flat, ids[:, 1:].reshape(-1), reduction="sum", compute_z_loss=True, z_loss_multiplier=1e-5
            )
            del logits, flat
            ((loss + z_loss) / ids.numel()).backward()
        optimizer.step()
    return resident("VmHWM") - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="measure this one here and print JSON")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps({"measured": measure(arguments.case)}))
        return 0
    from olmo_ext.base.quantities import format_bytes
    from olmo_ext.shapes.memory import StepSettings, estimate_memory

    worst = 0.0
    print(f"{'case':34} {'measured':>10} {'estimate':>10} {'off':>7}   activations / logits of the estimate")
    for case in CASES:
        # glibc keeps freed blocks of up to 32 MiB for reuse by default; a tight threshold makes the peak the tensors'.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            [sys.executable, __file__, "--case", case], capture_output=True, text=True, env=environment, check=False
        )
        if output.returncode:
            print(output.stderr, file=sys.stderr)
            return 1
        measured = json.loads(output.stdout.splitlines()[-1])["measured"]
        config, checkpointing = run_config(case)
        settings = StepSettings(precision="fp32", checkpointing=checkpointing, loss=config.loss)
        estimate = estimate_memory(config.shape, config.counts, settings, micro_batch=MICRO_BATCH)
        off = estimate.total / measured - 1
        worst = max(worst, abs(off))
        parts = f"{format_bytes(estimate.activations)} / {format_bytes(estimate.logits)}"
        print(f"{case:34} {format_bytes(measured):>10} {format_bytes(estimate.total):>10} {off:+7.1%}   {parts}")
    print(f"largest deviation {worst:.1%}, limit {LIMIT:.0%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
