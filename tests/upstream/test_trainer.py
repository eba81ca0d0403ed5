"""OLMo's loop, with its traps closed: each test is named for what upstream gets wrong."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from pathlib import Path

import pytest
import torch

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.training.train import train

PATCHED = Path(__file__).parents[2] / "olmo_ext"


def stock_training(config, folder: Path, steps: int):
    """Stock OLMo's model, optimizer, scheduler and step written plainly: losses, weights."""
    from olmo.config import TrainConfig
    from olmo.model import OLMo
    from olmo.optim import build_optimizer, build_scheduler
    from olmo.train import cross_entropy_loss

    from olmo_ext.data.loader import build_train_loader

    values = config.plain()
    model_section = {key: value for key, value in values["model"].items() if key not in ("ffn", "attention")}
    model_section["mlp_hidden_size"] = 2 * values["model"]["ffn"]["d_ff"]
    data = {key: value for key, value in values["data"].items() if key not in ("subset", "corpus")}
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    rest = {k: v for k, v in values.items() if k in known and k not in ("model", "data", "evaluators")}
    cfg = TrainConfig.new(**rest, model=model_section, data=data)
    torch.manual_seed(values["seed"])
    model = OLMo(cfg.model)
    optimizer, scheduler = build_optimizer(cfg, model), build_scheduler(cfg)
    losses, norms = [], []
    loader = iter(build_train_loader(config, rank=0, world_size=1, work_dir=folder))
    for step in range(1, steps + 1):
        batch = next(loader)
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch["input_ids"]).logits[..., :-1, :].contiguous()
        labels = batch["input_ids"][..., 1:].contiguous().view(-1)
        loss, z_loss = cross_entropy_loss(
            logits.view(-1, logits.size(-1)), labels, reduction="sum", compute_z_loss=True
        )
        loss, z_loss = loss / batch["input_ids"].numel(), z_loss / batch["input_ids"].numel()
        (loss + z_loss if values["softmax_auxiliary_loss"] else loss).backward()
        norms.append(optimizer.clip_grads_and_collect_metrics(step, False)["total_grad_norm"].item())
        for group in optimizer.param_groups:
            group["lr"] = scheduler.get_lr(cfg.optimizer.learning_rate, step, steps)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.mark.parametrize("auxiliary", [False, True])
