"""Perplexity: the plain definition, whatever the batch and the number of ranks, nothing left out in silence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.evals.perplexity import (
    PerplexityResult,
    bytes_per_token,
    evaluate_token_set,
    open_token_set,
    perplexity,
)
from olmo_ext.evals.target import EvaluatedModel
from olmo_ext.evals.token_sets import TokenSet

VOCABULARY = 50


class Rows:
    """Instances in memory."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> np.ndarray:
        return self.rows[index]


def small_model(seed: int = 0) -> EvaluatedModel:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, VOCABULARY)
    )
    return EvaluatedModel(module, max_sequence_length=12)


def some_rows() -> Rows:
    return Rows(np.random.default_rng(0).integers(0, VOCABULARY, size=(21, 12)).astype(np.uint16))


def plain_cross_entropy(model: EvaluatedModel, rows: Rows) -> float:
    """Nats per predicted token, one instance and one token at a time, in numpy."""
    total, count = 0.0, 0
    for row in rows.rows:
        logits = model.logits(torch.from_numpy(row.astype(np.int64))[None])[0].double().numpy()
        for position in range(len(row) - 1):
            scores = logits[position]
            total += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[row[position + 1]]
            count += 1
    return total / count


@pytest.mark.parametrize("batch_size", [1, 4, 8, 21, 64])
def test_the_last_short_batch_counts_and_the_batch_does_not_matter(batch_size: int) -> None:
    model, rows = small_model(), some_rows()
    found = perplexity(model, rows, batch_size=batch_size)
    assert found.instances == 21 and found.tokens == 21 * 11
    assert found.cross_entropy == pytest.approx(plain_cross_entropy(model, rows), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.cross_entropy))


def _score_on_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    found = perplexity(small_model(), some_rows(), batch_size=4)
    Path(folder, f"rank{rank}.json").write_text(json.dumps([found.losses, found.predicted, found.cross_entropy]))
    torch.distributed.destroy_process_group()


