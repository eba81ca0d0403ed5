"""What a config can switch on: activation checkpointing, compilation, profiles, tasks; and what a run leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.training.signals import StopRequest, TimeLimit
from olmo_ext.training.train import train

HOURGLASS = ("model.ffn.type=hourglass", "model.ffn.d_ff=8", "model.ffn.num_sub_mlps=3", "model.n_layers=4")
TAPER = ("model.ffn.taper.schedule=linear", "model.ffn.taper.start=1.5", "model.ffn.taper.end=0.5")


def test_checkpointing_and_compilation_change_no_number(forked, config, tmp_path, metric_rows):
    """Four layers of four widths with three sub-MLPs each; the eager backend stands in for a slow compiler."""
    shape = (*HOURGLASS, *TAPER, "model.ffn.taper.multiple_of=2", "max_duration=3", "eval_interval=2")
    plain = tmp_path / "plain"
    assert forked(lambda: train(config(*shape), run_directory=plain)).code == 0
    weights = load_file(plain / "checkpoints/step3/model.safetensors")
    for name, overrides in {
        "whole": ["activation_checkpointing=whole_layer"],
        "fine": ["activation_checkpointing=fine_grained"],
        "compiled": ["compile.backend=eager"],
        "both": ["compile.backend=eager", "activation_checkpointing=one_in_two"],
    }.items():
        run = tmp_path / name
        ended = forked(lambda run=run, o=overrides: train(config(*shape, *o), run_directory=run))
        assert ended.code == 0, ended.output
        if "compile" in overrides[0]:
            # Every width has its graph, and evaluations compile nothing.
            assert "compiled 4 graphs for 4 layers" in ended.output, ended.output
        found = load_file(run / "checkpoints/step3/model.safetensors")
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def test_sixteen_widths_are_all_compiled_and_none_again_after_an_evaluation(forked, config, tmp_path):
    widths = [2 * n for n in range(8, 24)]
    text = config(
        "model.n_layers=16",
        "model.ffn.d_ff=null",
        f"model.ffn.taper.widths={widths}",
        "compile.backend=eager",
        "eval_interval=2",
        "max_duration=5",
    )

    def count() -> int:
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]  # of tests that this worker ran before
        assert train(text, run_directory=tmp_path / "run") == 0
        print("graphs at the end:", counters["stats"]["unique_graphs"] - before)
        return 0

    ended = forked(count)
    assert ended.code == 0 and "compiled 16 graphs for 16 layers" in ended.output, ended.output
    assert "graphs at the end: 16" in ended.output


def test_a_profile_is_written_to_the_run_on_a_cpu_too(forked, config, tmp_path):
    for stop_after in ("6", "null"):
        text = config("torch_profiling=true", "max_duration=12", f"stop_after={stop_after}")
        assert forked(lambda text=text: train(text, run_directory=tmp_path / "run")).code == 0
    # Named for the run's step, so that a restart keeps the trace that is there.
    traces = sorted((tmp_path / "run/profiler").glob("*.chrome_trace.json.gz"))
    assert [trace.name.partition(".")[0] for trace in traces] == ["step11", "step5"]
    assert all(trace.stat().st_size > 1000 for trace in traces)
    assert "aten::" in next((tmp_path / "run/profiler").glob("*.txt")).read_text()


def test_a_run_leaves_everything_that_is_known_about_it(forked, config, tmp_path, tokens):
    run = tmp_path / "run"
    text = config("budget.total=12000", "budget.tolerance=0.5", "console_log_interval=2")
    assert forked(lambda: train(text, run_directory=run), WANDB_API_KEY="s3cret", HF_TOKEN="s3cret").code == 0
    for path in run.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path
    shape = json.loads((run / "shape.json").read_text())
    assert shape["layers"] == 2 * [
        {
            "ffn": {"type": "conventional", "d_ff": [24], "activation": "swiglu", "options": {}},
            "attention": {"type": "softmax", "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "options": {}},
        }
    ]
    assert shape["parameters"] == text.counts.parameters() and shape["budget"]["quantity"] == "total"
    provenance = json.loads((run / "provenance.json").read_text())
    assert {"code", "packages", "python", "host", "device", "world_size", "data", "command"} <= set(provenance)
    assert provenance["packages"]["ai2-olmo"] == "0.6.0" and provenance["data"]["instances"] == 96
    assert set(provenance["data"]["evaluation"]) == {"held-out"}
    from olmo_ext.config.run_config import load_run_config

    assert load_run_config(run / "config.yaml").plain() == text.plain()
    rows = RunDirectory(run).read_metrics()
    assert [(row.kind, row.step) for row in rows] == [("attempt", 0), ("train", 2), ("train", 4), ("eval", 4)]
    assert {"train/CrossEntropyLoss", "train/Perplexity", "optim/total_grad_norm", "optim/learning_rate"} < set(
        rows[1].values
    )
    assert not [name for name in rows[1].values if name.startswith("optim/grad")]
    assert set(rows[3].values) == {f"eval/held-out/{n}" for n in ("CrossEntropyLoss", "Perplexity", "tokens")}


def test_secrets_on_the_command_line_are_not_recorded(monkeypatch):
    from olmo_ext.training.provenance import command_line

    given = ["olmo-ext", "wandb.api_key=abc", "--hf_token=abc", "model.d_model=8", "--map=a=https://me:abc@host/b"]
    monkeypatch.setattr("sys.argv", given)
    assert command_line() == [
        "olmo-ext",
        "wandb.api_key=***",
        "--hf_token=***",
        "model.d_model=8",
        "--map=a=https://host/b",
    ]


def test_groups_of_validation_data_and_a_subset_are_the_same_on_two_ranks(
    forked, on_ranks, config, tmp_path, tokens, metric_rows
):
    def files(*names: str) -> list[str]:
        return [str(tokens / f"{name}.bin") for name in names]

    evaluators = [
        {
            "label": "mixed",
            "data": {"datasets": {"held": files("validation"), "seen": files("a", "b")}, "memmap_dtype": "uint16"},
            "device_eval_batch_size": 5,
        },
        {
            "label": "part",
            "data": {"paths": files("a"), "memmap_dtype": "uint16"},
            "subset_num_batches": 3,
            "device_eval_batch_size": 2,
        },
    ]
    text = config("max_duration=1", evaluators=evaluators)
    one, two = tmp_path / "one", tmp_path / "two"
    assert forked(lambda: train(text, run_directory=one)).code == 0
    assert [end.code for end in on_ranks(2, lambda rank: train(text, run_directory=two))] == [0, 0]
    first, second = (metric_rows(run, "eval")[0]["values"] for run in (one, two))
    assert first == pytest.approx(second, rel=1e-6)
    assert (first["eval/held/tokens"], first["eval/seen/tokens"], first["eval/part/tokens"]) == (315, 96 * 15, 6 * 15)
    # By hand, over all validation instances at once.
    import numpy as np

    from olmo_ext.training.load_model import load_model_from_run

    model, _ = load_model_from_run(one)
    ids = torch.from_numpy(np.fromfile(tokens / "validation.bin", dtype=np.uint16).astype(np.int64)).view(21, 16)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    by_hand = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
    assert first["eval/held/CrossEntropyLoss"] == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("subset", "of_all", "items"), [(None, -1, 21), (0, 5, 21), (None, 5, 10), (3, -1, 6), (None, 11, 21)]
)
def test_a_task_has_the_same_score_and_item_count_on_one_and_two_ranks(
    forked, on_ranks, config, tmp_path, metric_rows, monkeypatch, subset, of_all, items
):
    """21 items of two continuations each: upstream's sampler repeats one to fill two ranks, and cuts each rank's own
    batches for a subset."""
    from olmo.eval import downstream

    class Items:
        metric_type = "acc"

        def __init__(self, tokenizer, **options):
            random = torch.Generator().manual_seed(5)
            self.samples = [
                {
                    "doc_id": item // 2,
                    "cont_id": item % 2,
                    "label_id": item // 2 % 2,
                    "ctx_len": 6,
                    "cont_len": 3,
                    "input_ids": torch.randint(0, 64, (16,), generator=random),
                    "continuation": torch.randint(0, 64, (3,), generator=random),
                }
                for item in range(42)
            ]

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            return self.samples[index]

        def collate_fn(self, data):
            return {key: torch.stack([torch.as_tensor(sample[key]) for sample in data]) for key in self.samples[0]}

    from olmo.tokenizer import Tokenizer

    monkeypatch.setattr(Tokenizer, "from_train_config", lambda cfg: "no tokenizer is needed")
    monkeypatch.setitem(downstream.label_to_task_map, "twenty-one", Items)
    text = config(
        "max_duration=1",
        "device_eval_batch_size=4",
        f"eval_subset_num_batches={of_all}",
        evaluators=[{"label": "twenty-one", "type": "downstream", "subset_num_batches": subset}],
    )
    one, two = tmp_path / "one", tmp_path / "two"
    ended = forked(lambda: train(text, run_directory=one))
    assert ended.code == 0, ended.output
    ended = on_ranks(2, lambda rank: train(text, run_directory=two))
    assert [end.code for end in ended] == [0, 0], ended
    first, second = (metric_rows(run, "eval")[0]["values"] for run in (one, two))
    assert first == second
    assert first["eval/downstream/twenty-one_items"] == items
    assert 0 < first["eval/downstream/twenty-one_acc"] < 1


@pytest.mark.parametrize(
    "second",
    [
        {"label": "v", "data": {"paths": ["b.bin"]}},
        {"label": "w", "data": {"datasets": {"u": ["b.bin"], "v": ["b.bin"]}}},
        {"label": "copa", "type": "downstream"},
    ],
)
def test_two_evaluations_of_one_name_are_refused(config, second):
    from olmo_ext.training.evaluators import build_evaluators
    from olmo_ext.upstream.trainer import train_config

    evaluators = [{"label": "v", "data": {"paths": ["a.bin"]}}, {"label": "copa", "type": "downstream"}, second]
    cfg = train_config(config(evaluators=evaluators))
    with pytest.raises(InputError, match="two evaluations report as eval/(v|downstream/copa)"):
        build_evaluators(cfg, device=torch.device("cpu"), world_size=1, rank=0)


def test_a_timeout_without_workers_is_refused_for_an_evaluator_too(config):
    """torch asserts on it when the evaluation begins."""
    files = {"paths": ["v.bin"], "memmap_dtype": "uint16", "timeout": 5}
    with pytest.raises(InputError, match=r"evaluators\.0\.data\.timeout: there is no worker.*num_workers above 0"):
        config(evaluators=[{"label": "v", "data": files}])


def test_unusable_tasks_and_tokenizers_are_one_line(forked, config, tmp_path):
    for label, tokenizer, said in (
        ("hellaswagg", "x", "did you mean 'hellaswag"),
        ("copa", "tokenizers/allenai_dolma2.json", "the model's 64 ids"),
        ("copa", "nobody/has-this", "tokenizer 'nobody/has-this' cannot be used"),
    ):
        text = config(f"tokenizer.identifier={tokenizer}", evaluators=[{"label": label, "type": "downstream"}])
        ended = forked(lambda text=text: train(text, run_directory=tmp_path / "run"), seconds=30)
        assert ended.code == 2 and said in ended.output.splitlines()[-1], ended.output


def test_a_perplexity_evaluator_needs_no_tokenizer_and_no_network(forked, config, tmp_path):
    text = config("tokenizer.identifier=nobody/has-this")
    assert forked(lambda: train(text, run_directory=tmp_path / "run")).code == 0


def test_unusable_validation_data_is_named_before_the_first_step(forked, config, tmp_path):
    short = tmp_path / "short.bin"
    short.write_bytes(b"\0" * 20)
    for path in (short, tmp_path / "missing.bin"):
        evaluators = [{"label": "v", "data": {"paths": [str(path)], "memmap_dtype": "uint16"}}]
        run = tmp_path / path.stem
        ended = forked(lambda run=run, e=evaluators: train(config(evaluators=e), run_directory=run))
        assert ended.code == 2 and path.name in ended.output.splitlines()[-1], ended.output


@pytest.mark.once
def test_lionw_restarts_as_it_would_have_gone_on(forked, config, tmp_path, same_checkpoint):
    straight, run = tmp_path / "straight", tmp_path / "run"
    overrides = ("optimizer.name=lionw", "optimizer.metrics_log_interval=2", "optimizer.record_update_metrics=true")

    def half():
        from olmo_ext.training.session import Session

        original = Session.stop_requested

        def stop(self: Session, step: int):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, step)

        Session.stop_requested = stop  # type: ignore[method-assign]
        return train(config(*overrides), run_directory=run)

    assert forked(lambda: train(config(*overrides), run_directory=straight)).code == 0
    assert forked(half).code == 75
    assert forked(lambda: train(config(*overrides), run_directory=run)).code == 0
    same_checkpoint(straight / "checkpoints/step4", run / "checkpoints/step4")
    # One moment: a disk with room for it must not be refused for AdamW's two.
    from olmo_ext.training.checkpoint import estimated_bytes

    text, tensors = config(*overrides), [load_file(path) for path in (run / "checkpoints/step4").glob("[mo]*tensors")]
    saved = sum(tensor.numel() * tensor.element_size() for own in tensors for tensor in own.values())
    assert len(tensors) == 2 and saved == estimated_bytes(text, text.shape)


def test_parameter_metrics_are_written_at_their_interval(forked, config, tmp_path, metric_rows):
    text = config("optimizer.metrics_log_interval=2")
    assert forked(lambda: train(text, run_directory=tmp_path / "run")).code == 0
    names = [
        {n for n in row["values"] if n.startswith("optim/param")} for row in metric_rows(tmp_path / "run", "train")
    ]
    assert [bool(own) for own in names] == [False, True, False, True]


@pytest.mark.once
def test_each_stop_signal_is_a_request_and_the_handlers_are_given_back():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        before = signal.getsignal(number)
        with StopRequest() as stop:
            assert not stop.is_set
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            assert stop.reason == f"signal {signal.Signals(number).name}"
            stop.request("later")
            assert stop.reason == f"signal {signal.Signals(number).name}"
        assert signal.getsignal(number) is before


@pytest.mark.once
def test_two_interrupts_at_once_are_one():
    """torchrun passes on the Ctrl-C that the terminal has sent to every process already."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stop.is_set


