"""How long a save holds the ranks, against the bare write of the same bytes.

    python benchmarks/checkpoint_stall.py [--parameters 50M] [--saves 5] [--folder DIR]

Three numbers from one process: the stall of a save as training sees it on this device, the stall when a thread writes
(what a GPU run does), and `safetensors` plus fsync of the same tensors, the least that a local copy takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def bare_write(tensors: dict[str, dict[str, torch.Tensor]], folder: Path) -> float:
    """Seconds to write and fsync the tensors, nothing else."""
    from safetensors.torch import save_file

    began = time.monotonic()
    for name, own in tensors.items():
        save_file(own, folder / name)
        descriptor = os.open(folder / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.monotonic() - began


def stalls(saves: int, parameters: int, folder: Path) -> dict[str, Any]:
    from olmo_ext.base.sections import TrainConfig
    from olmo_ext.training import checkpoint as files
    from olmo_ext.training import saving
    from olmo_ext.training.distributed import process_group

    width = 1024
    with process_group() as ranks:
        layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(max(1, parameters // width**2))
        ).to(ranks.device)
        model = torch.nn.parallel.DistributedDataParallel(layers)
        optimizer = torch.optim.AdamW(layers.parameters())
        optimizer.param_groups[0]["param_names"] = [name for name, _ in layers.named_parameters()]
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found: dict[str, list[float]] = {"waiting": [], "in_background": [], "bare_write": []}
        trainer: Any = type("Trainer", (), {})()
        trainer.dist_model, trainer.optim, trainer.stop_step, trainer.epoch = model, optimizer, 10**9, 0
        trainer.global_train_examples_seen_this_epoch = trainer.global_train_tokens_seen = trainer.first_step = 0
        trainer.seconds, trainer.cur_train_loss, trainer.min_train_loss, trainer.bolt_on_warmup = 0.0, 0.0, 0.0, None
        config = TrainConfig(save_interval=1, save_num_checkpoints_to_keep=1)
        size = 0
        for turn in range(saves):
            for number, (kind, background) in enumerate((("waiting", False), ("in_background", True))):
                saving.writes_in_background = lambda device, background=background: background  # type: ignore[misc]
                store = files.CheckpointStore(folder / kind)
                saver = saving.Saver(
                    store,
                    config=config,
                    config_text="",
                    checkpoint_bytes=12 * parameters,
                    rows=folder / "metrics.jsonl",
                    ranks=ranks,
                    extra={"data": None},
                    saved=lambda step: None,
                )
                trainer.global_step = 2 * turn + number + 1
                began = time.monotonic()
                saver.save(trainer)
                found[kind].append(time.monotonic() - began)
                saver.wait()
            latest = folder / "waiting/latest"
            tensors = {files.MODEL: files.load_model_state(latest)}
            moments = files.load_optimizer_state(latest)
            tensors[files.OPTIMIZER] = {f"{k}/{n}": t.clone() for n, own in moments.items() for k, t in own.items()}
            tensors[files.MODEL] = {name: tensor.clone() for name, tensor in tensors[files.MODEL].items()}
            size = sum(t.numel() * t.element_size() for own in tensors.values() for t in own.values())
            found["bare_write"].append(bare_write(tensors, folder))
        device = str(ranks.device)
    medians = {f"{kind}_seconds": statistics.median(times) for kind, times in found.items()}
    bare = medians["bare_write_seconds"]
    return {
        "device": device,
        "bytes": size,
        **medians,
        "waiting_over_bare_write": medians["waiting_seconds"] / bare,
        "in_background_over_bare_write": medians["in_background_seconds"] / bare,
        "this_device_uses": "in_background" if device.startswith("cuda") else "waiting",
    }


def main() -> None:
    from olmo_ext.base.quantities import parse_count

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=parse_count, default=50_000_000)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(stalls(options.saves, options.parameters, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
