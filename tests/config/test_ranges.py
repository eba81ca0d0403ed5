"""No value of any key of a config gets past loading to fail, or to mean nothing, in training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.config.ranges import CHOICES, RANGES
from olmo_ext.config.run_config import load_run_config
from olmo_ext.config.schema import load_schema

ODD = ("", "[]", "{}", "[1,2]", "{a: 1}", "-1", "1e30", "1e308", "1e999999999", "nan", "text", "0.5", "1,5", "'")
"""Values of the wrong type, sign and size; what a key may hold loads, anything else is one line."""


def _keys(name: str, prefix: str = "") -> Iterator[str]:
    for word, entry in load_schema()["classes"][name].items():
        path = f"{prefix}.{word}" if prefix else word
        yield path
        if entry["type"].startswith("class:"):
            yield from _keys(entry["type"].removeprefix("class:"), path)


@pytest.mark.parametrize("section", ["", "model", "optimizer", "scheduler", "data", "budget", "wandb", "compile"])
def test_any_value_of_any_key_loads_or_is_one_line(section: str) -> None:
    base = {"model": {"d_model": 32, "n_layers": 2, "n_heads": 4}}
    keys = [key for key in _keys("TrainConfig") if (key.partition(".")[0] if "." in key else "") == section]
    assert keys
    for key in keys:
        for text in ODD:
            try:
                load_run_config(base, [f"{key}={text}"])
            except InputError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000, (key, text)


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("optimizer.learning_rate=-1e-3", "at least 0"),
        ("optimizer.betas=[0.9, 1.0]", "less than 1"),
        ("optimizer.betas=[0.9]", "two numbers"),
        ("max_grad_norm=0", "more than 0"),
        ("eval_interval=0", "at least 1"),
        ("console_log_interval=0", "at least 1"),
        ("device_eval_batch_size=0", "at least 1"),
        ("stop_at=0", "at least 1"),
        ("max_duration=0ep", "no training"),
        ("max_duration=-5", "no training"),
        ("save_num_checkpoints_to_keep=-2", "at least -1"),
        ("save_interval=-1", "at least 0"),
        ("scheduler.t_warmup=-10", "at least 0"),
        ("scheduler.t_max=0", "more than 0"),
        ("time_limit=0", "more than 0"),
        ("early_stopping_factor=0", "more than 0"),
        ("model.init_std=0", "more than 0"),
        ("seed=-1", "at most 4294967295"),
        ("seed=4294967296", "at most 4294967295"),
        ("data.seed=-1", "at least 0"),
        ("data.num_workers=-1", "at least 0"),
        ("data.memmap_dtype=int16", "uint16"),
        ("precision=fp8", "amp_bf16"),
        ("compile.mode=fast", "max-autotune"),
        ("model.n_layers=1e9", "at most 10000"),
        ("model.residual_dropout=1.5", "at most 1"),
        ("model.embedding_size=0", "at least 1"),
        ("budget.tolerance=-1%", "at least 0"),
        ("global_train_batch_size=0", "at least 1"),
    ],
)
def test_what_training_would_take_silently_or_die_of_is_refused_by_its_key(override: str, right: str) -> None:
    with pytest.raises(InputError, match=f"command line, {override.partition('=')[0]}.*: .*{right}"):
        load_run_config({}, [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.alibi=true", "model.rope=true"),
        ("fused_loss=true", "loss=chunked"),
        ("model.block_group_size=5",),
        ("data.timeout=5",),
        ("data.generate_doc_lengths=true",),
        ("data.instance_filter={repetition_min_period: 20}",),
    ],
)
def test_keys_that_exclude_each_other_are_named(overrides: tuple[str, ...]) -> None:
    key = overrides[0].partition("=")[0]
    with pytest.raises(InputError, match=f"command line, {key}"):
        load_run_config({}, overrides)


def test_what_documents_apart_need_is_said_with_the_advice() -> None:
    with pytest.raises(InputError, match=r"false, or model\.flash_attention: true \(which needs a GPU and"):
        load_run_config({}, ["data.generate_doc_lengths=true"])
    assert load_run_config({}, ["data.generate_doc_lengths=true", "model.flash_attention=true"])


def test_the_limits_are_those_of_keys_that_exist_and_allow_their_defaults() -> None:
    classes = load_schema()["classes"]
    for table in (RANGES, CHOICES):
        for name, keys in table.items():
            assert set(keys) <= set(classes[name]), name
    for name, ranges in RANGES.items():
        for key, allowed in ranges.items():
            default = classes[name][key].get("default")
            assert default is None or allowed.holds(default), (name, key)