def test_21_items_on_two_ranks_give_the_number_of_one(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    workers = [context.Process(target=_score_on_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    alone = perplexity(small_model(), some_rows(), batch_size=4)
    for rank in range(2):
        losses, predicted, cross_entropy = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(losses) == 21 and predicted == list(alone.predicted)
        assert cross_entropy == pytest.approx(alone.cross_entropy, rel=1e-7)
        np.testing.assert_allclose(losses, alone.losses, rtol=1e-6)


def test_olmos_evaluator_gives_the_same_cross_entropy(model: Any, olmo: Any, tokenizer: Any, tmp_path: Path) -> None:
    from olmo.config import EvaluatorType
    from olmo.eval import Evaluator
    from torchmetrics import MeanMetric

    rows = np.random.default_rng(1).integers(2, tokenizer.vocab_size, size=(7, 32)).astype(np.uint16)
    rows.tofile(tmp_path / "set.bin")
    token_set = TokenSet(name="set", paths=(str(tmp_path / "set.bin"),), dtype="uint16")
    found = {r.metric: r for r in evaluate_token_set(model, tokenizer, token_set, sequence_length=32, batch_size=3)}
    reference = Evaluator(label="set", type=EvaluatorType.lm, eval_loader=None, eval_metric=MeanMetric())  # type: ignore[arg-type]
    ids = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        logits = olmo(ids).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1)
    reference.update_metrics({"metadata": [{}] * 7}, losses, logits)
    expected = reference.compute_metrics()
    assert found["CrossEntropyLoss"].value == pytest.approx(expected["eval/set/CrossEntropyLoss"], rel=1e-6)
    assert found["Perplexity"].value == pytest.approx(expected["eval/set/Perplexity"], rel=1e-5)


def test_bits_per_byte_is_of_the_text_that_the_tokens_stand_for(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    text = "The 3th river of the valley is 21 miles long — ünïcode.\n" * 8
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    np.asarray(ids, dtype=np.uint16).tofile(tmp_path / "set.bin")
    lengths = bytes_per_token(tokenizer)
    assert lengths is not None and lengths[ids].sum() == len(text.encode()) and lengths[tokenizer.eos_token_id] == 0
    token_set = TokenSet(name="set", paths=(str(tmp_path / "set.bin"),), dtype="uint16")
    found = {r.metric: r for r in evaluate_token_set(model, tokenizer, token_set, sequence_length=len(ids))}
    predicted = len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
    nats = found["CrossEntropyLoss"].value * (len(ids) - 1)
    assert found["BitsPerByte"].value == pytest.approx(nats / math.log(2) / predicted)
    assert found["BitsPerByte"].details["bytes"] == predicted


def test_tokens_that_fill_no_instance_are_counted_and_a_limit_shows_in_the_version(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    np.arange(2, 107, dtype=np.uint16).tofile(tmp_path / "set.bin")
    token_set = TokenSet(name="set", paths=(str(tmp_path / "set.bin"),), dtype="uint16")
    whole = evaluate_token_set(model, tokenizer, token_set, sequence_length=20)[0]
    part = evaluate_token_set(model, tokenizer, token_set, sequence_length=20, limit=2)[0]
    assert (whole.items, whole.details["tokens_left_out"], part.items) == (5, 5, 2)
    assert part.task_version == f"{whole.task_version}/first2"
    assert len(whole.details["document_losses"]) == 5


def test_the_standard_error_is_that_of_clusters() -> None:
    rows = some_rows()
    found = perplexity(small_model(), rows)
    losses = np.asarray(found.losses) / 11
    assert found.stderr == pytest.approx(losses.std(ddof=1) / math.sqrt(21), rel=1e-9)


def test_errors_of_ratios_are_those_of_a_bootstrap_over_instances() -> None:
    """Instances of other lengths and other bytes per token: neither error is that of a plain mean."""
    rng = np.random.default_rng(0)
    predicted = rng.integers(5, 60, size=300)
    size = predicted * rng.integers(1, 7, size=300)
    losses = size * rng.gamma(4, 0.5, size=300)
    found = PerplexityResult(losses=tuple(losses), predicted=tuple(predicted), bytes=tuple(size))
    drawn = rng.integers(0, 300, size=(4000, 300))
    per_token = losses[drawn].sum(axis=1) / predicted[drawn].sum(axis=1)
    per_byte = losses[drawn].sum(axis=1) / size[drawn].sum(axis=1) / math.log(2)
    assert found.stderr == pytest.approx(per_token.std(), rel=0.06)
    assert found.bits_per_byte_stderr == pytest.approx(per_byte.std(), rel=0.06)
    assert found.bits_per_byte is not None and found.stderr is not None
    # That the bytes per token differ is seen: scaling the error of the cross-entropy would not be enough.
    assert abs(found.stderr * found.bits_per_byte / found.cross_entropy / per_byte.std() - 1) > 0.25


def test_a_loss_that_has_no_perplexity_is_told() -> None:
    found = PerplexityResult(losses=(9000.0,), predicted=(11,), bytes=None)
    with pytest.raises(WorkError, match="818.2 nats has no perplexity"):
        _ = found.perplexity


def test_the_version_changes_with_every_file(tmp_path: Path) -> None:
    def version(last: int) -> str:
        paths = []
        for number in range(6):
            paths.append(str(tmp_path / f"{number}.bin"))
            np.full(64, last if number == 5 else number, dtype=np.uint16).tofile(paths[-1])
        token_set = TokenSet(name="set", paths=tuple(paths), dtype="uint16")
        return open_token_set(token_set, sequence_length=32, vocab_size=VOCABULARY)[1]

    assert version(6) != version(7)


def test_a_loss_that_is_not_finite_names_the_instance() -> None:
    model = small_model()
    with torch.no_grad():
        model.module[0].weight[3] = torch.nan
    rows = some_rows()
    rows.rows[:] = 1
    rows.rows[5, 2] = 3
    with pytest.raises(WorkError, match="wiki, instance 5: the loss is nan"):
        perplexity(model, rows, name="wiki")


def test_tokens_of_another_width_are_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    np.full(4000, 7, dtype=np.uint32).tofile(tmp_path / "set.bin")
    token_set = TokenSet(name="set", paths=(str(tmp_path / "set.bin"),), dtype="uint16")
    with pytest.raises(InputError, match="uint32"):
        evaluate_token_set(model, tokenizer, token_set)
