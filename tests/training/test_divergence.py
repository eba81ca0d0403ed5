"""A diverged step is not applied, not saved, named with its samples, and not started again."""

from __future__ import annotations

import re

import pytest

from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.training.train import train

NAN = float("nan")


def poison(step: int, *, rank: int) -> None:
    """Put a NaN into a weight of one rank before a step."""
    import torch

    from olmo_ext.training.session import Session

    original = Session.record_samples

    def record(self: Session, at: int, indices: list[int]) -> None:
        if at == step and self.ranks.rank == rank:
            with torch.no_grad():
                next(iter(self.trainer.model.parameters())).view(-1)[:].fill_(float("nan"))
        original(self, at, indices)

    Session.record_samples = record  # type: ignore[method-assign]


@pytest.mark.parametrize("number", [1, 2])
def test_nan_in_a_weight_stops_all_ranks_before_the_update_and_saves_nothing_of_it(
    forked, on_ranks, config, tmp_path, sample_ids, metric_rows, number
):
    run = tmp_path / "run"
    text = config("save_interval=1", "max_duration=8")

    def child(rank: int = 0):
        poison(4, rank=number - 1)
        return train(text, run_directory=run)

    ended = on_ranks(2, child, seconds=60) if number == 2 else [forked(child)]
    assert [end.code for end in ended] == [1] * number, ended
    state = RunDirectory(run).read_state()
    assert (state.status, state.step) == ("failed", 3)
    assert "step 4" in state.reason and "nan" in state.reason and "not applied" in state.reason
    # The rank's own samples, a few of them, and where the others stand.
    read, few, more = sample_ids(run)[4], 4, {1: " and 4 more", 2: ""}[number]
    named, rest = re.fullmatch(r".*; samples ([\d, ]+\d)(.*)", state.reason).groups()
    assert len(read) == 8 and len(set(named.split(", ")) & set(map(str, read))) == few, state.reason
    recorded = ", all in logs/attempt1-rank*.samples.tsv.gz" if more else ""
    assert rest == f"{more}{recorded}; a lower optimizer.learning_rate or a longer scheduler.t_warmup may help"
    assert not recorded or list(run.glob(recorded.removeprefix(", all in ")))
    assert sorted(path.name for path in (run / "checkpoints").glob("step*")) == ["step1", "step2", "step3"]
    assert max(row["step"] for row in metric_rows(run)) == 3


def test_a_learning_rate_of_1000_stops_with_the_reason(forked, config, tmp_path):
    """Upstream's perplexity overflows first, after the update."""
    run = tmp_path / "run"
    text = config("optimizer.learning_rate=1e3", "max_duration=100ep", "save_interval=1", "max_grad_norm=null")
    ended = forked(lambda: train(text, run_directory=run))
    state = RunDirectory(run).read_state()
    assert ended.code == 1 and state.status == "failed" and "not applied" in state.reason, ended.output
    assert int(re.search(r"step (\d+)", state.reason)[1]) == state.step + 1
    assert re.search("not finite|above the limit of 700", state.reason), state.reason


@pytest.mark.parametrize(
    ("ranks", "norm", "said"),
    [
        ([([1, 2], 4e8, 4e8)], 2e9, "loss 4e+08, above the limit of 700 (its perplexity overflows), and gradient norm"),
        ([([1], 2.0, 2.0), ([5], 800.0, 790.0)], 3.0, "loss 790 on 1 of 2 ranks, above the limit of 700"),
        ([([1], 2.0, 2.0), ([5], NAN, NAN)], NAN, "loss nan on 1 of 2 ranks, not finite, and gradient norm nan before"),
        ([([1], 2.0, 2.0)], float("inf"), "gradient norm inf, not finite, and loss 2 before"),
        ([(range(9), NAN, NAN)], NAN, "samples 0, 1, 2, 3 and 5 more, save_data_indices: true records all; a lower"),
    ],
)
def test_the_reason_names_the_limit_that_was_passed_and_what_to_try(ranks, norm, said):
    from olmo_ext.upstream.divergence import divergence

    text = divergence(2, ranks, norm, None)
    assert text.startswith("step 2: ") and said in text and text.endswith("scheduler.t_warmup may help"), text
    # Samples of ranks whose loss is fine are not to blame.
    assert len(ranks) == 1 or "samples 5;" in text


@pytest.mark.once
@pytest.mark.parametrize("warm_up", [(), ("scheduler.units=tokens", "scheduler.t_warmup=256")], ids=["steps", "tokens"])
def test_early_stopping_saves_and_is_not_requeued(forked, config, tmp_path, warm_up):
    run = tmp_path / "run"
    text = config("early_stopping_factor=0.5", "max_duration=9", *warm_up)
    ended = forked(lambda: train(text, run_directory=run))
    state = RunDirectory(run).read_state()
    assert ended.code == 1 and state.status == "failed" and "early_stopping_factor 0.5" in state.reason, ended.output
    assert (run / f"checkpoints/step{state.step}/complete.json").is_file() and state.step > 2
