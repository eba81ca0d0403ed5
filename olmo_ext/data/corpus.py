"""Text to token files that a training can read: train and validation, tokenizer, manifest. No torch.

    DIR/manifest.json  tokenizer.json  train.bin  validation.bin  documents.jsonl

The token files are raw little-endian uint16 or uint32, every document followed by EOS, as OLMo's memory-mapped data
set reads them. The same text and settings give the same bytes; the folder appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import folder_aside, put_in_place, write_atomically
from olmo_ext.base.quantities import parse_count
from olmo_ext.config.corpus_manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    CorpusManifest,
    CorpusSplit,
    damaged_files,
    read_manifest,
)
from olmo_ext.data.corpus_sources import EmbeddedSource, TextSource
from olmo_ext.data.tokenizer import Tokenizer, load_tokenizer, train_bpe

SPLITS = ("train", "validation")
DEFAULT_VALIDATION_FRACTION = 0.02
BPE_TRAINING_BYTES = 256 * 2**20
"""A BPE sees at most this much of the training text: beyond it the merges hardly change and the memory does."""

BATCH_CHARACTERS = 1 << 21

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _SplitPlan:
    """Which documents are for validation, by the sha256 of their text: equal documents never stand on both sides."""

    validation: frozenset[bytes]
    cut_share: float | None = None
    """For a single document: the share of its text from which on it is validation."""

    def parts(self, text: str) -> list[tuple[str, str]]:
        """Split and text of each part of a document, none of them empty but where the text is a single character."""
        if self.cut_share is not None:
            wanted = max(1, min(int(len(text) * self.cut_share), len(text) - 1))
            # At a line, unless the lines are so long that validation would get twice what was asked for.
            earliest = max(len(text) - 2 * (len(text) - wanted), 0)
            cut = text.rfind("\n", earliest, wanted) + 1 or wanted
            return [("train", text[:cut]), ("validation", text[cut:])]
        digest = hashlib.sha256(text.encode()).digest()
        return [("validation" if digest in self.validation else "train", text)]


def _plan_split(sizes: dict[bytes, int], total: int, fraction: float) -> _SplitPlan:
    """Take documents in order of their hashes while they fit into the fraction, at least one.

    :param sizes: digest -> bytes of text, copies together.
    """
    if fraction == 0:
        return _SplitPlan(validation=frozenset())
    if len(sizes) == 1:
        return _SplitPlan(validation=frozenset(), cut_share=1 - fraction)
    budget = fraction * total
    chosen: list[bytes] = []
    for digest in sorted(sizes):
        if sizes[digest] <= budget and len(chosen) < len(sizes) - 1:
            chosen.append(digest)
            budget -= sizes[digest]
    return _SplitPlan(validation=frozenset(chosen or [min(sizes, key=lambda digest: (sizes[digest], digest))]))


class _TokenWriter:
    """One split's token file with its running totals."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, dtype
        self.documents = self.bytes = self.tokens = 0
        self._digest = hashlib.sha256()
        self._file = open(path, "wb")

    def write(self, ids: list[int]) -> None:
        raw = np.asarray(ids, dtype=self.dtype).tobytes()
        self._digest.update(raw)
        self._file.write(raw)
        self.tokens += len(ids)

    def close(self) -> CorpusSplit:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return CorpusSplit(
            file=self.path.name,
            documents=self.documents,
            bytes=self.bytes,
            tokens=self.tokens,
            sha256=self._digest.hexdigest(),
        )


def _parse_tokenizer(name: str) -> tuple[int | None, Tokenizer | None]:
    """(entries of a BPE to be trained, None) or (None, a tokenizer that exists)."""
    kind, colon, number = name.partition(":")
    if kind != "bpe" or (not colon and Path(name).exists()):
        return None, load_tokenizer(name)
    try:
        entries = parse_count(number)
    except ValueError:
        raise InputError(
            f"tokenizer {name!r}", where="--tokenizer", right="bpe:4096, dolma2 or a tokenizer.json"
        ) from None
    if entries < 258:
        raise InputError(f"a BPE of {entries} entries", where="--tokenizer", right="at least 258: bytes, EOS, padding")
    return entries, None


def _training_texts(source: TextSource, plan: _SplitPlan) -> Iterator[str]:
    seen = 0
    for _, text in source.documents():
        for split, part in plan.parts(text):
            if split == "train":
                seen += len(part.encode())
                yield part
        if seen > BPE_TRAINING_BYTES:
            return


def _encode(
    source: TextSource,
    plan: _SplitPlan,
    tokenizer: Tokenizer,
    writers: dict[str, _TokenWriter],
    documents_file: Path | None,
    say: Say,
) -> str:
    """Write every document's ids, followed by EOS; returns the hash that `_scan` gives for the same text."""
    pending: list[tuple[str, str, bool]] = []
    counts: list[dict[str, Any]] = []
    characters = done = reported = 0
    whole = hashlib.sha256()

    def flush() -> None:
        nonlocal characters
        encoded = tokenizer.encode_batch([piece for _, piece, _ in pending])
        for (split, _, last), ids in zip(pending, encoded, strict=True):
            writers[split].write([*ids, tokenizer.eos_token_id] if last else ids)
        pending.clear()
        characters = 0

    for name, text in source.documents():
        whole.update(hashlib.sha256(text.encode()).digest())
        for split, part in plan.parts(text):
            size = len(part.encode())
            writers[split].documents += 1
            writers[split].bytes += size
            done += size
            if documents_file is not None:
                digest = hashlib.sha256(part.encode()).hexdigest()
                counts.append({"file": name, "split": split, "bytes": size, "sha256": digest})
            pieces = list(tokenizer.pieces(part))
            for number, piece in enumerate(pieces, start=1):
                pending.append((split, piece, number == len(pieces)))
                characters += len(piece)
                if characters >= BATCH_CHARACTERS:
                    flush()
        if done - reported >= 20_000_000:
            reported = done
            say(f"tokenised {done / 1e6:,.0f} MB")
    flush()
    if documents_file is not None:
        write_atomically(documents_file, "".join(json.dumps(row) + "\n" for row in counts))
    return whole.hexdigest()


