"""The built-in evaluation tasks. Importing this registers them; what needs torch is imported when they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.data.validation_sets import PERPLEXITY_SETS
from olmo_ext.evals import needle
from olmo_ext.evals.prepare import LAMBADA, PreparedFile, cached_lambada, prepared_file
from olmo_ext.evals.results import Result
from olmo_ext.evals.tasks import (
    EVALUATION_TASKS,
    Evaluation,
    EvaluationOptions,
    EvaluationTask,
    register_task,
    unknown_task,
)

V3_SMALL = "https://olmo-data.org/eval-data/perplexity/v3_small_dolma2-tokenizer/{name}/val/part-0-00000.npy"
LAMBADA_URL = "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"

PAPER_B_AVERAGE = (
    ("lambada", "acc"),
    ("piqa", "acc"),
    ("hellaswag", "len_norm"),
    ("winogrande", "acc"),
    ("arc_easy", "acc"),
    ("arc_challenge", "len_norm"),
    ("social_iqa", "acc"),
    ("boolq", "acc"),
)
"""The eight tasks of "Tapered Language Models". It does not say which accuracy: raw everywhere, per character on
HellaSwag and ARC-challenge, is what papers with this set of tasks use."""


@register_task
class Perplexity(EvaluationTask):
    """The evaluation sets of a run's config (`perplexity`), paper A's by name, and those of `--set`."""

    name = "perplexity"
    names = (name, *PERPLEXITY_SETS)
    files = tuple(
        PreparedFile(name=f"{each}.npy", url=V3_SMALL.format(name=each), task=each) for each in PERPLEXITY_SETS
    )

    def asked(self, names: Sequence[str], options: EvaluationOptions) -> list[str]:
        return [*super().asked(names, options), *(f"--set {text}" for text in options.sets)]

    def require_files(self, names: Sequence[str], options: EvaluationOptions) -> None:
        super().require_files(names, options)
        for text in options.sets:
            if not Path(text.partition("=")[2] or text).exists():
                raise InputError("no such file", where=f"--set {text}")

    def check(self, names: Sequence[str], evaluation: Evaluation) -> None:
        from olmo_ext.evals.token_sets import token_sets

        token_sets(evaluation.target, evaluation.options, names)

    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        from olmo_ext.evals.perplexity import evaluate_token_set
        from olmo_ext.evals.token_sets import token_sets

        target, options = evaluation.target, evaluation.options
        length = options.sequence_length or target.model.max_sequence_length
        for token_set in token_sets(target, options, names):
            evaluation.say(f"{target.name}: perplexity of {token_set.name}")
            yield evaluate_token_set(
                target.model,
                target.tokenizer,
                token_set,
                batch_size=max(1, evaluation.tokens_per_batch // length),
                limit=options.limit,
                sequence_length=options.sequence_length,
            )


@register_task
class Lambada(EvaluationTask):
    """The last word of OpenAI's passages."""

    name = "lambada"
    files = (PreparedFile(name=LAMBADA, url=LAMBADA_URL, task=name),)

    def require_files(self, names: Sequence[str], options: EvaluationOptions) -> None:
        self._file(options)

    def _file(self, options: EvaluationOptions) -> Path:
        """The file or folder of the passages: the one named, the prepared one, or lm-eval's copy."""
        if options.lambada is not None:
            if not options.lambada.exists():
                raise InputError("no such file", where=str(options.lambada), right="--lambada FILE")
            return options.lambada
        if options.prepared is None and (cached := cached_lambada()) is not None:
            return cached
        return prepared_file(options.prepared, LAMBADA)

    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        from olmo_ext.evals.lambada import evaluate_lambada

        target, options = evaluation.target, evaluation.options
        evaluation.say(f"{target.name}: lambada")
        yield evaluate_lambada(
            target.model,
            target.tokenizer,
            self._file(options),
            tokens_per_batch=evaluation.tokens_per_batch,
            limit=options.limit,
        )


