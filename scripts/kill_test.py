"""Kill a run with SIGKILL at random moments; it must end with the weights of an uninterrupted run, bit for bit.

    python scripts/kill_test.py [--steps 2000] [--kills 10] [--seed N] [--ranks 2] [--folder DIR]

Trains a tiny model twice on random tokens: once straight, once killed and started again until it is done. The moments
are random over the whole life of a process: building, training, inside a save, inside an evaluation. Exit code 0 if
weights, optimizer state, random state and the surviving losses are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.config.run_config import RunConfig, load_run_config

LENGTH, VOCABULARY = 32, 256


def tiny_config(folder: Path, steps: int) -> RunConfig:
    """A run whose data lasts for two and a half epochs, with dropout, evaluations and saves at odd intervals."""
    batch = 8
    generator = np.random.default_rng(0)
    for name, instances in (("train", int(steps * batch / 2.5)), ("validation", 64)):
        ids = generator.integers(0, 16, size=instances * LENGTH) ** 2 % VOCABULARY
        ids.astype(np.uint16).tofile(folder / f"{name}.bin")
    validation = {"paths": [str(folder / "validation.bin")], "memmap_dtype": "uint16"}
    model: dict[str, Any] = {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_sequence_length": LENGTH}
    model |= {"vocab_size": VOCABULARY, "embedding_size": VOCABULARY, "eos_token_id": 0, "pad_token_id": 1}
    model |= {"rope": True, "weight_tying": False, "include_bias": False, "layer_norm_type": "rms"}
    model |= {"activation_type": "swiglu", "residual_dropout": 0.1}
    model |= {"ffn": {"type": "hourglass", "d_ff": 16, "num_sub_mlps": 3}}
    return load_run_config(
        {
            "run_name": "kill-test",
            "model": model,
            "data": {"paths": [str(folder / "train.bin")], "memmap_dtype": "uint16"},
            "evaluators": [{"label": "validation", "data": validation}],
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "max_duration": steps,
            "global_train_batch_size": batch,
            "device_train_microbatch_size": batch,
            "eval_interval": 130,
            "save_interval": 70,
            "save_interval_ephemeral": 30,
            "save_num_checkpoints_to_keep": 2,
            "save_data_indices": False,
            "max_grad_norm": 1.0,
        }
    )


def start(config: RunConfig, run: Path, ranks: int, log: Path) -> list[int]:
    """Fork the run's processes; olmo is imported once, here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        sys.stdout.flush()
        if pid := os.fork():
            pids.append(pid)
            continue
        code = 1
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if ranks > 1:
                values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                os.environ.update({key: str(value) for key, value in values.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            from olmo_ext.training.train import train

            code = train(config, run_directory=run, progress=False)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pids


def wait(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def wait_for_a_moment(
    moments: random.Random, run: RunDirectory, options: argparse.Namespace, *, kills: int, victim: int
) -> None:
    """Return in the middle of building (one time in five), or shortly after a random step that lies ahead."""
    if moments.random() < 0.2:
        time.sleep(moments.uniform(0.0, 2.0))
        return
    saved = run.read_state().step
    share = (options.steps - saved) / (options.kills - kills + 1)
    target = saved + moments.uniform(0.1, 1.9) * share
    while max((row.step for row in run.read_metrics()[-1:]), default=0) < target:
        if os.waitid(os.P_PID, victim, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.02)
    time.sleep(moments.uniform(0.0, 0.1))


def train_with_kills(config: RunConfig, run: Path, options: argparse.Namespace, log: Path) -> int:
    """Train to the end; kill `options.kills` times at random moments. Returns the number of kills that hit."""
    moments = random.Random(options.seed)
    kills = 0
    while True:
        pids = start(config, run, options.ranks, log)
        if kills < options.kills:
            victim = moments.choice(pids)
            wait_for_a_moment(moments, RunDirectory(run), options, kills=kills, victim=victim)
            if os.waitpid(victim, os.WNOHANG) == (0, 0):
                os.kill(victim, signal.SIGKILL)
                kills += 1
                step = max((row.step for row in RunDirectory(run).read_all_metrics()), default=0)
                print(f"kill {kills}: at step {step}, saved {RunDirectory(run).read_state().step}", flush=True)
                wait(pids)
                continue
            pids.remove(victim)
        codes = wait(pids)
        if any(codes):
            raise SystemExit(f"a start failed with {codes}: see {log}")
        return kills


def differences(straight: Path, killed: Path) -> list[str]:
    """What is not equal, in words."""
    found = []
    last = f"step{RunDirectory(straight).read_state().step}"
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        contents = [(run / "checkpoints" / last / name).read_bytes() for run in (straight, killed)]
        if contents[0] != contents[1]:
            found.append(f"{name} of {last}")
    timing = ("throughput/tokens_per_second", "memory/peak_bytes")
    rows = [
        [
            (row.kind, row.step, row.tokens, json.dumps({k: v for k, v in row.values.items() if k not in timing}))
            for row in RunDirectory(run).read_metrics()
            if row.kind != "attempt"
        ]
        for run in (straight, killed)
    ]
    if rows[0] != rows[1]:
        found.append(f"rows of metrics.jsonl ({len(rows[0])} and {len(rows[1])})")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    import olmo_ext.training.session  # noqa: F401

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = tiny_config(folder, options.steps)
        log = folder / "output.log"
        print(f"moments of seed {options.seed}", flush=True)
        began = time.monotonic()
        if any(codes := wait(start(config, folder / "straight", options.ranks, log))):
            raise SystemExit(f"the straight run failed with {codes}:\n{log.read_text()[-2000:]}")
        life = time.monotonic() - began
        print(f"straight: {options.steps} steps in {life:.0f} s", flush=True)
        kills = train_with_kills(config, folder / "killed", options, log)
        found = differences(folder / "straight", folder / "killed")
        attempts = RunDirectory(folder / "killed").read_state().attempt
        verdict = f"DIFFERENT: {'; '.join(found)}" if found else "equal, bit for bit"
        print(f"{options.steps} steps, {options.ranks} ranks, {kills} kills, {attempts} attempts: {verdict}")
        return 1 if found or kills < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
