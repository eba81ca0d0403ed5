"""Every test runs without network, without a caller's Slurm or W&B settings, and on one thread."""

from __future__ import annotations

import os

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