@register_task
class Downstream(EvaluationTask):
    """OLMo's own tasks, by its labels: every name that no other task has."""

    name = "downstream"
    groups = {
        "default": ("arc_easy", "arc_challenge", "sciq", "hellaswag", "piqa", "winogrande", "boolq", "social_iqa")
        + ("openbook_qa", "copa", "commonsense_qa", "natural_qs_open_ppl", "trivia_qa_wiki_ppl"),
        "mmlu": ("mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other"),
    }

    def known_names(self) -> Sequence[str]:
        from olmo_ext.evals.downstream import known_tasks

        return known_tasks()

    def asked(self, names: Sequence[str], options: EvaluationOptions) -> list[str]:
        others = {
            name for task in EVALUATION_TASKS.entries() if task is not self for name in task.names or (task.name,)
        }
        return [name for name in names if name not in others]

    def check(self, names: Sequence[str], evaluation: Evaluation) -> None:
        known = self.known_names()
        for name in names:
            if name not in known:
                raise unknown_task(name)

    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        from olmo_ext.evals.downstream import evaluate_task

        target, limit = evaluation.target, evaluation.options.limit
        for name in names:
            evaluation.say(f"{target.name}: {name}")
            yield evaluate_task(
                target.model, target.tokenizer, name, tokens_per_batch=evaluation.tokens_per_batch, limit=limit
            )


@register_task
class PaperB(EvaluationTask):
    """The average of paper B's eight tasks, wherever all of them were asked for."""

    name = "paper_b_8task"
    file = "downstream"
    groups = {name: tuple(task for task, _ in PAPER_B_AVERAGE)}

    def known_names(self) -> Sequence[str]:
        return ()

    def asked(self, names: Sequence[str], options: EvaluationOptions) -> list[str]:
        return [self.name] if set(self.groups[self.name]) <= set(names) else []

    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        from olmo_ext.evals.downstream import average

        if (mean := average(evaluation.results, PAPER_B_AVERAGE, name=self.name)) is not None:
            yield [mean]


@register_task
class Needles(EvaluationTask):
    """RULER's needles in a haystack, over lengths and depths."""

    name = "needle"
    names = tuple(needle.TASKS)
    groups = {"niah": names}

    def check(self, names: Sequence[str], evaluation: Evaluation) -> None:
        target = evaluation.target
        lengths, essay = self._lengths(evaluation), self._essay(names, evaluation)
        for name in names:
            needle.make_sample(
                needle.TASKS[name], length=min(lengths), depth=0.5, seed=0, tokenizer=target.tokenizer, essay=essay
            )

    def _lengths(self, evaluation: Evaluation) -> tuple[int, ...]:
        longest = evaluation.target.model.max_sequence_length
        lengths = evaluation.options.lengths or (longest,)
        if max(lengths) > longest:
            raise InputError(
                f"{evaluation.target.name} takes {longest} tokens, {max(lengths)} were asked for",
                where="--lengths",
                right="lengths that the model takes",
            )
        return lengths

    def _essay(self, names: Sequence[str], evaluation: Evaluation) -> list[str]:
        """Sentences of running text, where a task hides its needles in some."""
        from olmo_ext.evals.token_sets import running_text

        if all(needle.TASKS[name].haystack != "essay" for name in names):
            return []
        text, source = running_text(evaluation.target, evaluation.options.text, purpose="to hide needles in")
        if not (sentences := needle.sentences_of(text)):
            raise InputError("no sentence in this text", where=source, right="--text FILE")
        return sentences

    def run(self, names: Sequence[str], evaluation: Evaluation) -> Iterable[list[Result]]:
        from olmo_ext.evals.generation import generate
        from olmo_ext.evals.target import Share

        target, options = evaluation.target, evaluation.options
        lengths, essay = self._lengths(evaluation), self._essay(names, evaluation)
        share = Share.current()

        def answer(prompt: str, allowance: int) -> str:
            ids = generate(
                target.model,
                target.tokenizer.encode(prompt),
                max_tokens=allowance,
                stop_token_ids=target.stop_token_ids,
                num_tokens=target.tokenizer.vocab_size,
            )
            return target.tokenizer.decode(ids)

        for name in names:
            evaluation.say(f"{target.name}: {name} at {', '.join(map(str, lengths))} tokens")
            yield needle.evaluate_needles(
                answer,
                target.tokenizer,
                name,
                lengths=lengths,
                depths=options.depths,
                samples=options.needle_samples,
                seed=options.seed,
                essay=essay,
                own=lambda item: item % share.number == share.rank,
                gather=share.gather,
            )
