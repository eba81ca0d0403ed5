"""The learning rates of a plan are those of OLMo's schedulers, step by step."""

from __future__ import annotations

import pytest

from olmo_ext.base.sections import plain_section
from olmo_ext.config.run_config import load_run_config
from olmo_ext.config.run_length import run_length
from olmo_ext.plan.learning_rate import learning_rate, learning_rates

NAMES = (
    "cosine_with_warmup",
    "linear_with_warmup",
    "inverse_sqrt_with_warmup",
    "max_scheduler",
    "constant",
    "cosine_linear_envelope",
    "constant_with_warmup",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [{}, {"stop_at": 40}, {"stop_after": 40}], ids=["whole", "stop_at", "stop_after"])
@pytest.mark.parametrize(
    "scheduler",
    [
        {"units": "steps", "t_warmup": 10},
        {"units": "steps", "t_warmup": 10, "t_max": 60, "alpha_f": 0.2, "warmup_min_lr": 0.0},
        {"units": "tokens", "t_warmup": 5000, "t_max": 90000},
        {"units": "tokens", "t_warmup": 5000},
        {"units": "steps", "t_warmup": 300, "alpha_f": 0.0},
    ],
)
def test_every_step_has_the_rate_of_olmos_scheduler(name, scheduler, stop):
    """OLMo's schedule ends with `max_duration`, wherever the run stops."""
    from olmo.config import SchedulerConfig, SchedulerType, SchedulerUnits, TrainConfig
    from olmo.optim import build_scheduler

    values = load_run_config(
        {
            "model": {"rope": True, "max_sequence_length": 64},
            "optimizer": {"learning_rate": 1e-3},
            "scheduler": {"name": name, **scheduler},
            "global_train_batch_size": 16,
            "max_duration": "100000T",  # 97.66 steps of 1,024 tokens: 98 steps, the horizon at 100,000
            **stop,
        }
    )
    length = run_length(values)
    assert length.steps == (40 if stop else 98)
    config = SchedulerConfig(
        **{**plain_section(values.scheduler), "name": SchedulerType(name), "units": SchedulerUnits(scheduler["units"])}
    )
    theirs = build_scheduler(TrainConfig(scheduler=config))
    by_tokens = scheduler["units"] == "tokens"
    rates = []
    for step in range(1, length.steps + 1):
        now, end = (step * 1024, 100_000) if by_tokens else (step, 98)
        rates.append(theirs.get_lr(1e-3, now, end))
        assert learning_rate(values, length, step) == pytest.approx(rates[-1], rel=1e-12), step
    found = learning_rates(values, length)
    assert found.peak == pytest.approx(max(rates), rel=1e-12)
    assert found.last == pytest.approx(rates[-1], rel=1e-12)
