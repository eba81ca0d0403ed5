"""Tiny runs in forked children: torch and olmo are imported once, and a kill hits one child alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.config.run_config import RunConfig, load_run_config
from olmo_ext.launch.slurm_job import free_port

LENGTH, VOCABULARY = 16, 64


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative for a signal) and everything it printed."""

    code: int
    output: str


def _child(function: Callable[[], Any], output: Path, environment: dict[str, str]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        signal.alarm(0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
        os.environ.update(environment)
        code = function()
    except BaseException as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)


def _wait(pids: list[int], seconds: float) -> list[int]:
    deadline, codes = time.monotonic() + seconds, {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = -999
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


@pytest.fixture(scope="session")
def heavy() -> None:
    """Import what a run needs, once for all forked children."""
    import torch._dynamo  # noqa: F401  (what DDP and the optimizer import on first use)

    import olmo_ext.training.session  # noqa: F401


@pytest.fixture
def forked(heavy: None, tmp_path: Path) -> Callable[..., Ended]:
    """`forked(function)` runs it in a child."""
    count = iter(range(1000))

    def run(function: Callable[[], Any], *, seconds: float = 120, **environment: str) -> Ended:
        output = tmp_path / f"child{next(count)}.out"
        code = _wait([_child(function, output, environment)], seconds)[0]
        return Ended(code, output.read_text())

    return run


@pytest.fixture
def on_ranks(heavy: None, tmp_path: Path) -> Callable[..., list[Ended]]:
    """`on_ranks(n, function)` runs `function(rank)` in n children with torchrun's environment."""
    count = iter(range(1000))

    def run(number: int, function: Callable[[int], Any], *, seconds: float = 120) -> list[Ended]:
        # Below the range that the kernel hands out to anybody: no other test's connection can take it meanwhile.
        port = free_port(97 * os.getpid() + next(count))
        outputs = [tmp_path / f"ranks{next(count)}.out" for _ in range(number)]
        pids = []
        for rank, output in enumerate(outputs):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            values = {key: str(value) for key, value in environment.items()}
            pids.append(_child(lambda rank=rank: function(rank), output, values))
        return [Ended(code, out.read_text()) for code, out in zip(_wait(pids, seconds), outputs, strict=True)]

    return run


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training files of 48 instances each and a validation file of 21."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(7)
    for name, instances in (("a", 48), ("b", 48), ("validation", 21)):
        # Half of the vocabulary, skewed: something to learn.
        (random.integers(0, 8, size=instances * LENGTH) ** 2 % VOCABULARY).astype(np.uint16).tofile(
            folder / f"{name}.bin"
        )
    return folder


@pytest.fixture
def config(tokens: Path) -> Callable[..., RunConfig]:
    """`config("max_duration=4", ...)`: a tiny run with overrides."""
    values = {
        "run_name": "tiny",
        "seed": 3,
        "model": {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_sequence_length": LENGTH,
            "vocab_size": VOCABULARY,
            "embedding_size": 128,
            "eos_token_id": 0,
            "pad_token_id": 1,
            "rope": True,
            "weight_tying": False,
            "include_bias": False,
            "layer_norm_type": "rms",
            "activation_type": "swiglu",
            "init_fn": "normal",
            "init_std": 0.02,
            "init_cutoff_factor": 3,
            "ffn": {"d_ff": 24},
        },
        "data": {"paths": [str(tokens / "a.bin"), str(tokens / "b.bin")], "memmap_dtype": "uint16"},
        "evaluators": [
            {"label": "held-out", "data": {"paths": [str(tokens / "validation.bin")], "memmap_dtype": "uint16"}}
        ],
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1},
        "scheduler": {"t_warmup": 2},
        "max_duration": 4,
        "global_train_batch_size": 8,
        "device_train_microbatch_size": 8,
        "device_eval_batch_size": 4,
        "eval_interval": 100,
        "save_interval": 100,
        "max_grad_norm": 1.0,
    }

    def load(*overrides: str, **sections: Any) -> RunConfig:
        return load_run_config({**values, **sections}, overrides)

    return load


def rows(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


@pytest.fixture
def metric_rows() -> Callable[..., list[dict[str, Any]]]:
    """All rows of a run's metrics.jsonl, or those of one kind."""
    return rows


@pytest.fixture
def same_checkpoint() -> Callable[[Path, Path], None]:
    """Assert that two checkpoint folders hold the same bits: weights, moments and random state."""

    def compare(first: Path, second: Path) -> None:
        for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), name

    return compare


@pytest.fixture
def sample_ids() -> Callable[[Path], dict[int, list[int]]]:
    """Step -> sorted sample ids over all ranks and attempts of a run, later attempts winning."""

    def read(run: Path) -> dict[int, list[int]]:
        import gzip
        import re

        found: dict[int, dict[int, list[int]]] = {}
        for path in sorted((run / "logs").glob("*.samples.tsv.gz")):
            match = re.match(r"attempt(\d+)-", path.name)
            assert match
            with gzip.open(path, "rt") as file:
                for line in file:
                    step, *ids = map(int, line.split())
                    found.setdefault(step, {}).setdefault(int(match[1]), []).extend(ids)
        return {step: sorted(by_attempt[max(by_attempt)]) for step, by_attempt in found.items()}

    return read
