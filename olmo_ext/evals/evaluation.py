"""From names of tasks to results: which files each needs, checked first, then one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.data.tokenizer import load_tokenizer
from olmo_ext.data.validation_sets import PERPLEXITY_SETS
from olmo_ext.evals import lambada, needle, perplexity
from olmo_ext.evals.downstream import evaluate_task, known_tasks, paper_b_average
from olmo_ext.evals.generation import generate
from olmo_ext.evals.prepare import prepared_file
from olmo_ext.evals.results import Result, write_results
from olmo_ext.evals.target import Share, Target
from olmo_ext.evals.tasks import (
    GROUPS,
    OWN_TASKS,
    PAPER_B_AVERAGE,
    PERPLEXITY,
    EvaluationOptions,
    expand_tasks,
    lambada_file,
    read_text,
    require_files,
    tokens_per_batch,
)


def _token_sets(target: Target, options: EvaluationOptions, names: Sequence[str]) -> list[perplexity.TokenSet]:
    """The sets to score, none where no task asks for one.

    :raises InputError: for a task without a set, a file that is missing, two sets of one name, another vocabulary.
    """
    sets: list[perplexity.TokenSet] = []
    if PERPLEXITY in names and target.config is not None:
        sets += perplexity.token_sets_of_config(target.config)
        perplexity.require_distinct_names(sets, where=f"{target.name}, evaluators")
    if set(names) & set(PERPLEXITY_SETS):
        perplexity.require_vocabulary(target.tokenizer, load_tokenizer("dolma2"), where=f"{target.name}, --tasks")
    for name in names:
        if name in PERPLEXITY_SETS:
            path = prepared_file(options.prepared, f"{name}.npy")
            sets.append(perplexity.TokenSet(name=name, paths=(str(path),), dtype="uint32"))
    named = [perplexity.parse_token_set(text, tokenizer=target.tokenizer) for text in options.sets]
    perplexity.require_distinct_names(named, where="--set")
    sets += named
    if PERPLEXITY in names and not sets:
        raise InputError(f"{target.name} names no evaluation set", right="--set NAME=FILE, or a corpus folder")
    for token_set in sets:
        for file in token_set.paths:
            if not Path(file).is_file():
                raise InputError(f"the file of set {token_set.name!r} is missing", where=file)
    return perplexity.merge_named(sets)


def haystack_sentences(target: Target, options: EvaluationOptions, *, tokens: int = 200_000) -> list[str]:
    """Running text: the file that is named, else the run's first evaluation set, decoded."""
    if options.text is not None:
        text, source = read_text(options.text), str(options.text)
    else:
        ids, source = perplexity.first_tokens(target, tokens, purpose="to hide needles in")
        text = target.tokenizer.decode(ids.tolist())
    sentences = needle.sentences_of(text)
    if not sentences:
        raise InputError("no sentence in this text", where=source, right="--text FILE")
    return sentences


def _needle_lengths(target: Target, options: EvaluationOptions) -> tuple[int, ...]:
    longest = target.model.max_sequence_length
    lengths = options.lengths or (longest,)
    if too_long := [length for length in lengths if length > longest]:
        raise InputError(
            f"{target.name} takes {longest} tokens, {max(too_long)} were asked for",
            where="--lengths",
            right="lengths that the model takes",
        )
    return lengths


def check(target: Target, options: EvaluationOptions) -> list[str]:
    """The tasks by name, after everything they need has been seen to be there.

    :raises InputError: naming what is missing or unknown, before anything is computed.
    """
    require_files(options)
    names = expand_tasks(options.tasks)
    known: set[str] | None = None
    for name in names:
        if name not in OWN_TASKS:
            known = known if known is not None else set(known_tasks())
            if name not in known:
                everything = [*known, *OWN_TASKS, *GROUPS]
                right = did_you_mean(name, everything, otherwise="--list-tasks shows them", most=3)
                raise InputError(f"unknown task {name!r}", where="--tasks", right=right)
    _token_sets(target, options, names)
    needles = [name for name in names if name in needle.TASKS]
    if needles:
        lengths = _needle_lengths(target, options)
        essay = ["text"]
        if any(needle.TASKS[name].haystack == "essay" for name in needles):
            essay = haystack_sentences(target, options)
        for name in needles:
            needle.make_sample(
                needle.TASKS[name], length=min(lengths), depth=0.5, seed=0, tokenizer=target.tokenizer, essay=essay
            )
    return names


def evaluate(
    target: Target, options: EvaluationOptions, *, say: Callable[[str], None] = lambda message: None
) -> list[Result]:
    """Every task of one target; rows go into the run's `evals/` after each family, so that a kill loses little."""
    names = check(target, options)
    results: list[Result] = []
    batch_tokens = tokens_per_batch(options, target.tokenizer.vocab_size)

    def keep(family: str, found: list[Result]) -> None:
        if target.model.precision != "fp32":
            # Other numbers than those of fp32: compared as equal, rounding would pass for a difference of models.
            found = [replace(row, task_version=f"{row.task_version}/{target.model.precision}") for row in found]
        results.extend(found)
        if target.run is not None and Share.current().rank == 0:
            rows = [row.row(step=target.step, checkpoint_sha256=target.checkpoint_sha256) for row in found]
            write_results(target.run.evals / f"{family}.jsonl", rows)

    length = options.sequence_length or target.model.max_sequence_length
    for token_set in _token_sets(target, options, names):
        say(f"{target.name}: perplexity of {token_set.name}")
        found = perplexity.evaluate_token_set(
            target.model,
            target.tokenizer,
            token_set,
            batch_size=max(1, batch_tokens // length),
            limit=options.limit,
            sequence_length=options.sequence_length,
        )
        keep("perplexity", found)
    if "lambada" in names:
        say(f"{target.name}: lambada")
        found = lambada.evaluate_lambada(
            target.model,
            target.tokenizer,
            lambada_file(options),
            tokens_per_batch=batch_tokens,
            limit=options.limit,
        )
        keep("lambada", found)
    for name in names:
        if name in OWN_TASKS:
            continue
        say(f"{target.name}: {name}")
        found = evaluate_task(target.model, target.tokenizer, name, tokens_per_batch=batch_tokens, limit=options.limit)
        keep("downstream", found)
    if {name for name, _ in PAPER_B_AVERAGE} <= set(names) and (average := paper_b_average(results)) is not None:
        keep("downstream", [average])
    needles = [name for name in names if name in needle.TASKS]
    if needles:
        _evaluate_needles(target, options, needles, keep, say)
    return results


def _evaluate_needles(
    target: Target,
    options: EvaluationOptions,
    names: Sequence[str],
    keep: Callable[[str, list[Result]], None],
    say: Callable[[str], None],
) -> None:
    lengths = _needle_lengths(target, options)
    essay: list[str] = []
    if any(needle.TASKS[name].haystack == "essay" for name in names):
        essay = haystack_sentences(target, options)
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
        say(f"{target.name}: {name} at {', '.join(map(str, lengths))} tokens")
        found = needle.evaluate_needles(
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
        keep("needle", found)


def pick_device(name: str) -> str:
    """`auto` is the GPU where there is one, a rank's own where torchrun started several.

    :raises InputError: for a device that is not here.
    """
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    device: torch.device | None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device {name!r}", where="--device", right="auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device here", where="--device", right="cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise InputError(f"no device {name!r} here", where="--device", right=f"cuda:0 to cuda:{last}")
    return name
