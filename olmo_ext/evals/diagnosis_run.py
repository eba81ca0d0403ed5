"""Text for a diagnosis, and where its results go."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.evals.diagnosis import diagnose
from olmo_ext.evals.diagnosis_report import write_plot
from olmo_ext.evals.target import Target
from olmo_ext.evals.token_sets import first_tokens, read_text

LONGEST_SEQUENCE = 1024
TOKENS_PER_BATCH = 4096


def _tokens(target: Target, text: Path | None, number: int) -> np.ndarray:
    """Ids to read, shape (tokens,): of a text file, or the start of the run's first evaluation set."""
    if text is not None:
        return np.asarray(target.tokenizer.encode(read_text(text))[:number], dtype=np.int64)
    return first_tokens(target, number, purpose="to read")[0]


def diagnose_target(
    target: Target, *, text: Path | None, tokens: int, sequence_length: int | None = None
) -> dict[str, Any]:
    """Read at most `tokens` tokens in sequences of equal length and diagnose the model on them.

    :raises InputError: if the text is shorter than one sequence or the model takes no sequence so long.
    """
    longest = target.model.max_sequence_length
    length = sequence_length or min(longest, LONGEST_SEQUENCE, tokens)
    if length > longest:
        raise InputError(f"{target.name} takes {longest} tokens", where="--sequence-length", right=f"at most {longest}")
    ids = _tokens(target, text, tokens)
    if len(ids) < length:
        raise InputError(
            f"{len(ids)} tokens, a sequence has {length}", where=str(text or target.name), right="--sequence-length"
        )
    whole = torch.from_numpy(ids[: len(ids) // length * length].reshape(-1, length))
    content = diagnose(target.model, whole.split(max(1, TOKENS_PER_BATCH // length)))
    return {
        "target": target.name,
        "step": target.step,
        "checkpoint_sha256": target.checkpoint_sha256,
        "text_sha256": hashlib.sha256(whole.numpy().tobytes()).hexdigest(),
        "sequence_length": length,
        "tokens_left_out": int(len(ids) - whole.numel()),
        **content,
    }


def save(content: dict[str, Any], folder: Path, *, stem: str, target: Target, plot: bool) -> list[Path]:
    """Write `<stem>.json` and its plot, an HTML page; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{stem}.json"]
    write_atomically(written[0], json.dumps(content, indent=1) + "\n")
    if plot:
        written.append(folder / f"{stem}.html")
        write_plot(content, written[1], title=target.title)
    return written
