"""Starting from another run's checkpoint, from OLMo's, or from the run's own under other settings."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.training.train import train


@pytest.fixture
def source(forked, config, tmp_path):
    """A run of four steps to start from."""
    run = tmp_path / "source"
    assert forked(lambda: train(config("scheduler.t_max=100"), run_directory=run)).code == 0
    return run / "checkpoints/step4"


def at_step(step: int, action) -> None:
    from olmo_ext.training.session import Session

    original = Session.wants_metrics

    def wants(self: Session, at: int) -> bool:
        if at == step:
            action(self)
        return original(self, at)

    Session.wants_metrics = wants  # type: ignore[method-assign]


def test_a_warm_start_with_everything_goes_on_as_the_run_would_have(
    forked, config, tmp_path, source, same_checkpoint, sample_ids
):
    straight, run = tmp_path / "straight", tmp_path / "run"
    overrides = ("scheduler.t_max=100", "max_duration=8")
    assert forked(lambda: train(config(*overrides), run_directory=straight)).code == 0
    ended = forked(lambda: train(config(*overrides, f"load_path={source}"), run_directory=run))
    assert ended.code == 0, ended.output
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (run / "checkpoints/step8" / name).read_bytes() == (straight / "checkpoints/step8" / name).read_bytes()
    assert {step: ids for step, ids in sample_ids(straight).items() if step > 4} == sample_ids(run)


@pytest.mark.once
@pytest.mark.parametrize("units", ["steps", "tokens"])
def test_a_new_optimizer_warms_up_again_also_after_a_restart(forked, config, tmp_path, source, metric_rows, units):
    from olmo.optim import BoltOnWarmupScheduler, CosWithWarmup

    run = tmp_path / "run"
    schedule = ("scheduler.t_max=100",)
    if units == "tokens":
        schedule = ("scheduler.units=tokens", f"scheduler.t_max={100 * 128}", f"scheduler.t_warmup={2 * 128}")
    reset = (f"load_path={source}", "reset_optimizer_state=true")
    text = config(*schedule, *reset, "max_duration=9", "save_interval=1")

    def half():
        at_step(6, lambda session: os.kill(os.getpid(), signal.SIGTERM))
        return train(text, run_directory=run)

    assert forked(half).code == 75
    assert forked(lambda: train(text, run_directory=run)).code == 0
    inner = CosWithWarmup(
        grad_clip_warmup_steps=None, grad_clip_warmup_factor=None, warmup_min_lr=None, warmup_steps=2, t_max=100
    )
    by_hand = BoltOnWarmupScheduler.wrap(inner, 4, 6)
    rates = [row["values"]["optim/learning_rate"] for row in metric_rows(run, "train")]
    assert rates == pytest.approx([by_hand.get_lr(1e-2, step, 9) for step in range(5, 10)], rel=1e-12)
    # The bias correction of a new optimizer counts from the warm start.
    moments = load_file(run / "checkpoints/step9/optimizer.safetensors")
    assert {float(tensor) for name, tensor in moments.items() if name.startswith("step/")} == {5.0}


def test_a_named_epoch_is_begun_and_not_the_checkpoints_gone_on_with(forked, config, tmp_path, source, sample_ids):
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert forked(lambda: train(config("epoch=1", "max_duration=2"), run_directory=straight)).code == 0
    text = config(f"load_path={source}", "epoch=1", "max_duration=6")
    assert forked(lambda: train(text, run_directory=run)).code == 0
    assert [sample_ids(run)[step] for step in (5, 6)] == [sample_ids(straight)[step] for step in (1, 2)]


def test_another_batch_size_goes_on_from_the_instance_that_the_source_has_reached(
    forked, config, tmp_path, source, sample_ids
):
    """32 of 96 instances were seen in four steps of 8."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert forked(lambda: train(config("max_duration=12"), run_directory=straight)).code == 0
    order = [sample_ids(straight)[step] for step in range(5, 13)]

    def text(batch: int, steps: int):
        sizes = (f"global_train_batch_size={batch}", f"device_train_microbatch_size={batch}")
        return config(*sizes, f"max_duration={steps}", f"load_path={source}")

    assert forked(lambda: train(text(4, 8), run_directory=run)).code == 0
    halves = sample_ids(run)
    assert [sorted(halves[step] + halves[step + 1]) for step in (5, 7)] == order[:2]
    assert forked(lambda: train(text(24, 6), run_directory=tmp_path / "within")).code == 0
    assert sum((sorted(sample_ids(tmp_path / "within")[step]) for step in (5, 6)), []) == [
        *sorted(sum(order[:3], [])),
        *sorted(sum(order[3:6], [])),
    ]
    ended = forked(lambda: train(text(24, 7), run_directory=tmp_path / "beyond"))
    assert ended.code == 2 and "instance 32 of its epoch" in ended.output.splitlines()[-1], ended.output


