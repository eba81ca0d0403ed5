"""Needle in a haystack: RULER's prompts, exact lengths and depths; a copying model finds all, a broken one none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from olmo_ext.base.errors import InputError
from olmo_ext.evals import needle
from olmo_ext.evals.generation import generate
from olmo_ext.evals.heat_map import write_heat_map
from olmo_ext.evals.needle import (
    ADJECTIVES,
    NOUNS,
    TASKS,
    evaluate_needles,
    make_sample,
    match_share,
    sentence,
    sentences_of,
)
from olmo_ext.evals.target import EvaluatedModel

ESSAY = sentences_of(
    "The valley is wide. It has a mill! Who knows the river? The bridge is old. Rain fell for days.\n" * 9
)
LENGTHS = (900, 1500)


class CopyingModel:
    """Reads the question, finds the needles and spells their values, one token at a time, as logits."""

    def __init__(self, tokenizer: Any, *, broken: bool = False) -> None:
        self.tokenizer, self.broken = tokenizer, broken

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        text = self.tokenizer.decode(ids[0].tolist())
        prompt, mark, said = text.rpartition(" mentioned in the provided text is")
        if not mark:
            prompt, mark, said = text.rpartition(" mentioned in the provided text are")
        queries = re.split(r", and |, | and ", re.findall(r"the special magic \w+ for (.*?) mentioned", text)[-1])
        values = [
            value for query in queries for value in re.findall(rf"magic \w+ for {re.escape(query)} is: (\S+)\.", prompt)
        ]
        answer = " " + ", ".join(values) + "."
        wanted = self.tokenizer.encode(answer)
        done = len(self.tokenizer.encode(said)) if said else 0
        token = wanted[done] if done < len(wanted) else self.tokenizer.eos_token_id
        logits = torch.zeros(1, ids.shape[1], self.tokenizer.vocab_size)
        logits[0, -1, 5 if self.broken else token] = 1.0
        return logits


def score(name: str, tokenizer: Any, *, broken: bool) -> list[Any]:
    model = EvaluatedModel(CopyingModel(tokenizer, broken=broken), max_sequence_length=2000)

    def answer(prompt: str, allowance: int) -> str:
        ids = generate(model, tokenizer.encode(prompt), max_tokens=allowance, stop_token_ids=(tokenizer.eos_token_id,))
        return tokenizer.decode(ids)

    return evaluate_needles(answer, tokenizer, name, lengths=LENGTHS, depths=(0.0, 1.0), samples=1, essay=ESSAY)


@pytest.mark.parametrize("name", list(TASKS))
def test_a_copying_model_finds_every_needle_and_a_broken_one_none(name: str, tokenizer: Any) -> None:
    good, bad = score(name, tokenizer, broken=False), score(name, tokenizer, broken=True)
    assert [result.value for result in good] == [1.0] * 5
    assert max(result.value for result in bad) < 0.05
    assert [(result.length, result.depth) for result in good] == [
        *((length, depth) for length in LENGTHS for depth in (0.0, 1.0)),
        (None, None),
    ]
    assert good[-1].items == 4


def test_names_and_parameters_are_rulers() -> None:
    assert sorted(TASKS) == [
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multiquery",
        "niah_multivalue",
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
    ]
    assert [TASKS[f"niah_single_{n}"].haystack for n in (1, 2, 3)] == ["noise", "essay", "essay"]
    assert TASKS["niah_single_3"].value == "uuids" and TASKS["niah_multikey_3"].key == "uuids"


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("length", [700, 1100])
def test_a_sample_fills_its_length_and_holds_every_answer_once(name: str, length: int, tokenizer: Any) -> None:
    task = TASKS[name]
    sample, allowance = make_sample(task, length=length, depth=0.5, seed=3, tokenizer=tokenizer, essay=ESSAY)
    assert sample.tokens == len(tokenizer.encode(sample.prompt)) <= length - allowance
    unit = max(len(tokenizer.encode(text)) for text in (*ESSAY, sentence(task.value, "some-thing", sample.answers[0])))
    assert sample.tokens > length - allowance - 4 * unit
    assert len(set(sample.answers)) == len(sample.answers) == max(task.num_queries, task.num_values)
    assert all(sample.prompt.count(answer) == 1 for answer in sample.answers)
    again, _ = make_sample(task, length=length, depth=0.5, seed=3, tokenizer=tokenizer, essay=ESSAY)
    other, _ = make_sample(task, length=length, depth=0.5, seed=4, tokenizer=tokenizer, essay=ESSAY)
    assert again == sample and other.answers != sample.answers


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_lies_at_the_depth_that_was_asked_for(depth: float, tokenizer: Any) -> None:
    sample, _ = make_sample(TASKS["niah_single_2"], length=2000, depth=depth, seed=0, tokenizer=tokenizer, essay=ESSAY)
    start, end = sample.prompt.index("\n"), sample.prompt.rindex("\nWhat is")
    place = sample.prompt.index("One of the special magic") - start
    assert place / (end - start) == pytest.approx(depth, abs=0.06)


def test_what_does_not_fit_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="niah_single_3 needs .* tokens with this tokenizer, 100 were asked for"):
        make_sample(TASKS["niah_single_3"], length=100, depth=0, seed=0, tokenizer=tokenizer, essay=ESSAY)
    with pytest.raises(InputError, match="there is none"):
        make_sample(TASKS["niah_single_2"], length=1000, depth=0, seed=0, tokenizer=tokenizer)


def test_a_length_is_filled_up_to_the_last_distractor(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two powers of two the search must not ask for more distractors than there are."""
    monkeypatch.setattr(needle, "ADJECTIVES", ADJECTIVES[:7])
    monkeypatch.setattr(needle, "NOUNS", NOUNS[:5])
    arguments: dict[str, Any] = {"depth": 0.5, "seed": 0, "tokenizer": tokenizer}
    full, allowance = make_sample(TASKS["niah_multikey_2"], length=1500, **arguments)
    found = full.prompt.count("One of the special magic")
    assert 17 < found < 35 and full.tokens > 1500 - allowance - 50
    with pytest.raises(InputError, match="all 34 distractors do not fill 4000 tokens"):
        make_sample(TASKS["niah_multikey_2"], length=4000, **arguments)


def test_other_depths_are_another_version(tokenizer: Any) -> None:
    def version(*depths: float) -> str:
        cells = evaluate_needles(
            lambda prompt, allowance: "", tokenizer, "niah_single_1", lengths=(400,), depths=depths, samples=1
        )
        return cells[-1].task_version

    assert len({version(0, 1), version(0.25, 0.75), version(0, 0.5, 1)}) == 3


def test_string_match_is_the_share_of_answers_whatever_their_case() -> None:
    assert match_share("They are 12, and ABC.", ["12", "abc", "99", "x"]) == 0.5


def test_the_heat_map_stands_alone(tokenizer: Any, tmp_path: Any) -> None:
    found = score("niah_single_1", tokenizer, broken=False)
    write_heat_map([("one", found), ("other", found)], tmp_path / "h.html")
    page = (tmp_path / "h.html").read_text()
    assert "one: niah_single_1" in page and "other: niah_single_1" in page and '<script src="http' not in page
