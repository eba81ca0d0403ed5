"""Refuse a config that needs what this machine or OLMo lacks, before the run's folder is made; torch is imported late.

Such a config loads, and a model with it: checkpoints that were trained elsewhere are evaluated and imported.
"""

from __future__ import annotations

import importlib.util

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig

INITIALISATIONS = ("normal", "mitchell", "full_megatron")
"""The `init_fn` that ai2-olmo can draw; its other names belong to checkpoints of older versions."""


def check_requirements(config: TrainConfig, *, where: str, trains_here: bool = True) -> None:
    """Refuse settings that would make training fail in its first step.

    :param config: a resolved config.
    :param where: the config's name.
    :param trains_here: whether this is the machine that trains, and not one that queues the run.
    :raises InputError: naming the key and what would be right.
    """
    model = config.model
    if model.init_fn not in INITIALISATIONS:
        raise InputError(
            f"{model.init_fn!r} is the name of a checkpoint's past, OLMo draws no weights by it",
            where=f"{where}, model.init_fn",
            right=f"one of {', '.join(INITIALISATIONS)}",
        )
    if trains_here and model.flash_attention and (missing := _missing_for_flash_attention()) is not None:
        right = "false: PyTorch's own attention has flash kernels too"
        if config.data.generate_doc_lengths:
            right = "false, and data.generate_doc_lengths: false, which needs it"
        raise InputError(missing, where=f"{where}, model.flash_attention", right=right)
    if trains_here and config.fused_loss and importlib.util.find_spec("flash_attn") is None:
        right = "fused_loss: null, and loss: chunked, which needs less memory and no package"
        raise InputError(NO_FLASH_ATTENTION, where=f"{where}, fused_loss", right=right)


NO_FLASH_ATTENTION = "the flash-attn package is not installed"


def _missing_for_flash_attention() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return NO_FLASH_ATTENTION
    import torch

    return None if torch.cuda.is_available() else "the flash-attn package needs a GPU, and none is seen here"
