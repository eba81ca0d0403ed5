"""LAMBADA as the field scores it: the last word of a passage, greedy accuracy and perplexity of the word.

The items are OpenAI's test split (5,153 passages), from a local file: JSON lines with a `text` field, or the folder
in which lm-eval's `datasets` cache keeps `EleutherAI/lambada_openai`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.data.corpus_sources import read_jsonl
from olmo_ext.data.tokenizer import Tokenizer
from olmo_ext.evals.downstream import continuation_log_likelihoods
from olmo_ext.evals.perplexity import exponential
from olmo_ext.evals.results import Result, mean_and_error
from olmo_ext.evals.target import EvaluatedModel

SCORING_VERSION = 1


def _arrow_texts(folder: Path) -> list[str]:
    import datasets

    files = sorted(path for path in folder.rglob("*test*.arrow"))
    if not files:
        raise InputError("no *test*.arrow below it", where=str(folder), right="lambada_test.jsonl works as well")
    return [row["text"] for path in files for row in datasets.Dataset.from_file(str(path))]


def load_passages(path: Path) -> list[str]:
    """The passages of a JSON-lines file or a cache folder.

    :raises InputError: naming the line (of a cache folder the passage, from 1).
    """
    if path.is_dir():
        places = [(f"{path}, passage {number}", text) for number, text in enumerate(_arrow_texts(path), start=1)]
    elif path.is_file():
        places = list(read_jsonl(path, "text"))
    else:
        raise InputError("no such file", where=str(path), right="--lambada FILE: OpenAI's lambada_test.jsonl")
    for place, text in places:
        context, word = split_passage(text)
        if not context.strip() or not word.strip():
            raise InputError(
                "a passage without a last word behind a blank", where=place, right="`context word`, no blank at the end"
            )
    if not places:
        raise InputError("no passages", where=str(path), right="OpenAI's lambada_test.jsonl")
    return [text for _, text in places]


def split_passage(text: str) -> tuple[str, str]:
    """Everything before the last word, and the last word with its leading blank."""
    context, _, word = text.rpartition(" ")
    return context, f" {word}"


def evaluate_lambada(
    model: EvaluatedModel,
    tokenizer: Tokenizer,
    path: Path,
    *,
    tokens_per_batch: int = 16_384,
    limit: int | None = None,
) -> list[Result]:
    """`acc` (the whole last word is what greedy decoding gives) and `perplexity` (exp of the mean nats of a word)."""
    texts = load_passages(path)[:limit]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
    version = f"lambada-{digest}-{tokenizer.fingerprint[:8]}.{SCORING_VERSION}"
    pairs = [tuple(tokenizer.encode(part) for part in split_passage(text)) for text in texts]
    scores, truncated = continuation_log_likelihoods(
        model,
        [(context, word) for context, word in pairs],
        tokens_per_batch=tokens_per_batch,
        pad_token_id=tokenizer.pad_token_id,
        name="lambada",
    )
    accuracy, accuracy_error = mean_and_error([float(greedy) for _, greedy in scores])
    nats, nats_error = mean_and_error([-score for score, _ in scores])
    perplexity = exponential(nats)
    details = {"truncated": truncated} if truncated else {}
    return [
        Result(
            task="lambada",
            task_version=version,
            metric="acc",
            value=accuracy,
            stderr=accuracy_error,
            items=len(texts),
            details=details,
        ),
        Result(
            task="lambada",
            task_version=version,
            metric="perplexity",
            value=perplexity,
            stderr=None if nats_error is None else nats_error * perplexity,
            items=len(texts),
            details=details,
        ),
    ]