@pytest.fixture
def clocks(monkeypatch):
    """The two clocks, to be set: `wall` can go back, `monotonic` cannot."""
    now = {"wall": 1e9, "monotonic": 1000.0}
    monkeypatch.setattr(time, "time", lambda: now["wall"])
    monkeypatch.setattr(time, "monotonic", lambda: now["monotonic"])
    return now


def test_the_time_limit_leaves_room_for_one_more_step_and_the_save(clocks):
    limit = TimeLimit(seconds=1000.0)
    assert not limit.is_reached(save_seconds=100.0, step_seconds=10.0)
    clocks["monotonic"] += 1000 - TimeLimit.SAVE_FACTOR * 100 - 10 - TimeLimit.MARGIN_SECONDS - 1
    assert not limit.is_reached(save_seconds=100.0, step_seconds=10.0)
    clocks["monotonic"] += 2
    assert limit.is_reached(save_seconds=100.0, step_seconds=10.0)
    assert not TimeLimit(seconds=None).is_reached(save_seconds=1e9, step_seconds=1e9)


def test_a_clock_that_is_set_moves_the_schedulers_end_and_no_limit_in_seconds(clocks):
    limit, scheduler = TimeLimit(seconds=1000.0), TimeLimit(seconds=None, end_time=clocks["wall"] + 1000)
    both = TimeLimit(seconds=5000.0, end_time=clocks["wall"] + 1000)
    clocks["wall"] += 2000
    reached = [t.is_reached(save_seconds=1.0, step_seconds=1.0) for t in (limit, scheduler, both)]
    assert reached == [False, True, True]
    clocks["wall"] -= 1_000_000
    clocks["monotonic"] += 2000
    reached = [t.is_reached(save_seconds=1.0, step_seconds=1.0) for t in (limit, scheduler, both)]
    assert reached == [True, False, False]


