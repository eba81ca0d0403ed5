"""One training step through our trainer against stock OLMo's model, optimizer and loop written plainly.

    python benchmarks/train_step.py [--steps 20] [--d-model 512] [--layers 8] [--tokens 2048] [--loss full]

Both live in one process and take turns, step by step, on the same batches; reported is the ratio of the medians. Our
step contains all that a run does at every step: data, the stop and NaN agreement, the row of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIMIT = 1.03
VOCABULARY, LENGTH = 4096, 512


class PlainTraining:
    """Stock OLMo without a trainer."""

    def __init__(self, values: dict[str, Any], folder: Path) -> None:
        from olmo.config import TrainConfig
        from olmo.data import build_memmap_dataset
        from olmo.data.collator import DataCollator
        from olmo.data.iterable_dataset import IterableDataset
        from olmo.model import OLMo
        from olmo.optim import build_optimizer, build_scheduler

        model = {key: value for key, value in values["model"].items() if key not in ("ffn", "attention")}
        model["mlp_hidden_size"] = 2 * values["model"]["ffn"]["d_ff"]
        data = {key: value for key, value in values["data"].items() if key not in ("subset", "corpus")}
        known = {field.name for field in dataclasses.fields(TrainConfig)} - {"model", "data", "evaluators"}
        rest = {key: value for key, value in values.items() if key in known}
        self.cfg = TrainConfig.new(**rest, model=model, data=data)
        torch.manual_seed(values["seed"])
        self.model = OLMo(self.cfg.model)
        self.optimizer, self.scheduler = build_optimizer(self.cfg, self.model), build_scheduler(self.cfg)
        batch = values["global_train_batch_size"]
        instances: Any = build_memmap_dataset(self.cfg, self.cfg.data)
        dataset = IterableDataset(instances, batch, seed=6198, drop_last=True)
        collator = DataCollator.from_train_config(self.cfg)
        self.loader = iter(torch.utils.data.DataLoader(dataset, batch_size=batch, collate_fn=collator))
        self.steps, self.last_step = 0, int(values["max_duration"])

    def step(self) -> float:
        """One step; returns its loss."""
        from olmo.train import cross_entropy_loss

        self.steps += 1
        batch = next(self.loader)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(batch["input_ids"]).logits[..., :-1, :].contiguous()
        labels = batch["input_ids"][..., 1:].contiguous().view(-1)
        loss, _ = cross_entropy_loss(logits.view(-1, logits.size(-1)), labels, reduction="sum")
        loss = loss / batch["input_ids"].numel()
        loss.backward()
        self.optimizer.clip_grads_and_collect_metrics(self.steps, collect_param_metrics=False)
        for group in self.optimizer.param_groups:
            group["lr"] = self.scheduler.get_lr(self.cfg.optimizer.learning_rate, self.steps, self.last_step)
        self.optimizer.step()
        return loss.item()


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.training.session import Session
    from olmo_ext.training.train import train

    instances = (options.steps + 2) * options.tokens // LENGTH
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, size=instances * LENGTH, dtype=np.uint16)
    tokens.tofile(folder / "tokens.bin")
    model = {"d_model": options.d_model, "n_heads": options.d_model // 64, "n_layers": options.layers}
    model |= {"max_sequence_length": LENGTH, "vocab_size": VOCABULARY, "embedding_size": VOCABULARY}
    model |= {"rope": True, "weight_tying": False, "include_bias": False, "layer_norm_type": "rms"}
    model |= {"activation_type": "swiglu", "eos_token_id": 0, "pad_token_id": 1}
    batch = options.tokens // LENGTH
    config = load_run_config(
        {
            "run_name": "step",
            "model": {**model, "ffn": {"d_ff": 64 * round(options.d_model * 8 / 3 / 64)}},
            "data": {"paths": [str(folder / "tokens.bin")], "memmap_dtype": "uint16", "drop_last": True},
            "optimizer": {"name": "adamw"},
            "max_grad_norm": 1.0,
            "max_duration": options.steps + 2,
            "global_train_batch_size": batch,
            "device_train_microbatch_size": batch,
            "save_interval": None,
            "loss": options.loss,
        }
    )
    plain = PlainTraining(config.plain(), folder)
    ours: list[float] = []
    theirs: list[float] = []
    our_cpu: list[float] = []
    their_cpu: list[float] = []
    last_cpu = [0.0]
    after_step = Session.after_step

    def take_turns(self: Session, metrics: dict[str, float], *, batch_seconds: float) -> None:
        began = time.monotonic()
        after_step(self, metrics, batch_seconds=batch_seconds)
        recorded, recorded_cpu = time.monotonic(), time.process_time()
        loss = plain.step()
        ended, ended_cpu = time.monotonic(), time.process_time()
        assert math.isclose(loss, metrics["train/CrossEntropyLoss"], rel_tol=0.0 if options.loss == "full" else 1e-4)
        if self.trainer.global_step > 2:
            ours.append(batch_seconds + recorded - began)
            theirs.append(ended - recorded)
            our_cpu.append(recorded_cpu - last_cpu[0])
            their_cpu.append(ended_cpu - recorded_cpu)
        last_cpu[0] = time.process_time()
        self.trainer._clock = time.monotonic()

    Session.after_step = take_turns  # type: ignore[method-assign]
    try:
        code = train(config, run_directory=folder / "run", progress=False)
    finally:
        Session.after_step = after_step  # type: ignore[method-assign]
    assert code == 0
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {
        "ours_median_seconds": statistics.median(ours),
        "stock_median_seconds": statistics.median(theirs),
        "ratio": ratio,
        # What other processes on the machine take does not count here.
        "cpu_time_ratio": statistics.median(our_cpu) / statistics.median(their_cpu),
        "ratio_of_pairs_median": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "limit": LIMIT,
        "within": ratio <= LIMIT,
        "steps": len(ours),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--loss", choices=("full", "chunked"), default="full")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