def test_with_nothing_masked_a_run_is_stock_olmo_to_the_bit(forked, config, tmp_path, metric_rows, auxiliary):
    """Loss, gradient norm and weights; and it stops exactly at max_duration, where stock goes on for ten steps."""
    from safetensors.torch import load_file

    text = config("max_duration=11", f"softmax_auxiliary_loss={str(auxiliary).lower()}")
    run, stock = tmp_path / "run", tmp_path / "stock.pt"

    def plain() -> int:
        torch.save(stock_training(text, tmp_path, 11), stock)
        return 0

    assert forked(lambda: train(text, run_directory=run)).code == 0
    ended = forked(plain)
    assert ended.code == 0, ended.output
    losses, norms, weights = torch.load(stock)
    rows = metric_rows(run, "train")
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["values"]["train/CrossEntropyLoss"] for row in rows] == losses
    assert [row["values"]["optim/total_grad_norm"] for row in rows] == norms
    found = load_file(run / "checkpoints/step11/model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name


def test_every_way_to_write_the_length_stops_exactly(forked, config, tmp_path):
    """Steps, tokens (a last step is completed, never cut) and epochs over 96 samples of 16 tokens."""
    for text, steps in (("5", 5), ("500T", 4), ("1ep", 12)):
        run = tmp_path / text
        ended = forked(lambda text=text, run=run: train(config(f"max_duration={text}"), run_directory=run))
        assert ended.code == 0, ended.output
        rows = [row for row in RunDirectory(run).read_metrics() if row.kind == "train"]
        assert len(rows) == steps and rows[-1].tokens == steps * 8 * 16
        assert RunDirectory(run).read_state().max_steps == steps
        # A last evaluation, always.
        assert [row.step for row in RunDirectory(run).read_metrics() if row.kind == "eval"] == [steps]


def test_z_loss_is_weighted_with_the_configured_multiplier(forked, config, tmp_path, metric_rows):
    """Upstream reads `auxiliary_loss_multiplier` nowhere."""
    found = {}
    for multiplier in ("1e-4", "1e-2"):
        run = tmp_path / multiplier
        text = config("softmax_auxiliary_loss=true", f"auxiliary_loss_multiplier={multiplier}", "max_duration=1")
        assert forked(lambda text=text, run=run: train(text, run_directory=run)).code == 0
        found[multiplier] = metric_rows(run, "train")[0]["values"]["train/ZLoss"]
    assert found["1e-2"] == pytest.approx(100 * found["1e-4"], rel=1e-5)


def test_a_cpu_run_asks_nothing_of_cuda_warns_of_nothing_and_computes_in_fp32(forked, config, tmp_path):
    def strict() -> int:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*([Cc][Uu][Dd][Aa]|autocast).*")
            return train(config("precision=amp_bf16"), run_directory=tmp_path / "run")

    ended = forked(strict)
    assert ended.code == 0, ended.output
    assert "fp32 instead of amp_bf16" in ended.output
    assert "Warning" not in ended.output
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "run/checkpoints/step4/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_the_wandb_server_is_never_asked_whether_the_run_was_cancelled(forked, config, tmp_path):
    """With WANDB_API_KEY set upstream asks it inside the loop, all ranks waiting, and logs to any W&B run there is."""

    def watched() -> int:
        import wandb

        class Trap:
            def __getattr__(self, name: str):
                raise AssertionError(f"wandb.run.{name} was used")

        wandb.run = Trap()
        wandb.Api = lambda *arguments, **options: (_ for _ in ()).throw(AssertionError("wandb.Api was used"))
        text = config("canceled_check_interval=1", "eval_interval=2", "console_log_interval=1")
        return train(text, run_directory=tmp_path / "run")

    ended = forked(watched, WANDB_API_KEY="x" * 40, WANDB_MODE="disabled")
    assert ended.code == 0, ended.output


def test_flops_come_from_the_shape_and_not_from_upstreams_count(forked, config, tmp_path, metric_rows):
    text = config()
    assert forked(lambda: train(text, run_directory=tmp_path / "run")).code == 0
    last = metric_rows(tmp_path / "run", "train")[-1]
    assert last["flops"] == last["tokens"] * text.counts.training_flops_per_token > 0


def test_training_time_leaves_out_evaluation_and_saving(forked, config, tmp_path, metric_rows):
    def slow() -> int:
        import time

        from olmo.train import Trainer

        from olmo_ext.training.checkpoint import CheckpointStore

        for cls, name in ((CheckpointStore, "write"), (Trainer, "eval")):
            original = getattr(cls, name)

            def late(*arguments, original=original, **options):
                time.sleep(1.0)
                return original(*arguments, **options)

            setattr(cls, name, late)
        return train(config("eval_interval=2", "save_interval=2"), run_directory=tmp_path / "run")

    assert forked(slow).code == 0
    last = metric_rows(tmp_path / "run", "train")[-1]
    begun = metric_rows(tmp_path / "run", "attempt")[0]["time"]
    # Between the two rows lie the save and the evaluation of step 2, a second each.
    assert 0 < last["seconds"] <= last["time"] - begun - 2.0 + 0.05
    assert last["values"]["throughput/tokens_per_second"] > 0 and last["values"]["memory/peak_bytes"] > 1e6
    assert "throughput/mfu" not in last["values"]


@pytest.mark.once
def test_fast_forward_skips_batches_once_and_not_at_every_restart(forked, config, tmp_path, sample_ids):
    import os
    import signal

    text = config("fast_forward_batches=10", "max_duration=6", "save_interval=2")
    straight, run = tmp_path / "straight", tmp_path / "run"
    plain = tmp_path / "plain"
    assert forked(lambda: train(config("max_duration=12"), run_directory=plain)).code == 0
    assert forked(lambda: train(text, run_directory=straight)).code == 0

    def half() -> int:
        from olmo_ext.training.session import Session

        original = Session.wants_metrics

        def wants(self, step: int) -> bool:
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, step)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(text, run_directory=run)

    assert forked(half).code == 75
    assert forked(lambda: train(text, run_directory=run)).code == 0
    assert sample_ids(run) == sample_ids(straight)
    assert [sample_ids(run)[step] for step in (1, 2)] == [sample_ids(plain)[step] for step in (11, 12)]


