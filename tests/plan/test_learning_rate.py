"""The learning rates of a plan are those of OLMo's schedulers, step by step."""

from __future__ import annotations

import pytest

from olmo_ext.base.sections import plain_section
from olmo_ext.config.run_config import load_run_config
from olmo_ext.config.run_length import run_length
from olmo_ext.config.schedulers import SCHEDULERS, Scheduler
from olmo_ext.plan.learning_rate import learning_rate, learning_rates


@pytest.mark.parametrize("name", SCHEDULERS)
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
        assert learning_rate(values, length, step) == rates[-1], step
    found = learning_rates(values, length)
    assert (found.peak, found.last) == (max(rates), rates[-1])


def test_the_built_in_schedulers_are_olmos():
    from olmo.config import SchedulerType

    assert set(SCHEDULERS) >= {kind.value for kind in SchedulerType}


def test_the_peak_of_a_schedule_that_rises_again_is_found(monkeypatch):
    class Bump(Scheduler):
        name = "bump"
        rises_after_warmup = True

        def rate(self, step, *, initial, horizon, warmup, section):
            return initial * (3 if step == 37 else 1)

    monkeypatch.setitem(SCHEDULERS._types, "bump", Bump())
    config = load_run_config(
        {"model": {"rope": True}, "optimizer": {"learning_rate": 1e-3}, "scheduler": {"name": "bump", "t_warmup": 10}}
        | {"max_duration": 100, "global_train_batch_size": 8}
    )
    assert learning_rates(config, run_length(config)).peak == 3e-3