def test_a_new_position_starts_at_step_0_with_the_weights(forked, config, tmp_path, source, metric_rows):
    run = tmp_path / "run"
    text = config(f"load_path={source}", "reset_optimizer_state=true", "reset_trainer_state=true", "stop_after=2")
    assert forked(lambda: train(text, run_directory=run)).code == 0
    assert [row["step"] for row in metric_rows(run, "train")] == [1, 2]
    warm = metric_rows(run, "train")[0]["values"]["train/CrossEntropyLoss"]
    cold = metric_rows(source.parents[1], "train")
    assert warm < cold[-1]["values"]["train/CrossEntropyLoss"] + 0.2 < cold[0]["values"]["train/CrossEntropyLoss"]


def write_olmo_checkpoint(folder: Path, text, *, by_name: bool) -> dict[str, torch.Tensor]:
    """What stock OLMo's unsharded checkpointer writes under DDP (numbers) and FSDP (names)."""
    from olmo.optim import build_optimizer

    from olmo_ext.upstream.shaped_model import build_model
    from olmo_ext.upstream.trainer import train_config

    model = build_model(text, seed=11)
    optimizer = build_optimizer(train_config(text), model)
    model(torch.arange(16)[None]).logits.sum().backward()
    optimizer.step()
    folder.mkdir()
    state = optimizer.state_dict()
    if by_name:
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        state = {
            "state": {names[key]: own for key, own in state["state"].items()},
            "param_groups": [{**group, "params": group["param_names"]} for group in state["param_groups"]],
        }
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save(state, folder / "optim.pt")
    torch.save({"path": Path("x"), "rng": (random.getstate(), np.random.get_state())}, folder / "train.pt")
    return model.state_dict()