def test_skipped_batches_are_data_that_the_loader_gives_also_where_the_run_stops_early(forked, config, tmp_path):
    def needed() -> int:
        from olmo_ext.config.run_length import run_length
        from olmo_ext.training import building

        original = building.build_train_loader

        def seen(values, **options):
            print("steps of data:", run_length(values).steps)
            return original(values, **options)

        building.build_train_loader = seen
        return train(config("fast_forward_batches=10", "max_duration=100", "stop_at=2"), run_directory=tmp_path / "run")

    ended = forked(needed)
    assert ended.code == 0 and "steps of data: 12\n" in ended.output, ended.output


def test_upstream_still_has_what_the_trainer_overrides():
    """Names and signatures of ai2-olmo 0.6.0 that `olmo_ext.upstream` relies on in training."""
    import olmo.train
    from olmo.model import OLMo
    from olmo.optim import AdamW, BoltOnWarmupScheduler, LionW, Scheduler
    from olmo.train import Trainer

    from olmo_ext.upstream.scheduler import RegisteredScheduler
    from olmo_ext.upstream.trainer import RunTrainer

    for name, value in vars(RunTrainer).items():
        ours_alone = ("set_bolt_on", "loss_divisor", "autocast", "_")
        if inspect.isfunction(value) and not name.startswith(ours_alone):
            assert hasattr(Trainer, name), name
            theirs = inspect.signature(getattr(Trainer, name)).parameters
            assert list(inspect.signature(value).parameters) == list(theirs), name
    source = inspect.getsource(Trainer.fit)
    for used in ("self.check_if_cancelled()", "self.save_checkpoint(", "self.eval()", "self.should_log_this_step()"):
        assert used in source
    step = inspect.getsource(Trainer.train_step)
    assert step.index("clip_grads_and_collect_metrics") < step.index("self.optim.step()") < step.index("isnan")
    assert all(hasattr(cls, "clip_grads_and_collect_metrics") for cls in (AdamW, LionW))
    fields = ("grad_clip_warmup_steps", "grad_clip_warmup_factor", "warmup_min_lr", "section")
    assert list(inspect.signature(RegisteredScheduler).parameters) == list(fields)
    asked = inspect.signature(RegisteredScheduler.get_lr).parameters
    assert list(asked) == list(inspect.signature(Scheduler.get_lr).parameters)
    head = inspect.getsource(OLMo.forward)
    for used in (
        "if self.config.weight_tying:",
        "F.linear(x, self.transformer.wte.weight",
        "self.transformer.ff_out(x)",
    ):
        assert used in head
    assert hasattr(olmo.train, "wandb") and hasattr(BoltOnWarmupScheduler, "wrap")


def test_upstream_is_patched_in_one_package_alone():
    """Assignments to attributes of olmo's modules and classes outside `olmo_ext/upstream`."""
    names = r"(olmo\.\w+|OLMo\w*|Trainer|Evaluator|MemMapDataset|IterableDataset)"
    pattern = re.compile(rf"^\s*(setattr\({names}\b|{names}\.[\w.]+ = )", re.MULTILINE)
    for path in PATCHED.rglob("*.py"):
        if PATCHED / "upstream" not in path.parents:
            assert not pattern.search(path.read_text()), path
    assert pattern.search((PATCHED / "upstream/trainer.py").read_text())


def test_losses_are_numbers_a_float_can_exponentiate():
    from olmo_ext.upstream.divergence import LARGEST_LOSS

    assert math.isfinite(math.exp(LARGEST_LOSS))