def test_the_schedulers_end_time_is_known(monkeypatch):
    from olmo_ext.training.signals import scheduler_end_time

    assert scheduler_end_time() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1790000000")
    assert scheduler_end_time() == 1790000000.0


def test_a_run_whose_checkpoints_cannot_fit_is_refused_at_the_start(config, tmp_path, monkeypatch, forked):
    import shutil

    def refused() -> int:
        usage = shutil._ntuple_diskusage  # type: ignore[attr-defined]
        shutil.disk_usage = lambda path: usage(10**6, 0, 10**4)  # type: ignore[assignment]
        return train(config(), run_directory=tmp_path / "run")

    ended = forked(refused)
    assert ended.code == 2 and "free" in ended.output
    assert not Path(tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("beyond", ["epoch=3e9", "fast_forward_batches=1e13"])
def test_a_run_that_never_reaches_its_end_is_not_called_done(forked, config, tmp_path, beyond):
    ended = forked(lambda: train(config(beyond), run_directory=tmp_path / "run"))
    state = RunDirectory(tmp_path / "run").read_state()
    assert ended.code == 1 and state.status == "failed" and "step 0 of 4" in state.reason, ended.output


def test_what_olmo_refuses_while_it_builds_is_one_line(forked, config, tmp_path):
    ended = forked(lambda: train(config("compile.backend=nothing"), run_directory=tmp_path / "run"))
    assert ended.code == 2 and "OLMo refuses this config" in ended.output, ended.output
    assert RunDirectory(tmp_path / "run").read_state().status == "failed"


def test_a_fused_loss_without_its_package_is_refused_before_there_is_a_folder(config, tmp_path):
    with pytest.raises(InputError, match="fused_loss: the flash-attn package is not installed; .*loss: chunked"):
        train(config("fused_loss=true"), run_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_environment_set_up_by_halves_is_refused(monkeypatch):
    from olmo_ext.training.train import check_environment

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="RANK"):
        check_environment()


def test_keys_that_mean_nothing_here_are_said_and_a_dry_run_is_refused(forked, config, tmp_path):
    from olmo_ext.training.unused import UNUSED, unused_keys

    assert unused_keys(config()) == []
    found = unused_keys(config("save_folder=/x", "sharded_checkpointer=local", "save_overwrite=true"))
    assert [text.split()[0] for text in found] == ["save_folder", "save_overwrite", "sharded_checkpointer"]
    assert set(UNUSED) <= set(config().plain())
    with pytest.raises(InputError, match="plan"):
        unused_keys(config("dry_run=true"))
    ended = forked(lambda: train(config("remote_save_folder=s3://x", "max_duration=1"), run_directory=tmp_path / "run"))
    assert ended.code == 0 and "note: remote_save_folder is not used" in ended.output


@pytest.mark.once
def test_loader_workers_leave_a_terminals_interrupt_to_the_run(forked, config, tmp_path, same_checkpoint):
    """Ctrl-C reaches every process of the terminal's group, workers too; two of them read what one process reads."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    text = config("data.num_workers=2", "data.prefetch_factor=2", "max_duration=8")

    def interrupted():
        from olmo_ext.training.session import Session

        os.setpgid(0, 0)
        original = Session.wants_metrics

        def wants(self: Session, step: int) -> bool:
            if step == 3:
                os.killpg(0, signal.SIGINT)
            return original(self, step)

        Session.wants_metrics = wants  # type: ignore[method-assign]
        return train(text, run_directory=run)

    assert forked(lambda: train(config("max_duration=8"), run_directory=straight)).code == 0
    ended = forked(interrupted)
    assert ended.code == 75 and ended.output.count("SIGINT: saving a checkpoint") == 1, ended.output
    assert forked(lambda: train(text, run_directory=run)).code == 0
    same_checkpoint(straight / "checkpoints/step8", run / "checkpoints/step8")


def test_a_progress_bar_on_a_terminal(heavy, config, tmp_path):
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        signal.alarm(0)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        try:
            os._exit(train(config("max_duration=3"), run_directory=tmp_path / "run"))
        finally:
            os._exit(1)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode(errors="replace")
    text = shown.decode(errors="replace")
    assert "3/3" in text and "training" not in text.splitlines()[-1] and "held-out/CrossEntropyLoss" in text