@pytest.mark.parametrize("by_name", [False, True], ids=["ddp", "fsdp"])
def test_an_unsharded_olmo_checkpoint_gives_weights_and_moments(forked, config, tmp_path, by_name):
    folder, run = tmp_path / "olmo", tmp_path / "run"
    weights = write_olmo_checkpoint(folder, config(), by_name=by_name)
    # A learning rate of nothing leaves the weights as they were loaded.
    text = config(
        f"load_path={folder}",
        "reset_trainer_state=true",
        "stop_after=1",
        "optimizer.learning_rate=1e-30",
        "optimizer.weight_decay=0",
    )
    ended = forked(lambda: train(text, run_directory=run))
    assert ended.code == 0, ended.output
    found = load_file(run / "checkpoints/step1/model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
    moments = load_file(run / "checkpoints/step1/optimizer.safetensors")
    assert {float(tensor) for name, tensor in moments.items() if name.startswith("step/")} == {2.0}


def test_what_cannot_be_loaded_is_refused_in_one_line(forked, config, tmp_path, source):
    olmo, evil, empty = tmp_path / "olmo", tmp_path / "evil", tmp_path / "empty"
    write_olmo_checkpoint(olmo, config(), by_name=False)
    evil.mkdir()
    empty.mkdir()
    torch.save({"transformer.wte.weight": Path("x")}, evil / "model.pt")
    reset = ("reset_optimizer_state=true", "reset_trainer_state=true")
    for number, (overrides, said) in enumerate(
        [
            ((f"load_path={olmo}",), "reset_trainer_state"),
            ((f"load_path={evil}", *reset), "plain tensors"),
            ((f"load_path={empty}",), "no checkpoint"),
            (("load_path=s3://bucket/run", *reset), "from disks only"),
            ((f"load_path={source}", "model.ffn.d_ff=32"), "ff_out.weight is [16, 24] in the checkpoint and [16, 32]"),
            ((f"load_path={source}", "model.n_layers=3"), "blocks.2"),
            ((f"load_path={source}", "max_duration=3"), "goes on from step 4, the run ends at 3"),
        ]
    ):
        run = tmp_path / f"run{number}"
        ended = forked(lambda overrides=overrides, run=run: train(config(*overrides), run_directory=run))
        assert ended.code == 2 and said in ended.output.splitlines()[-1], ended.output
        assert RunDirectory(run).read_state().status == "failed"


def test_an_optimizer_that_needs_more_than_the_checkpoint_has_is_refused(forked, config, tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    lion = config("optimizer.name=lionw", "max_duration=1")
    assert forked(lambda: train(lion, run_directory=source)).code == 0
    ended = forked(lambda: train(config(f"load_path={source}/checkpoints/step1"), run_directory=run))
    assert ended.code == 2 and "no exp_avg_sq of " in ended.output.splitlines()[-1], ended.output
    assert "reset_optimizer_state: true" in ended.output.splitlines()[-1]


def test_an_imported_model_gives_weights_alone(config, tmp_path):
    from olmo_ext.base.errors import InputError
    from olmo_ext.training.checkpoint import CheckpointStore, Snapshot
    from olmo_ext.training.distributed import Ranks
    from olmo_ext.training.foreign import load_foreign
    from olmo_ext.training.restore import own_checkpoint

    store = CheckpointStore(tmp_path / "checkpoints")
    tensors = {"model.safetensors": {"w": torch.ones(2)}, "optimizer.safetensors": {}}
    store.write(Snapshot(step=0, tensors=tensors, texts={"train_state.json": '{"format": 1, "step": 0}'}))
    text, one = config(), Ranks(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    with pytest.raises(InputError, match="weights only; another run with load_path"):
        own_checkpoint(store, {}, one)
    for optimizer, position in ((True, False), (False, True), (False, False)):
        load = {"model": text.model, "shape": text.shape, "with_optimizer": optimizer}
        if optimizer or position:
            with pytest.raises(InputError, match="weights only; reset_optimizer_state"):
                load_foreign(str(store.folder(0)), **load, with_position=position)
        else:
            assert load_foreign(str(store.folder(0)), **load, with_position=position).weights.keys() == {"w"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"model.pt": [1.0]}, r"model\.pt: holds a list"),
        ({"model.pt": {"w": 5}}, r"model\.pt: w is no tensor"),
        ({"model.pt": b"torn"}, r"model\.pt: cannot be read as plain tensors"),
        ({"model.pt": {}}, r"optim\.pt: no such file"),
        ({"model.pt": {}, "optim.pt": {}}, r"optim\.pt: no optimizer's state"),
        ({"model.pt": {}, "optim.pt": {"param_groups": [], "state": {"w": 5}}}, r"optim\.pt: no optimizer's state"),
        ({"model.pt": {}, "optim.pt": {"param_groups": [], "state": {3: {}}}}, r"optim\.pt: no name for parameter 3"),
        ({"config.json": b"{"}, r"config\.json: not JSON"),
        ({"config.json": b"[]"}, r"config\.json: holds no object"),
    ],
)
def test_a_foreign_checkpoint_of_any_content_is_one_line(config, tmp_path, files, said):
    from olmo_ext.base.errors import InputError
    from olmo_ext.training.foreign import load_foreign

    for name, content in files.items():
        (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else torch.save(content, tmp_path / name)
    text = config()
    load = {"model": text.model, "shape": text.shape, "with_position": False}
    with pytest.raises(InputError, match=said):
        load_foreign(str(tmp_path), **load, with_optimizer="model.pt" in files)


@pytest.mark.once
def test_block_groups_and_strategy_may_change_on_restart(forked, on_ranks, config, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    overrides = ("max_duration=6",)
    assert forked(lambda: train(config(*overrides), run_directory=straight)).code == 0

    def half():
        at_step(3, lambda session: session.stop.request("test"))
        return train(config(*overrides), run_directory=run)

    assert forked(half).code == 75
    grouped = config(
        *overrides, "model.block_group_size=2", "distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block_group"
    )
    ended = on_ranks(2, lambda rank: train(grouped, run_directory=run))
    assert [end.code for end in ended] == [0, 0], ended
    found = load_file(run / "checkpoints/step6/model.safetensors")
    for name, tensor in load_file(straight / "checkpoints/step6/model.safetensors").items():
        name = name.replace("blocks.", "block_groups.0.")
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_hugging_face_folder_gives_the_weights_and_another_meaning_of_them_is_refused(forked, config, tmp_path):
    """An OLMo-2 model as transformers writes it, continued; the first loss is transformers' own."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    folder = tmp_path / "olmo2"
    torch.manual_seed(0)
    hugging_face = Olmo2ForCausalLM(
        Olmo2Config(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=128,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            pad_token_id=1,
            eos_token_id=0,
            bos_token_id=None,
            max_position_embeddings=16,
            initializer_range=0.5,
            rope_theta=10000.0,
        )
    ).eval()
    hugging_face.save_pretrained(folder)
    olmo2 = (
        "model.norm_after=true",
        "model.attention_layer_norm=true",
        "model.layer_norm_with_affine=true",
        "model.layer_norm_eps=1e-6",
        "model.attention_layer_norm_with_affine=true",
        "model.bias_for_layer_norm=false",
    )
    reset = (f"load_path={folder}", "reset_optimizer_state=true", "reset_trainer_state=true", "stop_after=1")
    run = tmp_path / "run"
    ended = forked(lambda: train(config(*olmo2, *reset), run_directory=run))
    assert ended.code == 0, ended.output
    first = next(row for row in RunDirectory(run).read_metrics() if row.kind == "train")
    from olmo_ext.data.loader import build_train_loader

    batch = next(iter(build_train_loader(config(), rank=0, world_size=1, work_dir=tmp_path)))
    with torch.no_grad():
        expected = hugging_face(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.item()
    assert first.values["train/CrossEntropyLoss"] == pytest.approx(expected * 15 / 16, rel=1e-5)
    for wrong, named in (("model.rope_theta=500000", "rope_theta"), ("model.norm_after=false", "norm_after")):
        ended = forked(lambda wrong=wrong: train(config(*olmo2, *reset, wrong), run_directory=tmp_path / wrong))
        assert ended.code == 2 and named in ended.output.splitlines()[-1], ended.output
