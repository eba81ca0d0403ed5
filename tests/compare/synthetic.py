"""Run directories with known effects, made without torch: what the comparison reads, and the truth beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

BATCH_TOKENS = 8192


def make_shape(
    *,
    d_model: int = 128,
    n_layers: int = 4,
    d_ff: Sequence[Sequence[int]] | None = None,
    ffn_type: str = "conventional",
    mixer_type: str = "softmax",
    state_bytes: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A `shape.json` with counts that follow from the widths (softmax attention's, untied head of 4,096).

    :param options: `ffn` and `attention` -> the type's options; None for a run that is older than them.
    """
    widths = d_ff or [[4 * d_model]] * n_layers
    heads = max(1, d_model // 32)
    layer_attention, ffn = 4 * d_model**2, sum(3 * d_model * sum(layer) for layer in widths)
    attention, vocabulary = n_layers * layer_attention, 4096
    non_embedding, head = attention + ffn, vocabulary * d_model
    training = 6 * (non_embedding + head) + 12 * n_layers * d_model * 512
    return {
        "d_model": d_model,
        "n_layers": n_layers,
        "layers": [
            {
                "ffn": {"type": ffn_type, "d_ff": list(layer), "activation": "swiglu"}
                | ({} if options is None else {"options": dict(options.get("ffn", {}))}),
                "attention": {"type": mixer_type, "n_heads": heads, "n_kv_heads": heads, "head_dim": d_model // heads}
                | ({} if options is None else {"options": dict(options.get("attention", {}))}),
            }
            for layer in widths
        ],
        "parameters": {
            "embedding": head, "attention": attention, "ffn": ffn, "norm": 0, "head": head,
            "non_embedding": non_embedding, "total": non_embedding + 2 * head,
        },
        "flops_per_token": {"forward": training / 3, "training": training, "training_causal": training},
        "kv_cache_bytes_per_token": 4 * n_layers * d_model,
        **({} if state_bytes is None else {"state_bytes": state_bytes}),
        "activation_elements_per_token": 34 * d_model * n_layers,
        "budget": {"quantity": "non_embedding", "target": non_embedding, "actual": non_embedding,
                   "deviation": 0.0, "tolerance": 0.005},
    }  # fmt: skip


def loss_curve(tokens: np.ndarray, *, final: float, total: float) -> np.ndarray:
    """A power law in tokens that ends at `final`."""
    return final + 2.0 * ((tokens / total) ** -0.35 - 1.0) * 0.35


def make_run(
    path: Path,
    *,
    final: float,
    seed: int = 1,
    steps: int = 200,
    evaluations: int = 10,
    shape: dict[str, Any] | None = None,
    status: str = "done",
    stop: int | None = None,
    speed: float = 20000.0,
    noise: float = 0.02,
    labels: Sequence[str] = ("corpus",),
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    attempts: int = 1,
    extra_metrics: int = 4,
    downstream: Mapping[str, float] | None = None,
    evals: Sequence[Mapping[str, Any]] = (),
    diagnosis: Mapping[str, Any] | None = None,
    reason: str = "",
) -> None:
    """Write one run directory.

    :param final: validation loss at the last step, nats; other labels lie 0.5 higher each.
    :param stop: the last step written, for a run that did not finish.
    :param attempts: with 2, rows of a lost attempt (loss 99) stand in the file beyond the restored step.
    """
    path.mkdir(parents=True)
    shape = shape or make_shape()
    flops = shape["flops_per_token"]["training"]
    generator = np.random.default_rng(seed)
    values = {
        "run_name": path.name, "seed": seed, "data": {"seed": 6198, "paths": ["train.npy"]},
        "model": {"d_model": shape["d_model"], "n_layers": shape["n_layers"], "max_sequence_length": 512},
        "optimizer": {"name": "adamw", "learning_rate": 4e-4}, "global_train_batch_size": BATCH_TOKENS // 512,
    }  # fmt: skip
    for key, value in (config or {}).items():
        node: Any = values
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    (path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (path / "shape.json").write_text(json.dumps(shape))
    provenance = {
        "code": {"version": "0.1.0", "revision": "0123abc", "diff_sha256": None},
        "packages": {"torch": "2.13.0", "ai2-olmo": "0.6.0"},
        "python": "3.11.2", "host": "node01", "device": "cpu", "world_size": 1,
        "data": {"fingerprint": "f" * 16, "tokenizer": "t" * 16, "order_seed": 6198, "instances": 1000,
                 "evaluation": {label: "e" * 16 for label in labels}} | dict(data or {}),
        "command": f"olmo-ext train {path.name}.yaml --seed={seed}",
    }  # fmt: skip
    (path / "provenance.json").write_text(json.dumps(provenance))
    last = stop or steps
    (path / "state.json").write_text(
        json.dumps(
            {"status": status, "attempt": attempts, "step": last, "max_steps": steps, "reason": reason, "updated": ""}
        )
    )
    tokens = np.arange(1, steps + 1, dtype=np.float64) * BATCH_TOKENS
    curve = loss_curve(tokens, final=final, total=tokens[-1])
    train = curve + noise * generator.standard_normal(steps)
    every = max(1, steps // evaluations)
    extra = {f"optim/extra_{index}": 0.1 for index in range(extra_metrics)}

    def row(kind: str, attempt: int, step: int, row_values: dict[str, float]) -> str:
        done = step * BATCH_TOKENS
        return json.dumps(
            {"kind": kind, "attempt": attempt, "step": step, "tokens": done, "flops": done * flops,
             "seconds": done / speed, "time": 1.79e9 + done / speed, "values": row_values}
        )  # fmt: skip

    def scores_at(step: int) -> dict[str, float]:
        scores: dict[str, float] = {}
        for index, label in enumerate(labels):
            value = float(curve[step - 1]) + 0.5 * index
            scores |= {
                f"eval/{label}/CrossEntropyLoss": value,
                f"eval/{label}/Perplexity": float(np.exp(value)),
                f"eval/{label}/tokens": 40000,
            }
        return scores

    lines = [row("attempt", 1, 0, {})]
    restored = last // 2 if attempts > 1 else 0
    for step in range(1, restored + 4 if attempts > 1 else 0):
        loss = 99.0 if step > restored else float(train[step - 1])
        lines.append(row("train", 1, step, {"train/CrossEntropyLoss": loss}))
        if step % every == 0 and step <= restored:
            lines.append(row("eval", 1, step, scores_at(step)))
    if attempts > 1:
        lines.append(row("attempt", 2, restored, {}))
    for step in range(restored + 1, last + 1):
        measured = {
            "train/CrossEntropyLoss": float(train[step - 1]),
            "throughput/tokens_per_second": speed,
            "optim/learning_rate": 4e-4,
            **extra,
        }
        lines.append(row("train", attempts, step, measured))
        if step % every == 0 or step == steps:
            scores = scores_at(step)
            if step == last:
                scores |= {f"eval/downstream/{name}": value for name, value in (downstream or {}).items()}
            lines.append(row("eval", attempts, step, scores))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if evals:
        (path / "evals").mkdir()
        (path / "evals" / "eval.jsonl").write_text("".join(json.dumps(dict(entry)) + "\n" for entry in evals))
    if diagnosis:
        (path / "diagnosis").mkdir()
        (path / "diagnosis" / f"step{last}.json").write_text(json.dumps(dict(diagnosis)))


def make_sweep(
    path: Path,
    groups: Mapping[str, Mapping[str, Any]],
    *,
    baseline: str,
    seeds: Sequence[int] = (1, 2, 3),
    declare: bool = True,
    budget_checked: bool = True,
    skip: Sequence[str] = (),
) -> Path:
    """A sweep's folder.

    :param groups: group -> keywords of `make_run`, with `final` as a number or a list per seed, and `axes`.
    :param skip: runs that sweep.json names and that have no folder.
    """
    path.mkdir(parents=True, exist_ok=True)
    runs = []
    for group, given in groups.items():
        options = dict(given)
        axes, finals = options.pop("axes", {}), options.pop("final")
        for index, seed in enumerate(seeds):
            name = f"{group}-s{seed}"
            final = finals[index] if isinstance(finals, (list, tuple)) else finals
            runs.append({"name": name, "group": group, "seed": seed, "values": axes})
            if name not in skip:
                make_run(path / name, final=final, seed=seed, **options)
    if declare:
        (path / "sweep.json").write_text(
            json.dumps({"name": path.name, "baseline": baseline, "budget_checked": budget_checked, "runs": runs})
        )
    return path
