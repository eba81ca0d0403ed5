"""Perplexity of token files: token-weighted, every instance counted, the same number for any batch and any ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.data.tokenizer import Tokenizer
from olmo_ext.data.tokens import TokenReader, check_dtype, inspect_files
from olmo_ext.evals.results import Result
from olmo_ext.evals.target import EvaluatedModel, Share
from olmo_ext.evals.token_sets import TokenSet

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

    bytes: tuple[int, ...] | None
    """Bytes of text that the predicted tokens of each instance stand for, where the vocabulary tells."""

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
        """Standard error of the cross-entropy, in nats per token; None for a single instance."""
        return _ratio_error(self.losses, self.predicted)

    @property
    def perplexity(self) -> float:
        """exp of the cross-entropy."""
        return exponential(self.cross_entropy)

    @property
    def num_bytes(self) -> int:
        """Bytes of all predicted tokens; 0 where they are not known."""
        return sum(self.bytes or ())

    @property
    def bits_per_byte(self) -> float | None:
        return None if not self.num_bytes else math.fsum(self.losses) / math.log(2) / self.num_bytes

    @property
    def bits_per_byte_stderr(self) -> float | None:
        """Standard error of `bits_per_byte`: instances differ in bytes per token too."""
        error = _ratio_error(self.losses, self.bytes) if self.bytes and self.num_bytes else None
        return None if error is None else error / math.log(2)


def _ratio_error(sums: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of r = sum(l_i) / sum(t_i) with instances as clusters, by linearisation (Cochran, Sampling
    Techniques, section 6.3): sqrt(n/(n-1) sum (l_i - r t_i)^2) / sum(t_i); None for fewer than two."""
    number, total = len(sums), sum(sizes)
    if number < 2:
        return None
    ratio = math.fsum(sums) / total
    squares = math.fsum((value - ratio * size) ** 2 for value, size in zip(sums, sizes, strict=True))
    return math.sqrt(number / (number - 1) * squares) / total


def exponential(nats: float) -> float:
    """exp, for a perplexity.

    :raises WorkError: where no number of 64 bits holds it.
    """
    try:
        return math.exp(nats)
    except OverflowError:
        raise WorkError(f"a loss of {nats:.4g} nats has no perplexity: the model has diverged") from None


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
    :raises InputError: if there is no instance.
    :raises WorkError: if a loss is not finite, naming the instance.
    """
    share = share or Share.current()
    number = len(instances) if limit is None else min(limit, len(instances))
    if number == 0:
        raise InputError("no instance to score", where=name)
    own = list(share.of(number))
    own_losses: dict[int, tuple[float, int, int]] = {}
    for start in range(0, len(own), batch_size):
        batch = own[start : start + batch_size]
        arrays = [np.asarray(instances.read(index)).astype(np.int64) for index in batch]
        ids = torch.from_numpy(np.stack(arrays))
        losses = token_losses(model.logits(ids), ids).double().sum(dim=1).cpu().tolist()
        for index, array, loss in zip(batch, arrays, losses, strict=True):
            size = 0 if token_bytes is None else int(token_bytes[array[1:]].sum())
            own_losses[index] = (loss, len(array) - 1, size)
    everything = share.gather(own_losses)
    for index, (loss, _, _) in everything.items():
        if not math.isfinite(loss):
            raise WorkError(f"{name}, instance {index}: the loss is {loss}")
    values = list(everything.values())
    return PerplexityResult(
        losses=tuple(loss for loss, _, _ in values),
        predicted=tuple(count for _, count, _ in values),
        bytes=None if token_bytes is None else tuple(size for _, _, size in values),
    )


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
    samples = "+".join(file.sample for file in files)
    if len(files) > 4:
        samples = f"{len(files)}files-{hashlib.sha256(samples.encode()).hexdigest()[:16]}"
    version = f"{samples}@{sequence_length}"
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
    """CrossEntropyLoss (nats per token), Perplexity and, where the vocabulary tells bytes, BitsPerByte of one set.

    :param sequence_length: tokens of an instance; by default the model's longest input.
    :raises InputError: for a length that the model does not take, or files that are no tokens of this vocabulary.
    """
    length = sequence_length or model.max_sequence_length
    if length > model.max_sequence_length:
        raise InputError(
            f"instances of {length} tokens, the model takes {model.max_sequence_length}",
            where="--sequence-length",
            right=f"at most {model.max_sequence_length}",
        )
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
    results = [
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
        results.append(
            Result(
                metric="BitsPerByte",
                value=bits,
                stderr=scored.bits_per_byte_stderr,
                details={**details, "bytes": scored.num_bytes},
                **common,
            )
        )
    return results
