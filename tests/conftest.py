"""Every test runs without network, without a caller's Slurm or W&B settings, on one thread, and with the same numbers
whichever tests ran before it."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

for name in list(os.environ):
    if name.startswith(("SLURM_", "SBATCH_", "WANDB_", "OLMO_EXT_")) or name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    ):
        del os.environ[name]
os.environ.update(
    OMP_NUM_THREADS="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
)
pytest_plugins = ["tests.training_fixtures"]

# An example's time is the machine's affair; a landing must not depend on which examples are drawn.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """torch's global generator, where it is imported already, does not remember the tests before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
