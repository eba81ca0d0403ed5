"""Names of tasks, what they need from the disk, and the options of an evaluation. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.data.validation_sets import PERPLEXITY_SETS
from olmo_ext.evals.needle import TASKS as NEEDLE_TASKS
from olmo_ext.evals.prepare import LAMBADA, cached_lambada, prepared_file

PERPLEXITY = "perplexity"

PAPER_B_TASK = "paper_b_8task"
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

GROUPS = {
    "default": ("arc_easy", "arc_challenge", "sciq", "hellaswag", "piqa", "winogrande", "boolq", "social_iqa")
    + ("openbook_qa", "copa", "commonsense_qa", "natural_qs_open_ppl", "trivia_qa_wiki_ppl"),
    "mmlu": ("mmlu_stem", "mmlu_humanities", "mmlu_social_sciences", "mmlu_other"),
    "niah": tuple(NEEDLE_TASKS),
    PAPER_B_TASK: tuple(name for name, _ in PAPER_B_AVERAGE),
}
"""Names for several tasks."""


OWN_TASKS = (PERPLEXITY, "lambada", *PERPLEXITY_SETS, *NEEDLE_TASKS)
"""Tasks that are not OLMo's."""

LOGITS_BYTES = 2**30
"""What the logits of one batch may take in fp32: a vocabulary of 100,352 gets 2,674 tokens, one of 4,096 65,536."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What the command line settles for every target."""

    tasks: str = PERPLEXITY
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


def tokens_per_batch(options: EvaluationOptions, vocab_size: int) -> int:
    """Tokens per batch for a vocabulary."""
    return options.batch_tokens or max(1, LOGITS_BYTES // (4 * vocab_size))


def lambada_file(options: EvaluationOptions) -> Path:
    """The file or folder of LAMBADA's passages: the one named, the prepared one, or lm-eval's copy.

    :raises InputError: if there is none.
    """
    if options.lambada is not None:
        if not options.lambada.exists():
            raise InputError("no such file", where=str(options.lambada), right="--lambada FILE")
        return options.lambada
    if options.prepared is None and (cached := cached_lambada()) is not None:
        return cached
    return prepared_file(options.prepared, LAMBADA)


def read_text(path: Path) -> str:
    """A file of running text.

    :raises InputError: if it is no file, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=str(path), right="a text file in UTF-8") from None


def expand_tasks(text: str) -> list[str]:
    """`arc_easy,mmlu` -> labels, groups expanded, each once."""
    names: list[str] = []
    for word in (part.strip() for part in text.split(",")):
        if word:
            names += GROUPS.get(word, (word,))
    return list(dict.fromkeys(names))


def set_file(text: str) -> Path:
    """The path in `NAME=FILE` or `FILE`."""
    return Path(text.partition("=")[2] or text)


def require_files(options: EvaluationOptions) -> None:
    """Everything that is named or needed is there; told before a model is loaded.

    :raises InputError: naming what is missing.
    """
    names = expand_tasks(options.tasks)
    if not names:
        raise InputError("no task is named", where="--tasks", right="perplexity, or see --list-tasks")
    if "lambada" in names:
        lambada_file(options)
    for name in names:
        if name in PERPLEXITY_SETS:
            prepared_file(options.prepared, f"{name}.npy")
    for text in options.sets:
        if not set_file(text).exists():
            raise InputError("no such file", where=f"--set {text}")
    if options.text is not None and not options.text.is_file():
        raise InputError("no such file", where=str(options.text), right="--text FILE")
