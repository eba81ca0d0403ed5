"""Perplexity of token files: token-weighted, every instance counted, the same number for any batch and any ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from olmo_ext.data.tokenizer import Tokenizer
from olmo_ext.data.tokens import TokenReader, check_dtype, inspect_files
from olmo_ext.errors import InputError, WorkError
from olmo_ext.evals.model import EvaluatedModel, Share
from olmo_ext.evals.results import Result

LISTED_INSTANCES = 20_000
"""Up to this many instances, the losses of each are kept in the result row."""


class Instances(Protocol):
    """What can be scored: `TokenReader`, or anything like it."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> np.ndarray:
        """Token ids of one instance, shape (time,)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """Sums over all instances; the first token of an instance has no context and is not predicted."""

    losses: tuple[float, ...]
    """Nats of each instance, summed over its predicted tokens."""

    predicted: tuple[int, ...]
    """Predicted tokens of each instance."""

    num_bytes: int | None
    """Bytes of text that the predicted tokens stand for, where the vocabulary tells."""

    @property
    def instances(self) -> int:
        return len(self.losses)

    @property
    def tokens(self) -> int:
        return sum(self.predicted)

    @property
    def cross_entropy(self) -> float:
        """Nats per predicted token."""
        return math.fsum(self.losses) / self.tokens

    @property
    def stderr(self) -> float | None:
        """Standard error of the cross-entropy with instances as clusters: sqrt(n/(n-1) sum (l_i - m t_i)^2) / T."""
        number = self.instances
        if number < 2:
            return None
        mean = self.cross_entropy
        squares = math.fsum((loss - mean * count) ** 2 for loss, count in zip(self.losses, self.predicted, strict=True))
        return math.sqrt(number / (number - 1) * squares) / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy)

    @property
    def bits_per_byte(self) -> float | None:
        return None if not self.num_bytes else math.fsum(self.losses) / math.log(2) / self.num_bytes


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes of text behind every id, shape (vocab_size,), int64; special tokens are 0. None if ids are not bytes.

    In a byte-level vocabulary every character of a token's name stands for one byte.
    """
    if not tokenizer.is_byte_level:
        return None
    added = tokenizer.base.get_added_tokens_decoder()
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for name, token in tokenizer.base.get_vocab(with_added_tokens=True).items():
        if token in added:
            lengths[token] = 0 if added[token].special else len(name.encode())
        else:
            lengths[token] = len(name)
    return lengths


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Nats of every predicted token, shape [batch, time - 1], from logits [batch, time, vocabulary]."""
    rows = [
        torch.nn.functional.cross_entropy(row[:-1].float(), target[1:].to(row.device), reduction="none")
        for row, target in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows)


def perplexity(
    model: EvaluatedModel,
    instances: Instances,
    *,
    batch_size: int = 8,
    share: Share | None = None,
    limit: int | None = None,
    token_bytes: np.ndarray | None = None,
    name: str = "evaluation set",
) -> PerplexityResult:
    """Score instances.

    Each rank takes every n-th instance; losses are kept per instance and added exactly (`math.fsum`), so that the
    number does not depend on ranks or batch beyond the rounding of the logits themselves.

    :param limit: the first so many instances only.
    :param token_bytes: see `bytes_per_token`.
    :raises WorkError: if a loss is not finite, naming the instance.
    """
    share = share or Share.current()
    number = len(instances) if limit is None else min(limit, len(instances))
    if number == 0:
        raise InputError("no instance to score", where=name)
    own = list(share.of(number))
    found: dict[int, tuple[float, int, int]] = {}
    for start in range(0, len(own), batch_size):
        batch = own[start : start + batch_size]
        arrays = [np.asarray(instances.read(index)).astype(np.int64) for index in batch]
        ids = torch.from_numpy(np.stack(arrays))
        losses = token_losses(model.logits(ids), ids).double().sum(dim=1).cpu().tolist()
        for index, array, loss in zip(batch, arrays, losses, strict=True):
            size = 0 if token_bytes is None else int(token_bytes[array[1:]].sum())
            found[index] = (loss, len(array) - 1, size)
    everything = share.gather(found)
    for index, (loss, _, _) in everything.items():
        if not math.isfinite(loss):
            raise WorkError(f"{name}, instance {index}: the loss is {loss}")
    values = list(everything.values())
    return PerplexityResult(
        losses=tuple(loss for loss, _, _ in values),
        predicted=tuple(count for _, count, _ in values),
        num_bytes=None if token_bytes is None else sum(size for _, _, size in values),
    )


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """A named set of token files."""

    name: str
    paths: tuple[str, ...]
    dtype: str


def open_token_set(token_set: TokenSet, *, sequence_length: int, vocab_size: int) -> tuple[TokenReader, str, int]:
    """The instances of a set, its version (from sizes and sampled content), and the tokens that fill no instance."""
    dtype = check_dtype(token_set.dtype, vocab_size, where=token_set.name)
    files = inspect_files(token_set.paths, dtype=dtype, sequence_length=sequence_length, vocabulary_size=vocab_size)
    reader = TokenReader(
        [file.path for file in files],
        [file.num_instances for file in files],
        dtype=dtype,
        sequence_length=sequence_length,
        vocabulary_size=vocab_size,
    )
    left_out = sum(file.num_bytes // dtype.itemsize - file.num_instances * sequence_length for file in files)
    version = f"{'+'.join(file.sample for file in files[:4])}{'+...' if len(files) > 4 else ''}@{sequence_length}"
    return reader, version, left_out


def evaluate_token_set(
    model: EvaluatedModel,
    tokenizer: Tokenizer,
    token_set: TokenSet,
    *,
    batch_size: int = 8,
    limit: int | None = None,
    sequence_length: int | None = None,
) -> list[Result]:
    """CrossEntropyLoss, Perplexity and, where the vocabulary tells bytes, BitsPerByte of one set."""
    length = sequence_length or model.max_sequence_length
    reader, version, left_out = open_token_set(token_set, sequence_length=length, vocab_size=tokenizer.vocab_size)
    try:
        scored = perplexity(
            model,
            reader,
            batch_size=batch_size,
            limit=limit,
            token_bytes=bytes_per_token(tokenizer),
            name=token_set.name,
        )
    finally:
        reader.close()
    if limit is not None and limit < len(reader):
        version += f"/first{limit}"
    details: dict[str, object] = {"tokens": scored.tokens, "tokens_left_out": left_out}
    listed = {}
    if scored.instances <= LISTED_INSTANCES:
        means = [loss / count for loss, count in zip(scored.losses, scored.predicted, strict=True)]
        listed = {"document_losses": means, "document_tokens": list(scored.predicted)}
    error = scored.stderr
    common: dict[str, Any] = {"task": token_set.name, "task_version": version, "items": scored.instances}
    found = [
        Result(
            metric="CrossEntropyLoss", value=scored.cross_entropy, stderr=error, details={**details, **listed}, **common
        ),
        Result(
            metric="Perplexity",
            value=scored.perplexity,
            # The delta method: d exp(x) = exp(x) dx.
            stderr=None if error is None else error * scored.perplexity,
            details=details,
            **common,
        ),
    ]
    if (bits := scored.bits_per_byte) is not None:
        scale = bits / scored.cross_entropy if scored.cross_entropy else 0.0
        found.append(
            Result(
                metric="BitsPerByte",
                value=bits,
                stderr=None if error is None else error * scale,
                details={**details, "bytes": scored.num_bytes},
                **common,
            )
        )
    return found


def token_sets_of_config(values: dict) -> list[TokenSet]:
    """The language-modelling sets of a run's evaluators."""
    found = []
    for evaluator in values.get("evaluators") or []:
        if evaluator.get("type", "lm") != "lm":
            continue
        data = evaluator["data"]
        dtype = data.get("memmap_dtype") or data.get("effective_memmap_dtype") or values["data"]["memmap_dtype"]
        if data.get("paths"):
            found.append(TokenSet(name=evaluator["label"], paths=tuple(map(str, data["paths"])), dtype=dtype))
        for name, paths in sorted((data.get("datasets") or {}).items()):
            found.append(TokenSet(name=name, paths=tuple(map(str, paths)), dtype=dtype))
    return found


def parse_token_set(text: str, *, vocab_size: int) -> TokenSet:
    """`NAME=FILE`, or a corpus folder, as a set; the type of the tokens follows the manifest or the vocabulary."""
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).stem, text
    if Path(path).is_dir():
        from olmo_ext.data.corpus_manifest import read_manifest

        manifest = read_manifest(path)
        split = "validation" if "validation" in manifest.splits else "train"
        return TokenSet(name=name, paths=(str(manifest.path(split)),), dtype=manifest.dtype)
    return TokenSet(name=name, paths=(path,), dtype="uint16" if vocab_size <= 2**16 else "uint32")


def merge_named(sets: Sequence[TokenSet]) -> list[TokenSet]:
    """The sets by name, a later one of the same name in place of the earlier."""
    return list({token_set.name: token_set for token_set in sets}.values())
