"""Needle in a haystack as RULER defines it (arXiv 2404.06654): eight tasks, any length, seeded. No torch.

A needle is a sentence that gives a key a value; a question about a key stands at the end, and the answer is scored
by whether the values appear in it. RULER draws every depth at random; here the first queried needle lies at a given
depth, so that a grid of length by depth can be filled, and the others are drawn.
"""

from __future__ import annotations

import hashlib
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from olmo_ext.base.errors import InputError
from olmo_ext.data.tokenizer import Tokenizer
from olmo_ext.evals.results import Result, mean_and_error

SCORING_VERSION = 1
TOKENS_TO_GENERATE = 128
"""RULER's allowance for the answer; shorter texts get less, see `answer_allowance`."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ADJECTIVES = (
    "amber ancient bitter bold brave brisk calm candid clever cosmic crimson curious dapper distant eager early"
    " electric fabled faint fierce foggy fragile frozen gentle gilded golden graceful hidden hollow humble icy"
    " jolly keen lively lonely lucid mellow mighty misty narrow nimble noble odd patient placid polite proud quaint"
    " quiet rapid restless rustic sacred scarlet silent silver simple sleepy solemn spare steady stormy sturdy subtle"
    " sunny swift tender tidy timid tranquil vivid wary wild wise witty young zealous"
).split()
NOUNS = (
    "acorn anchor anvil apron arrow badge barrel basket beacon bell bicycle blanket bottle branch bridge bucket"
    " cabin camera candle canyon castle chimney circle cliff cloud compass copper corner cottage cradle crystal desert"
    " dragon drum eagle engine feather fence fiddle forest fountain garden glacier goblet hammer harbor helmet"
    " island jacket kettle ladder lantern lemon library marble meadow mirror mountain needle ocean orchard paddle"
    " parade pebble pencil piano pillow planet pocket pumpkin quarry ribbon river saddle shadow shelter shovel spoon"
    " summer temple thunder ticket timber tunnel turtle valley velvet village violin wagon walnut window winter"
).split()


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """One of RULER's tasks."""

    name: str
    haystack: str
    """`noise` (one sentence repeated), `essay` (running text) or `needle` (other needles)."""

    key: str = "words"
    value: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    """Values per key."""

    num_queries: int = 1