def _scan(source: TextSource) -> tuple[dict[bytes, int], int, str]:
    """Digest -> bytes of every document, their sum, and a hash of them all in order."""
    sizes: dict[bytes, int] = {}
    whole = hashlib.sha256()
    total = 0
    for _, text in source.documents():
        content = text.encode()
        digest = hashlib.sha256(content).digest()
        sizes[digest] = sizes.get(digest, 0) + len(content)
        total += len(content)
        whole.update(digest)
    return sizes, total, whole.hexdigest()


def _request(text_digest: str, tokenizer_name: str, tokenizer: Tokenizer | None, fraction: float) -> str:
    parts = [FORMAT, text_digest, tokenizer.fingerprint if tokenizer else tokenizer_name, fraction]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _what_is_there(output: Path, request: str, say: Say) -> CorpusManifest | None:
    """The finished corpus of this request, or None if it has to be made; anything else in the way is an error."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / MANIFEST).is_file():
        raise InputError("holds something that is no corpus", where=str(output), right="name a new folder")
    manifest = read_manifest(output)
    if manifest.request != request:
        held = sum(split.bytes for split in manifest.splits.values())
        raise InputError(
            f"holds a corpus of other text or settings ({manifest.content['source']}, {held:,} bytes,"
            f" {manifest.tokenizer}, validation {manifest.content['validation_fraction']:.2%})",
            where=str(output),
            right="name a new folder, or remove this one yourself",
        )
    if damaged := damaged_files(manifest):
        say(f"{', '.join(damaged)} in {output} is damaged: made again")
        return None
    return manifest


def _move_into_place(aside: Path, output: Path, request: str) -> None:
    damaged = (output / MANIFEST).is_file() and read_manifest(output).request == request
    try:
        put_in_place(aside, output, replace=damaged)
    except OSError as error:
        raise WorkError(f"{output}: appeared while the corpus was made ({error.strerror}); call again") from None


def build_corpus(
    source: TextSource | None,
    output: Path | str,
    *,
    tokenizer: str = "bpe:4096",
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    say: Say = lambda message: None,
) -> tuple[CorpusManifest, bool]:
    """Make a corpus folder, or find that it is made.

    :param source: the documents; None for the whole embedded corpus.
    :param tokenizer: `bpe:N` (trained on the training split), `dolma2`, or a tokenizer.json.
    :param validation_fraction: of the bytes of text, in whole documents chosen by the hash of their text; a single
        document is cut, at a line where one ends near.
    :param say: gets a line now and then.
    :return: the manifest, and whether anything was written.
    :raises InputError: for input that cannot be used and for a folder that holds something else.
    :raises WorkError: the disk failed, or the text changed meanwhile; nothing is left in the folder.
    """
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation fraction {validation_fraction}", right="at least 0 and less than 1")
    output = Path(output)
    source = source or EmbeddedSource()
    bpe_entries, built = _parse_tokenizer(tokenizer)
    say("reading the text")
    sizes, total, text_digest = _scan(source)
    if not sizes:
        raise InputError("there is no text", right="at least one document that is not empty")
    request = _request(text_digest, f"bpe:{bpe_entries}", built, validation_fraction)
    if (finished := _what_is_there(output, request, say)) is not None:
        return finished, False
    plan = _plan_split(sizes, total, validation_fraction)
    if bpe_entries is not None:
        say(f"training a BPE of {bpe_entries:,} entries on {min(total, BPE_TRAINING_BYTES) / 1e6:,.0f} MB")
        built = train_bpe(_training_texts(source, plan), vocab_size=bpe_entries)
        if built.vocab_size < bpe_entries:
            say(f"the text is too short for more than {built.vocab_size:,} of {bpe_entries:,} entries")
    assert built is not None
    dtype = np.dtype("<u2" if built.vocab_size <= 2**16 else "<u4")
    with folder_aside(output) as aside:
        try:
            writers = {
                name: _TokenWriter(aside / f"{name}.bin", dtype) for name in SPLITS[: 1 + (validation_fraction > 0)]
            }
            counted = aside / "documents.jsonl" if source.whole_files else None
            if _encode(source, plan, built, writers, counted, say) != text_digest:
                raise WorkError(f"{output}: the text has changed while the corpus was made; call again")
            splits = {name: writer.close() for name, writer in writers.items()}
            write_atomically(aside / TOKENIZER, built.to_json_text())
            identity = [built.fingerprint, dtype.name, [(name, split.sha256) for name, split in splits.items()]]
            content = {
                "format": FORMAT,
                "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
                "request": request,
                "source": source.name,
                "dtype": dtype.name,
                "vocab_size": built.vocab_size,
                "eos_token_id": built.eos_token_id,
                "pad_token_id": built.pad_token_id,
                "tokenizer": {"name": tokenizer, "file": TOKENIZER, "fingerprint": built.fingerprint},
                "validation_fraction": validation_fraction,
                "splits": {name: split.__dict__ for name, split in splits.items()},
                "files": source.describe(),
                "left_out": source.left_out,
            }
            write_atomically(aside / MANIFEST, json.dumps(content, indent=1) + "\n")
            _move_into_place(aside, output, request)
        except OSError as error:
            # A source may have become unreadable too.
            raise WorkError(f"{error.filename or output}: {error.strerror or error}") from None
    return read_manifest(output), True
