"""Which sets of tokens an evaluation scores, and running text out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.data.tokenizer import Tokenizer, load_tokenizer
from olmo_ext.data.tokens import check_dtype, inspect_files
from olmo_ext.data.validation_sets import PERPLEXITY_SETS
from olmo_ext.evals.prepare import prepared_file
from olmo_ext.evals.target import Target
from olmo_ext.evals.tasks import EvaluationOptions


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """A named set of token files."""

    name: str
    paths: tuple[str, ...]
    dtype: str


def token_sets_of_config(config: TrainConfig) -> list[TokenSet]:
    """The language-modelling sets of a run's evaluators."""
    sets = []
    for evaluator in config.evaluators:
        if evaluator.type != "lm":
            continue
        data = evaluator.data
        if data.paths:
            sets.append(TokenSet(name=evaluator.label, paths=tuple(data.paths), dtype=data.memmap_dtype))
        for name, paths in sorted((data.datasets or {}).items()):
            sets.append(TokenSet(name=name, paths=tuple(paths), dtype=data.memmap_dtype))
    return sets


def require_vocabulary(tokenizer: Tokenizer, of_tokens: Tokenizer, *, where: str) -> None:
    """Ids of another vocabulary would be scored without a word, and the number mean nothing.

    :raises InputError: if the tokens were made with another vocabulary than the model's.
    """
    ours, theirs = (one.base.get_vocab(with_added_tokens=False) for one in (tokenizer, of_tokens))
    if ours != theirs:
        raise InputError(
            f"tokens of {of_tokens.identifier} ({len(theirs):,} entries), the model reads {tokenizer.identifier}"
            f" ({len(ours):,})",
            where=where,
            right="the same text encoded with the model's tokenizer",
        )


def parse_token_set(text: str, *, tokenizer: Tokenizer) -> TokenSet:
    """`NAME=FILE`, or a corpus folder, as a set; the type of the tokens follows the manifest or the vocabulary.

    Of a corpus the validation split is taken; of one without, all there is.

    :param tokenizer: the model's.
    :raises InputError: for a set without a name, or a corpus of another vocabulary.
    """
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).stem, text
    if not name:
        raise InputError(f"{text!r} has no name", where="--set", right="NAME=FILE, or a file alone")
    if Path(path).is_dir():
        from olmo_ext.config.corpus_manifest import read_manifest

        manifest = read_manifest(path)
        require_vocabulary(tokenizer, load_tokenizer(path), where=path)
        split = "validation" if "validation" in manifest.splits else "train"
        return TokenSet(name=name, paths=(str(manifest.path(split)),), dtype=manifest.dtype)
    return TokenSet(name=name, paths=(path,), dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


def require_distinct_names(sets: Sequence[TokenSet], *, where: str) -> None:
    """Results go by the name of their set: of two sets of one name, one would be lost.

    :raises InputError: naming the two.
    """
    known: dict[str, TokenSet] = {}
    for token_set in sets:
        other = known.setdefault(token_set.name, token_set)
        if other != token_set:
            raise InputError(
                f"{other.paths[0]} and {token_set.paths[0]} are both called {token_set.name!r}",
                where=where,
                right="another name for one of them, as in NAME=FILE",
            )


def token_sets(target: Target, options: EvaluationOptions, names: Sequence[str]) -> list[TokenSet]:
    """The sets to score: of the run's config for `perplexity`, paper A's by their names, and those of `--set`.

    A later one takes the place of an earlier one of its name.

    :raises InputError: for a task without a set, a file that is missing, two sets of one name, another vocabulary.
    """
    sets: list[TokenSet] = []
    if "perplexity" in names and target.config is not None:
        sets += token_sets_of_config(target.config)
        require_distinct_names(sets, where=f"{target.name}, evaluators")
    prepared = [name for name in names if name in PERPLEXITY_SETS]
    if prepared:
        require_vocabulary(target.tokenizer, load_tokenizer("dolma2"), where=f"{target.name}, --tasks")
    for name in prepared:
        path = prepared_file(options.prepared, f"{name}.npy")
        sets.append(TokenSet(name=name, paths=(str(path),), dtype="uint32"))
    named = [parse_token_set(text, tokenizer=target.tokenizer) for text in options.sets]
    require_distinct_names(named, where="--set")
    sets += named
    if "perplexity" in names and not sets:
        raise InputError(f"{target.name} names no evaluation set", right="--set NAME=FILE, or a corpus folder")
    for token_set in sets:
        for file in token_set.paths:
            if not Path(file).is_file():
                raise InputError(f"the file of set {token_set.name!r} is missing", where=file)
    return list({token_set.name: token_set for token_set in sets}.values())


def first_tokens(target: Target, number: int, *, purpose: str) -> tuple[np.ndarray, str]:
    """The start of a run's first evaluation set, [number or as many as its first file holds], int64, and that file.

    :param purpose: what it is for, in words.
    :raises InputError: if there is no set, or its file cannot be read or holds no tokens of the run's vocabulary.
    """
    sets = token_sets_of_config(target.config) if target.config is not None else []
    if not sets:
        raise InputError(f"{target.name} has no evaluation set {purpose}", right="--text FILE")
    vocab_size = target.tokenizer.vocab_size
    dtype = check_dtype(sets[0].dtype, vocab_size, where=sets[0].name)
    (file,) = inspect_files(sets[0].paths[:1], dtype=dtype, sequence_length=1, vocabulary_size=vocab_size)
    ids = np.fromfile(file.path, dtype=dtype, count=number).astype(np.int64)
    if ids.max() >= vocab_size:
        raise InputError(
            f"id {ids.max()} is beyond the vocabulary of {vocab_size:,}", where=file.path, right="the run's own tokens"
        )
    return ids, file.path


def read_text(path: Path) -> str:
    """A file of running text.

    :raises InputError: if it is no file, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=str(path), right="a text file in UTF-8") from None


def running_text(target: Target, path: Path | None, *, purpose: str, tokens: int = 200_000) -> tuple[str, str]:
    """Running text, and the file that it is from: the one named, else the run's first evaluation set, decoded."""
    if path is not None:
        return read_text(path), str(path)
    ids, source = first_tokens(target, tokens, purpose=purpose)
    return target.tokenizer.decode(ids.tolist()), source
