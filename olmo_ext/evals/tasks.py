"""Evaluation tasks by name, what they need from the disk, and the options of an evaluation. No torch.

Adding a task is one file, named under `plugins:` of the run or by `--plugins`, and its test:

    from olmo_ext.evals.results import Result, mean_and_error
    from olmo_ext.evals.tasks import EvaluationTask, register_task

    @register_task
    class Repeats(EvaluationTask):
        name = "repeats"
        options = {"items": 100}
        def run(self, names, evaluation):
            values = [...]  # one number an item, from evaluation.target.model and .tokenizer
            mean, error = mean_and_error(values)
            yield [Result(task="repeats", task_version="1", metric="acc", value=mean, stderr=error, items=len(values))]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.base.registry import Registry
from olmo_ext.config.schema import like_default
from olmo_ext.evals.prepare import PreparedFile, prepared_file
from olmo_ext.evals.results import Result

if TYPE_CHECKING:
    from olmo_ext.evals.target import Target

LOGITS_BYTES = 2**30
"""What the logits of one batch may take in fp32: a vocabulary of 100,352 gets 2,674 tokens, one of 4,096 65,536."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What the command line settles for every target."""

    tasks: str = "perplexity"
    sets: tuple[str, ...] = ()
    """`NAME=FILE` or corpus folders, beside or in place of the run's own evaluation sets."""

    prepared: Path | None = None
    lambada: Path | None = None
    text: Path | None = None
    """Running text for haystacks."""

    batch_tokens: int | None = None
    """Tokens per batch; None for as many as LOGITS_BYTES hold."""

    limit: int | None = None
    sequence_length: int | None = None
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needle_samples: int = 5
    seed: int = 0
    own: tuple[str, ...] = ()
    """`TASK.KEY=VALUE`, for the tasks' own options."""


@dataclass(kw_only=True)
class Evaluation:
    """The evaluation of one target, as its tasks see it."""

    target: Target
    options: EvaluationOptions
    say: Callable[[str], None] = lambda message: None
    """Shows a line of progress."""

    results: list[Result] = field(default_factory=list)
    """The rows of the tasks that ran before."""

    @property
    def tokens_per_batch(self) -> int:
        return self.options.batch_tokens or max(1, LOGITS_BYTES // (4 * self.target.tokenizer.vocab_size))


class EvaluationTask(ABC):
    """One task, or a family of tasks that are scored alike."""

    name: ClassVar[str]
    """Of the task or family; its rows go into `evals/<name>.jsonl`."""

    file: ClassVar[str | None] = None
    """Another file for them."""

    names: ClassVar[tuple[str, ...]] = ()
    """What a family's tasks are called on the command line; by default it is one task, called `name`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names for several tasks."""

    files: ClassVar[tuple[PreparedFile, ...]] = ()
    """Files that `--prepare` fetches."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Own options, given as `--option NAME.KEY=VALUE`, and their defaults."""

    def known_names(self) -> Sequence[str]:
        """What `--list-tasks` shows."""
        return self.names or (self.name,)

    def asked(self, names: Sequence[str], options: EvaluationOptions) -> list[str]:
        """Which of the tasks that were asked for are of this family; it is left alone where none is."""
        own = self.names or (self.name,)
        return [name for name in names if name in own]

    def own_options(self, options: EvaluationOptions) -> dict[str, Any]:
        """The task's own options, typed as their defaults are.

        :raises InputError: for an unknown key, or a value of another type.
        """
        chosen = dict(self.options)
        for text in options.own:
            left, _, value = text.partition("=")
            owner, _, key = left.partition(".")
            if owner != self.name:
                continue
            if key not in chosen:
                right = f"known: {', '.join(chosen) or 'none'}"
                raise InputError(f"{self.name} has no option {key!r}", where=f"--option {text}", right=right)
            try:
                chosen[key] = like_default(value, self.options[key])
            except ValueError as error:
                raise InputError(str(error), where=f"--option {text}") from None
        return chosen

    def require_files(self, names: Sequence[str], options: EvaluationOptions) -> None:
        """What the tasks need from the disk is there; asked before torch is imported, so that it is told at once.

        :raises InputError: naming what is missing.
        """
        for file in self.files:
            if file.task in names:
                prepared_file(options.prepared, file.name)

    def check(self, names: Sequence[str], evaluation: Evaluation) -> None:
        """The target can do these tasks; asked of all tasks before the first one runs.

        :raises InputError: naming what does not fit.
        """
        return None

    @abstractmethod
    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        """Score the tasks: their rows, a list for each task, which is kept as soon as it is there.

        Each `Result` names its task, metric, value, number of items and standard error, and a version that changes
        with the items and the way of scoring.
        """


EVALUATION_TASKS: Registry[EvaluationTask] = Registry("evaluation task", "--tasks")


def register_task(cls: type[EvaluationTask]) -> type[EvaluationTask]:
    """Class decorator: make an evaluation task known under its `name`. Tasks run in the order of registration.

    :raises InputError: if another task has the name, or one of the family's names.
    """
    for other in EVALUATION_TASKS.entries():
        twice = set(other.names or (other.name,)) & set(cls.names or (cls.name,))
        if twice and other.name != cls.name:
            raise InputError(
                f"evaluation task {min(twice)!r} is registered twice, by {type(other).__module__} and {cls.__module__}",
                right="give one of them another name",
            )
    return EVALUATION_TASKS.add(cls)


def task_groups() -> dict[str, tuple[str, ...]]:
    """Names for several tasks."""
    return {group: names for task in EVALUATION_TASKS.entries() for group, names in task.groups.items()}


def prepared_files() -> list[PreparedFile]:
    """What `--prepare` fetches for all tasks."""
    return [file for task in EVALUATION_TASKS.entries() for file in task.files]


def all_names() -> list[str]:
    """All that `--tasks` takes. The labels of OLMo's tasks need its import."""
    known = [name for task in EVALUATION_TASKS.entries() for name in task.known_names()]
    return [*known, *task_groups()]


def unknown_task(name: str) -> InputError:
    """What is said of a name that no task has."""
    right = did_you_mean(name, all_names(), otherwise="--list-tasks shows them", most=3)
    return InputError(f"unknown task {name!r}", where="--tasks", right=right)


def expand_tasks(text: str) -> list[str]:
    """`arc_easy,mmlu` -> labels, groups expanded, each once."""
    names: list[str] = []
    groups = task_groups()
    for word in (part.strip() for part in text.split(",")):
        if word:
            names += groups.get(word, (word,))
    return list(dict.fromkeys(names))


def tasks_asked(options: EvaluationOptions) -> list[tuple[EvaluationTask, list[str]]]:
    """The tasks that an evaluation runs, each with the names that ask for it.

    :raises InputError: if no task is named.
    """
    names = expand_tasks(options.tasks)
    if not names:
        raise InputError("no task is named", where="--tasks", right="perplexity, or see --list-tasks")
    asked = [(task, task.asked(names, options)) for task in EVALUATION_TASKS.entries()]
    return [(task, own) for task, own in asked if own]


def require_files(options: EvaluationOptions) -> None:
    """Everything that is named or needed is there; told before a model is loaded.

    :raises InputError: naming what is missing, or an option that belongs to no task.
    """
    for text in options.own:
        EVALUATION_TASKS.get(text.partition("=")[0].partition(".")[0], where=f"--option {text}")
    for task, names in tasks_asked(options):
        task.own_options(options)
        task.require_files(names, options)
    if options.text is not None and not options.text.is_file():
        raise InputError("no such file", where=str(options.text), right="--text FILE")
