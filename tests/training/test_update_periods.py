"""Levels of Hope's FFN that are updated every C-th step: AdamW by hand, restarts, ranks, and the plain stack."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError
from olmo_ext.training.train import train

LEVELS = ("model.ffn.type=hope", "model.ffn.d_ff=[12,8,8]")
PERIODS = (*LEVELS, "model.ffn.update_periods=[1,3,4]")
STEPS = ("max_duration=10", "save_interval=100", "optimizer.decay_norm_and_bias=true")
FSDP = ("distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block")


def level_of(name: str) -> int:
    match = re.search(r"\.(?:sub_mlps|ff_norms)\.(\d)\.", name)
    return int(match[1]) if match else 0


def small_model(config, *overrides):
    """A model of the config and its optimizer, as a session builds them, without a session."""
    from olmo.optim import build_optimizer

    from olmo_ext.training.update_periods import with_update_periods
    from olmo_ext.upstream.shaped_model import build_model
    from olmo_ext.upstream.trainer import train_config

    text = config(*PERIODS, *overrides)
    model = build_model(text)
    return model, with_update_periods(build_optimizer(train_config(text), model), text.shape), text


def test_a_level_takes_adamws_step_on_the_mean_of_its_gradients_when_its_period_ends(config):
    """AdamW by hand in fp64: own count of steps, weight decay lr wd C, clipping of what moves in the step."""
    model, optimizer, _ = small_model(config, "optimizer.decay_norm_and_bias=true")
    names = dict(model.named_parameters())
    decayed = {name: not name.endswith("wte.weight") for name in names}
    weights = {name: p.detach().double().clone() for name, p in names.items()}
    sums = {name: torch.zeros_like(w) for name, w in weights.items()}
    first, second = dict(sums), {name: torch.zeros_like(w) for name, w in weights.items()}
    counts = dict.fromkeys(names, 0)
    random = torch.Generator().manual_seed(0)
    for step in range(1, 14):
        learning_rate = 1e-2 / step
        optimizer.zero_grad(set_to_none=True)
        moving = {}
        for name, parameter in names.items():
            gradient = torch.randn(parameter.shape, generator=random)
            parameter.grad = gradient.clone()
            sums[name] = sums[name] + gradient.double()
            period = (1, 3, 4)[level_of(name)]
            if step % period == 0:
                moving[name] = sums[name] / period
                sums[name] = torch.zeros_like(sums[name])
        norm = torch.cat([g.flatten() for g in moving.values()]).norm()
        before = {name: parameter.detach().clone() for name, parameter in names.items()}
        metrics = optimizer.clip_grads_and_collect_metrics(step, collect_param_metrics=False)
        torch.testing.assert_close(metrics["total_grad_norm"].double(), norm, rtol=1e-6, atol=0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        for name, gradient in moving.items():
            gradient = gradient * min(1.0, 1.0 / (norm + 1e-6))
            period = (1, 3, 4)[level_of(name)]
            counts[name] += 1
            weights[name] = weights[name] * (1 - learning_rate * (0.1 * period if decayed[name] else 0.0))
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.95 * second[name] + 0.05 * gradient**2
            root = (second[name] / (1 - 0.95 ** counts[name])).sqrt() + 1e-5
            weights[name] = weights[name] - learning_rate * first[name] / (1 - 0.9 ** counts[name]) / root
        for name, parameter in names.items():
            if name in moving:
                assert not torch.equal(parameter, before[name]), (step, name)
            else:
                assert torch.equal(parameter, before[name]), (step, name)
            torch.testing.assert_close(parameter.double(), weights[name], rtol=1e-4, atol=1e-6)
    assert {int(optimizer.state[p]["step"]) for p in names.values()} == {13, 4, 3}


@pytest.mark.parametrize(
    "overrides", [(), ("model.include_bias=true",), ("model.ffn.update_periods=[5,1,2]", "model.ffn.d_ff=[16,8,24]")]
)
def test_the_planned_memory_of_weights_moments_and_sums_is_what_the_optimizer_holds(config, overrides):
    from olmo_ext.shapes.memory import StepSettings, estimate_memory
    from olmo_ext.training.checkpoint import estimated_bytes

    model, optimizer, resolved = small_model(config, *overrides)
    for step in range(1, 3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.clip_grads_and_collect_metrics(step, collect_param_metrics=False)
        optimizer.step()
    held = dict.fromkeys(("exp_avg", "exp_avg_sq", "grad_sum"), 0)
    for state in optimizer.state.values():
        for name in held.keys() & state.keys():
            held[name] += state[name].numel() * state[name].element_size()
    planned = estimate_memory(resolved.shape, resolved.counts, StepSettings(precision="fp32"), micro_batch=1)
    assert held["grad_sum"] == planned.sums > 0
    assert held["exp_avg"] + held["exp_avg_sq"] == planned.moments
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == planned.weights
    saved = estimated_bytes(resolved, resolved.shape)
    assert saved == planned.weights + planned.moments + planned.sums


def test_the_sums_of_a_period_are_reported(config):
    model, optimizer, _ = small_model(config)
    for step in range(1, 5):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        metrics = optimizer.clip_grads_and_collect_metrics(step, collect_param_metrics=False)
        optimizer.step()
    assert float(metrics["period3/accumulated"]) == 1 and float(metrics["period3/updates"]) == 1
    assert float(metrics["period4/accumulated"]) == 0 and float(metrics["period4/updates"]) == 1
    assert "period3/grad_norm" not in metrics
    numbers = sum(p.numel() for name, p in model.named_parameters() if level_of(name) == 2)
    torch.testing.assert_close(float(metrics["period4/grad_norm"]), 0.5 * numbers**0.5)


def test_a_waiting_gradient_that_is_no_number_is_seen_at_once(config):
    model, optimizer, _ = small_model(config)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float("inf") if level_of(name) == 2 else 1.0)
    assert not optimizer.clip_grads_and_collect_metrics(1, collect_param_metrics=False)["total_grad_norm"].isfinite()


def test_settings_that_periods_do_not_go_with_are_refused(config):
    with pytest.raises(InputError, match="max_grad_norm_ratio"):
        small_model(config, "max_grad_norm_ratio=1.0")
    for wrong in ("[1,2]", "[1,2,0]", "[1,2,x]"):
        with pytest.raises(InputError, match=r"model\.ffn"):
            config(*LEVELS, f"model.ffn.update_periods={wrong}")


def test_all_periods_one_equal_the_plain_stack_to_the_bit(forked, config, tmp_path, same_checkpoint):
    hope = config(*STEPS, *LEVELS, "model.ffn.update_periods=[1,1,1]")
    plain = config(*STEPS, LEVELS[1], "model.ffn.type=hourglass")
    for name, text in (("hope", hope), ("plain", plain)):
        ended = forked(lambda text=text, name=name: train(text, run_directory=tmp_path / name))
        assert ended.code == 0, ended.output
    same_checkpoint(tmp_path / "hope/checkpoints/step10", tmp_path / "plain/checkpoints/step10")


@pytest.fixture
def run(forked, on_ranks, config, tmp_path):
    """`run(name, ranks, *overrides, stop=step)` trains in a folder; with `stop`, a signal comes in that step."""

    def start(name: str, number: int, *overrides: str, stop: int | None = None):
        text = config(*PERIODS, *STEPS, *overrides)

        def child(rank: int = 0) -> int:
            if stop is not None:
                from olmo_ext.training.session import Session

                original = Session.wants_metrics

                def wants(self: Session, at: int) -> bool:
                    if at == stop and not self.stop.is_set:
                        os.kill(os.getpid(), signal.SIGUSR2)
                        time.sleep(0.01)
                    return original(self, at)

                Session.wants_metrics = wants  # type: ignore[method-assign]
            return train(text, run_directory=tmp_path / name)

        ended = on_ranks(number, child) if number else [forked(child)]
        assert {end.code for end in ended} == {0 if stop is None else 75}, ended
        return tmp_path / name, ended

    return start


@pytest.mark.once
def test_a_restart_in_the_middle_of_a_period_changes_no_bit(run, same_checkpoint, metric_rows):
    straight, ended = run("straight", 0)
    assert "the last 1 steps of the level with update period 3 are not applied" in ended[0].output
    assert "period 4" in ended[0].output
    for stop in (2, 5):
        stopped, _ = run("stopped", 0, stop=stop)
    sums = load_file(stopped / "checkpoints/step5/optimizer.safetensors")
    assert float(sums["grad_count/transformer.blocks.0.sub_mlps.1.ff_out.weight"]) == 2
    assert sums["grad_sum/transformer.blocks.0.sub_mlps.2.ff_out.weight"].abs().max() > 0
    run("stopped", 0)
    same_checkpoint(straight / "checkpoints/step10", stopped / "checkpoints/step10")
    waiting = [row["values"]["optim/period4/accumulated"] for row in metric_rows(straight, "train")]
    assert waiting == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    norms = ["optim/period3/grad_norm" in row["values"] for row in metric_rows(straight, "train")]
    assert norms == [step % 3 == 0 for step in range(1, 11)]


def test_micro_batches_ranks_and_strategies_give_the_same_levels(run):
    """Also a checkpoint of two sharded ranks in the middle of a period, continued by one process, and back."""
    straight, _ = run("straight", 0)
    others = {
        "ddp": run("ddp", 2, "device_train_microbatch_size=2")[0],
        "fsdp": run("fsdp", 2, *FSDP)[0],
    }
    run("moved", 2, *FSDP, stop=5)
    run("moved", 0, stop=7)
    others["moved"] = run("moved", 2, *FSDP)[0]
    for file in ("model.safetensors", "optimizer.safetensors"):
        reference = load_file(straight / "checkpoints/step10" / file)
        assert any("sub_mlps.2" in key for key in reference)
        for name, folder in others.items():
            found = load_file(folder / "checkpoints/step10" / file)
            assert found.keys() == reference.keys(), name
            for key, tensor in reference.items():
                scale = float(tensor.abs().max())
                torch.testing.assert_close(
                    found[key], tensor, rtol=1e-3, atol=1e-4 * scale + 1e-12, msg=lambda m, at=(name, key): f"{at}: {m}"
                )


def test_a_period_longer_than_the_run_leaves_the_level_as_it_was_drawn(forked, config, tmp_path):
    from olmo_ext.upstream.shaped_model import build_model

    text = config(*LEVELS, "model.ffn.update_periods=[1,1,1000]")
    assert forked(lambda: train(text, run_directory=tmp_path / "run")).code == 0
    drawn = build_model(text).state_dict()
    trained = load_file(tmp_path / "run/checkpoints/step4/model.safetensors")
    still = {name for name, tensor in drawn.items() if torch.equal(tensor, trained[name])}
    assert still == {name for name in drawn if ".sub_mlps.2." in name or ".ff_norms.2." in name}
