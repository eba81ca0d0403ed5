"""A run's length is that of its config, and what it trains beyond the asked tokens is said."""

from __future__ import annotations

from typing import Any

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.run_length import (
    batch_per_rank,
    learning_rate_warnings,
    period_warnings,
    run_length,
    schedule_warnings,
    sequence_warnings,
)
from tests.sections import typed


def _values(**changes: Any) -> TrainConfig:
    values = {"global_train_batch_size": 8, "device_train_microbatch_size": 4, "model": {"max_sequence_length": 16}}
    return typed({**values, "max_duration": "500T", **changes})


@pytest.mark.parametrize(
    ("changes", "steps", "excess"),
    [
        ({}, 4, 12),
        ({"stop_at": 100}, 4, 12),
        ({"stop_at": 4}, 4, 12),
        ({"stop_at": 3}, 3, 0),
        ({"stop_after": 3}, 3, 0),
        ({"stop_at": 3, "stop_after": 2}, 2, 0),
        ({"stop_after": 3, "load_path": "x", "reset_trainer_state": True}, 3, 0),
        ({"stop_after": 3, "load_path": "x"}, 4, 12),  # counted from a step that the config does not tell
        ({"max_duration": 7}, 7, 0),
    ],
)
def test_the_last_steps_excess_counts_unless_the_run_stops_before_it(
    changes: dict[str, Any], steps: int, excess: int
) -> None:
    length = run_length(_values(**changes))
    assert (length.steps, length.tokens, length.excess_tokens) == (steps, steps * 128, excess)


def test_batches_that_do_not_divide_are_refused_with_what_would_be_right() -> None:
    assert batch_per_rank(_values(), 4) == 2
    with pytest.raises(InputError, match="8 does not divide over 3 ranks.*1, 2, 4, 8 ranks"):
        batch_per_rank(_values(), 3)
    with pytest.raises(InputError, match="9 instances a rank do not divide.*device_train_microbatch_size 1"):
        batch_per_rank(_values(global_train_batch_size=9), 1)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("cosine_with_warmup", {}, False),
        ("cosine_with_warmup", {"stop_at": 3}, True),
        ("linear_with_warmup", {"stop_after": 3}, True),
        ("linear_with_warmup", {"t_max": 9}, True),
        ("cosine_with_warmup", {"t_max": 4}, False),
        ("cosine_with_warmup", {"t_max": 500, "units": "tokens"}, False),
        ("cosine_with_warmup", {"t_max": 640, "units": "tokens"}, True),
        ("constant_with_warmup", {"stop_at": 3}, False),
        ("inverse_sqrt_with_warmup", {"t_max": 9}, False),
    ],
)
def test_a_schedule_that_ends_elsewhere_than_the_run_is_told(name: str, changes: dict[str, Any], said: bool) -> None:
    own = {key: value for key, value in changes.items() if key in ("t_max", "units")}
    stops = {key: value for key, value in changes.items() if key not in own}
    values = _values(scheduler={"name": name, "units": "steps", "t_warmup": 1, "t_max": None, **own}, **stops)
    found = learning_rate_warnings(values, run_length(values))
    assert any("the last learning rate is not the schedule's end" in text for text in found) is said, found


def test_options_longer_than_a_sequence_are_said_once() -> None:
    from tests.blocks.conftest import tiny_config

    def warned(**options: object) -> list[str]:
        attention = {"type": "titans", "form": "mag", "window": 24, "chunk_size": 24, **options}
        config = tiny_config(attention=attention)
        assert config.shape.max_sequence_length == 24 and config.shape.n_layers > 1
        found = sequence_warnings(config.shape)
        assert set(found) <= set(schedule_warnings(config, config.shape, run_length(config)))
        return found

    assert warned() == []
    assert [text.partition(":")[0] for text in warned(window=25)] == ["window 25 is longer than max_sequence_length 24"]
    assert [text.partition(":")[0] for text in warned(chunk_size=64)] == [
        "chunk_size 64 is longer than max_sequence_length 24"
    ]
    assert warned(chunk_size=26, persistent_tokens=2) == []


def test_a_length_that_leaves_gradients_of_a_level_unapplied_is_said_before_the_run() -> None:
    from tests.blocks.conftest import tiny_config

    shape = tiny_config(ffn={"type": "hope", "num_sub_mlps": 3, "d_ff": 16, "update_periods": [1, 4, 16]}).shape
    assert period_warnings(shape, 160) == []
    assert [text.split(" steps of")[0][-1] for text in period_warnings(shape, 150)] == ["2", "6"]
    assert "period 16 is never updated: the run has 12 steps" in period_warnings(shape, 12)[0]