TASKS = {
    task.name: task
    for task in (
        NeedleTask(name="niah_single_1", haystack="noise"),
        NeedleTask(name="niah_single_2", haystack="essay"),
        NeedleTask(name="niah_single_3", haystack="essay", value="uuids"),
        NeedleTask(name="niah_multikey_1", haystack="essay", num_keys=4),
        NeedleTask(name="niah_multikey_2", haystack="needle"),
        NeedleTask(name="niah_multikey_3", haystack="needle", key="uuids", value="uuids"),
        NeedleTask(name="niah_multivalue", haystack="essay", num_values=4),
        NeedleTask(name="niah_multiquery", haystack="essay", num_keys=4, num_queries=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class NeedleSample:
    prompt: str
    answers: tuple[str, ...]
    depth: float
    """Share of the text before the first queried needle, as asked for."""

    tokens: int
    """Of the prompt."""


def _draw(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _draw_distinct(kind: str, number: int, rng: random.Random, taken: set[str]) -> list[str]:
    drawn: list[str] = []
    while len(drawn) < number:
        value = _draw(kind, rng)
        if value not in taken:
            taken.add(value)
            drawn.append(value)
    return drawn


def sentence(kind: str, key: str, value: str) -> str:
    """RULER's needle."""
    return f"One of the special magic {kind} for {key} is: {value}."


def _question(kind: str, queries: Sequence[str], *, several: bool) -> tuple[str, str, str]:
    """Introduction, question and the start of the answer, in the singular where one value is asked for."""
    asked = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    what, some, are = (kind, "Some", "are") if several else (kind.removesuffix("s"), "A", "is")
    all_of = "are all" if several else "is"
    return (
        f"{some} special magic {what} {are} hidden within the following text. Make sure to memorize it. I will quiz"
        f" you about the {what} afterwards.",
        f"What {all_of} the special magic {what} for {asked} mentioned in the provided text?",
        f" The special magic {what} for {asked} mentioned in the provided text {are}",
    )


def sentences_of(text: str) -> list[str]:
    """A text cut after full stops and at lines."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """All that is drawn for one sample; the length of the haystack is free."""

    task: NeedleTask
    needles: tuple[str, ...]
    answers: tuple[str, ...]
    queries: tuple[str, ...]
    depths: tuple[float, ...]
    """Of each needle."""

    filler: Callable[[int], list[str]]
    """Number of units -> the haystack's units."""

    most_units: int | None
    """Units that there are; None for as many as are asked for."""

    joint: str

    def prompt(self, units: int) -> str:
        parts = self.filler(units)
        placed = sorted(zip(self.depths, self.needles, strict=True), reverse=True)
        for depth, needle in placed:
            parts.insert(round(depth * units), needle)
        several = len(self.answers) > 1
        before, question, answer = _question(self.task.value, self.queries, several=several)
        return f"{before}\n{self.joint.join(parts)}\n{question}{answer}"


def _plan(task: NeedleTask, *, depth: float, rng: random.Random, essay: Sequence[str]) -> _Plan:
    taken_keys: set[str] = set()
    taken: set[str] = set()
    keys = _draw_distinct(task.key, max(task.num_keys, task.num_queries), rng, taken_keys)
    values = [_draw_distinct(task.value, task.num_values, rng, taken) for _ in keys]
    queries = keys[: task.num_queries]
    needles = [sentence(task.value, key, value) for key, own in zip(keys, values, strict=True) for value in own]
    depths = [depth, *(rng.random() for _ in needles[1:])]
    start = rng.randrange(len(essay)) if essay else 0
    distractor_seed = rng.getrandbits(64)
    limited = task.haystack == "needle" and task.key == "words"

    def filler(units: int) -> list[str]:
        if task.haystack == "noise":
            return [NOISE] * units
        if task.haystack == "essay":
            return [essay[(start + number) % len(essay)] for number in range(units)]
        own = random.Random(distractor_seed)
        known_keys, known_values = set(taken_keys), set(taken)
        return [
            sentence(
                task.value,
                _draw_distinct(task.key, 1, own, known_keys)[0],
                _draw_distinct(task.value, 1, own, known_values)[0],
            )
            for _ in range(units)
        ]

    return _Plan(
        task=task,
        needles=tuple(needles),
        answers=tuple(value for own in values[: task.num_queries] for value in own),
        queries=tuple(queries),
        depths=tuple(depths),
        filler=filler,
        most_units=len(ADJECTIVES) * len(NOUNS) - len(keys) if limited else None,
        joint=" " if task.haystack == "essay" else "\n",
    )


def answer_allowance(answers: Sequence[str], tokenizer: Tokenizer, length: int) -> int:
    """Tokens for the answer: RULER's 128, at short lengths an eighth, but at least twice what the values take."""
    needed = 2 * len(tokenizer.encode(", ".join(answers))) + 8
    return min(TOKENS_TO_GENERATE, max(length // 8, needed))


def make_sample(
    task: NeedleTask,
    *,
    length: int,
    depth: float,
    seed: int,
    tokenizer: Tokenizer,
    essay: Sequence[str] = (),
) -> tuple[NeedleSample, int]:
    """A sample whose prompt and answer fill `length` tokens as far as whole haystack units allow.

    :param depth: 0 (start of the text) to 1 (end) for the first queried needle.
    :param essay: sentences of running text, for tasks that hide in it.
    :returns: the sample and the number of tokens to generate.
    :raises InputError: if the needles and the question alone are longer, there is no text to hide them in, or there are
        not as many distractors as the length asks for.
    """
    if task.haystack == "essay" and not essay:
        raise InputError(f"{task.name} hides its needles in running text and there is none", right="--text FILE")
    key = f"{task.name} {length} {depth} {seed}"
    rng = random.Random(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    plan = _plan(task, depth=depth, rng=rng, essay=essay)
    allowance = answer_allowance(plan.answers, tokenizer, length)

    def size(units: int) -> int:
        return len(tokenizer.encode(plan.prompt(units)))

    room = length - allowance
    smallest = size(0)
    if smallest > room:
        raise InputError(
            f"{task.name} needs {smallest + allowance} tokens with this tokenizer, {length} were asked for",
            where="--lengths",
            right="a longer length, and a model that takes it",
        )
    low, high, most = 0, 1, plan.most_units
    while size(high) <= room:
        if high == most:
            raise InputError(
                f"{task.name}: all {most} distractors do not fill {length} tokens",
                where="--lengths",
                right="a shorter one",
            )
        low, high = high, high * 2 if most is None else min(high * 2, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle)
    prompt = plan.prompt(low)
    sample = NeedleSample(prompt=prompt, answers=plan.answers, depth=depth, tokens=size(low))
    return sample, allowance


def match_share(prediction: str, answers: Sequence[str]) -> float:
    """RULER's string match: the share of the answers that appear in the text, whatever their case."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def evaluate_needles(
    answer: Callable[[str, int], str],
    tokenizer: Tokenizer,
    name: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
    essay: Sequence[str] = (),
    own: Callable[[int], bool] = lambda item: True,
    gather: Callable[[dict[int, float]], dict[int, float]] = lambda own: own,
) -> list[Result]:
    """One task over a grid: a row per cell, and one over all cells.

    :param answer: prompt and number of tokens to generate -> the continuation's text.
    :param lengths: in tokens, each once; `depths` likewise, 0 to 1.
    :param samples: per cell.
    :param own: whether this process takes an item; `gather` puts the processes' scores together.
    :raises InputError: for an unknown task, a length or depth named twice, or a length that is too short.
    """
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}", where="--tasks", right=f"one of {', '.join(TASKS)}")
    for option, values in (("--lengths", lengths), ("--depths", depths)):
        # The same texts again would look like more texts, and their standard error like a smaller one.
        if len(set(values)) != len(values):
            raise InputError(f"{', '.join(map(str, values))}: one is named twice", where=option, right="each once")
    task = TASKS[name]
    cells = [(length, depth, number) for length in lengths for depth in depths for number in range(samples)]
    scores: dict[int, float] = {}
    for item, (length, depth, number) in enumerate(cells):
        if own(item):
            sample, allowance = make_sample(
                task, length=length, depth=depth, seed=seed * 1_000_003 + number, tokenizer=tokenizer, essay=essay
            )
            scores[item] = match_share(answer(sample.prompt, allowance), sample.answers)
    scores = gather(scores)
    text = hashlib.sha256("\n".join(essay).encode()).hexdigest()[:8] if task.haystack == "essay" else "-"
    version = f"ruler-{text}-{tokenizer.fingerprint[:8]}-seed{seed}.{SCORING_VERSION}"
    results = []
    for length in lengths:
        for depth in depths:
            values = [scores[item] for item, cell in enumerate(cells) if cell[:2] == (length, depth)]
            mean, error = mean_and_error(values)
            results.append(
                Result(
                    task=name,
                    task_version=version,
                    metric="string_match",
                    value=mean,
                    stderr=error,
                    items=len(values),
                    length=length,
                    depth=depth,
                )
            )
    mean, error = mean_and_error(list(scores.values()))
    grid = f"{version}/lengths{'-'.join(map(str, lengths))}/depths{'-'.join(f'{depth:g}' for depth in depths)}"
    overall = replace(
        results[0], task_version=grid, value=mean, stderr=error, items=len(scores), length=None, depth=None
    )
    return [*results, overall]
