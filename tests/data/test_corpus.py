"""The corpus: the same text gives the same bytes, nothing is lost or overwritten in silence, errors name the place."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.config.corpus_manifest import corpus_config, read_manifest
from olmo_ext.data.corpus import build_corpus
from olmo_ext.data.corpus_command import corpus
from olmo_ext.data.corpus_sources import EmbeddedSource, FileSource
from olmo_ext.data.tokenizer import load_tokenizer

ZSTD_FRAME = zstandard.compress(b'{"text": "x"}\n' * 9)
EMBEDDED = ("-c", "import sys; from olmo_ext.data.corpus_command import corpus; corpus(sys.argv[1:])")


def build_embedded(output: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *EMBEDDED, "-o", str(output), "--max-bytes", "600KB", *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def tokens_of(directory: Path, split: str) -> list[int]:
    manifest = read_manifest(directory)
    return np.fromfile(manifest.path(split), dtype=manifest.dtype).tolist()


def texts_of(directory: Path, split: str) -> list[str]:
    """Documents decoded again, cut at the EOS tokens."""
    tokenizer = load_tokenizer(directory)
    documents, current = [], []
    for token in tokens_of(directory, split):
        if token == tokenizer.eos_token_id:
            documents.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    assert not current, "the file does not end with EOS"
    return documents


def write_documents(folder: Path, number: int = 12) -> list[str]:
    folder.mkdir(parents=True)
    texts = [f"Document {n}: übung <|endoftext|> {'word ' * n}\nlast line {n * n}" for n in range(number)]
    for n, text in enumerate(texts):
        (folder / f"{n:02d}.txt").write_text(text)
    return texts


def test_embedded_corpus_has_the_same_bytes_whatever_the_threads_and_hash_seed(tmp_path: Path) -> None:
    first = build_embedded(tmp_path / "a", RAYON_NUM_THREADS="1", PYTHONHASHSEED="1")
    second = build_embedded(tmp_path / "b", RAYON_NUM_THREADS="3", PYTHONHASHSEED="2")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["documents.jsonl", "manifest.json", "tokenizer.json", "train.bin", "validation.bin"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    manifest = read_manifest(tmp_path / "a")
    assert (manifest.vocab_size, manifest.dtype, manifest.eos_token_id) == (4096, "uint16", 0)
    assert 300_000 < sum(split.bytes for split in manifest.splits.values()) <= 600_000
    assert {row["package"] for row in manifest.content["files"]} == {"python", "torch", "transformers"}
    documents = [json.loads(line) for line in (tmp_path / "a" / "documents.jsonl").read_text().splitlines()]
    for name, split in manifest.splits.items():
        own = [row for row in documents if row["split"] == name]
        assert (len(own), sum(row["bytes"] for row in own)) == (split.documents, split.bytes)
        assert split.tokens == len(tokens_of(tmp_path / "a", name))
        assert tokens_of(tmp_path / "a", name).count(manifest.eos_token_id) == split.documents
    assert len({row["sha256"] for row in documents}) == len(documents)


def test_embedded_corpus_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from olmo_ext.data import corpus, corpus_command, tokenizer\n"
        "from olmo_ext.data.corpus_sources import EmbeddedSource\n"
        "next(EmbeddedSource().documents()); tokenizer.load_tokenizer('dolma2')\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'olmo', 'pandas') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_copies_and_near_copies_of_a_file_are_left_out_and_counted(tmp_path: Path) -> None:
    body = "".join(f"def function_number_{n}(argument): return argument * {n}\n" for n in range(20))
    for name, text in {
        "a.py": body,
        "copy.py": body,
        "near.py": body + "variable_of_its_own = 1\n",
        "other.py": "".join(f"class Unlike{n}(Exception): number = {n}\n" for n in range(20)),
        "empty.py": " \n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "data.bin").write_bytes(b"not a source")
    source = EmbeddedSource(folders={"p": ("1", tmp_path)})
    names = [name for name, _ in source.documents()]
    assert len(names) == 2 and "p/other.py" in names
    assert source.left_out == {"duplicate": 2, "empty": 1, "not UTF-8": 1}
    assert names == [name for name, _ in source.documents()]


def test_every_document_comes_back_and_text_never_becomes_a_special_token(tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "in")
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300", validation_fraction=0.2)
    train, validation = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert sorted(train + validation) == sorted(texts)
    assert validation and train == [text for text in texts if text in train]


def test_dolma2_corpus_equals_the_tokenizer_in_the_wheel(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    texts = write_documents(tmp_path / "in", 3)
    manifest, _ = build_corpus(
        FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="dolma2", validation_fraction=0
    )
    reference = Tokenizer.from_str((tmp_path / "out" / "tokenizer.json").read_text())
    reference.encode_special_tokens = True
    expected = [token for text in texts for token in [*reference.encode(text).ids, 100257]]
    assert (manifest.dtype, manifest.vocab_size, list(manifest.splits)) == ("uint32", 100278, ["train"])
    assert tokens_of(tmp_path / "out", "train") == expected
    assert corpus_config(tmp_path / "out")["model"]["embedding_size"] == 100352
    assert corpus_config(tmp_path / "out")["tokenizer"]["identifier"] == "tokenizers/allenai_dolma2.json"
    assert "evaluators" not in corpus_config(tmp_path / "out")


def test_text_in_all_formats_is_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "in"
    folder.mkdir()
    row = '{{"text": "from {}", "id": 1}}\n'
    (folder / "a.md").write_text("from md")
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbffrom txt")
    (folder / "c.jsonl").write_text(row.format("jsonl") + "\n" + row.format("jsonl again"))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(row.format("gz").encode()))
    (folder / "e.jsonl.zst").write_bytes(zstandard.compress(row.format("zst").encode()))
    (folder / "f.csv").write_text("text,id\nfrom csv,1\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["from parquet", " "]}), folder / "g.parquet")
    (folder / "h.json").write_text('[{"text": "from json"}]')
    (folder / "i.tsv").write_text("id\ttext\n1\tfrom tsv\n")
    (folder / "j.csv.gz").write_bytes(gzip.compress(b"text,id\nfrom csv.gz,1\n"))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    source = FileSource([folder])
    assert [text.removeprefix("from ") for _, text in source.documents()] == (
        ["md", "txt", "jsonl", "jsonl again", "gz", "zst", "csv", "parquet", "json", "tsv", "csv.gz"]
    )
    assert source.left_out == {"no text, or a link that leads to no file": 1, "empty": 1}


def test_every_frame_of_a_zst_file_is_read(tmp_path: Path) -> None:
    rows = ["".join(f'{{"text": "{n} of {part}"}}\n' for n in range(9000)).encode() for part in range(2)]
    (tmp_path / "A.JSONL.ZST").write_bytes(b"".join(map(zstandard.compress, rows)))
    texts = [text for _, text in FileSource([tmp_path / "A.JSONL.ZST"]).documents()]
    assert len(texts) == 18_000 and texts[-1] == "8999 of 1"


def test_an_empty_cell_or_null_is_an_empty_document_that_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\n,1\nhallo,2\n")
    (tmp_path / "b.jsonl").write_text('{"text": null}\n{"text": "x"}\n')
    source = FileSource([tmp_path])
    assert [text for _, text in source.documents()] == ["hallo", "x"] and source.left_out == {"empty": 2}


def test_a_bpe_that_the_text_is_too_short_for_is_said_to_be_smaller(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    said: list[str] = []
    manifest, _ = build_corpus(
        FileSource([tmp_path / "a.txt"]), tmp_path / "out", tokenizer="bpe:4096", say=said.append
    )
    assert f"the text is too short for more than {manifest.vocab_size:,} of 4,096 entries" in said


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    for name in ("a1.csv", "a[1].csv"):
        (tmp_path / name).write_text(f"text\nfrom {name}\n")
    assert [text for _, text in FileSource([tmp_path / "a[1].csv"]).documents()] == ["from a[1].csv"]


def test_links_in_a_folder_are_read_or_counted(tmp_path: Path) -> None:
    write_documents(tmp_path / "elsewhere", 3)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.txt").symlink_to(tmp_path / "elsewhere" / "01.txt")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "broken.txt").symlink_to(tmp_path / "nowhere")
    source = FileSource([tmp_path / "in"])
    assert len(list(source.documents())) == 1
    assert source.left_out == {"no text, or a link that leads to no file": 2}


def test_a_data_set_saved_to_disk_is_read(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"body": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    source = FileSource([tmp_path / "saved"], text_field="body")
    assert [text for _, text in source.documents()] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n', "line 2: no text in field 'text' (there is: body)"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: half a surrogate pair"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9], "after line 9: cannot be read"),
        ("a.jsonl.zst", ZSTD_FRAME[:-3], "after line 0: cannot be read (the file ends within a frame)"),
        ("a.jsonl.zst", ZSTD_FRAME * 2 + ZSTD_FRAME[:9], "after line 18: cannot be read"),
        ("a.jsonl.zst", b"not zstandard", "after line 0: cannot be read"),
        ("a.txt", b"ab\xff", "a.txt, offset 2: not UTF-8"),
        ("a.csv", b"id\n1\n", "row 0: no text in field 'text' (there is: id)"),
        ("a.pdf", b"%PDF", "unknown kind of file"),
        ("a.txt", b" \n", "there is no text"),
    ],
)
def test_bad_input_is_one_line_that_names_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        build_corpus(FileSource([tmp_path / name]), tmp_path / "out", tokenizer="bpe:300")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_single_document_is_cut_at_a_line_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {n} of one long document\n" for n in range(500))
    (tmp_path / "one.txt").write_text(text)
    build_corpus(FileSource([tmp_path / "one.txt"]), tmp_path / "out", tokenizer="bpe:300", validation_fraction=0.1)
    (train,), (validation,) = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert train + validation == text and train.endswith("\n")
    assert 0.09 < len(validation) / len(text) < 0.11


@pytest.mark.parametrize("text", ["title\n" + "word " * 2000, "word " * 2000 + "\nlast", "no line at all " * 500])
def test_a_single_document_of_long_lines_gives_validation_its_share(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.txt").write_text(text)
    build_corpus(FileSource([tmp_path / "one.txt"]), tmp_path / "out", tokenizer="bpe:300", validation_fraction=0.1)
    (train,), (validation,) = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert train + validation == text and 0.09 < len(validation) / len(text) < 0.21


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("another text"), "out: the text has changed"),
        (lambda path: path.unlink(), "00.txt: No such file"),
    ],
)
def test_text_that_changes_or_goes_while_the_corpus_is_made_leaves_no_corpus(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    class Unsteady(FileSource):
        def documents(self) -> Iterator[tuple[str, str]]:
            yield from super().documents()
            change(tmp_path / "in" / "00.txt")

    write_documents(tmp_path / "in")
    with pytest.raises(WorkError, match=message):
        build_corpus(Unsteady([tmp_path / "in"]), tmp_path / "out", tokenizer="dolma2")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["bpe:", "bpe:,", "bpe:_", "bpe:many", "bpe", "bpe:257"])
def test_a_bpe_without_a_size_is_refused(tmp_path: Path, name: str) -> None:
    write_documents(tmp_path / "in")
    with pytest.raises(InputError, match="--tokenizer"):
        build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer=name)


def test_equal_documents_stand_on_one_side(tmp_path: Path) -> None:
    rows = [f"text {n % 5}" for n in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    build_corpus(FileSource([tmp_path / "a.jsonl"]), tmp_path / "out", tokenizer="bpe:300", validation_fraction=0.3)
    train, validation = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert len(train) + len(validation) == 50 and validation and not set(train) & set(validation)


def test_a_second_call_changes_nothing_and_another_request_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "in")
    arguments = [str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--tokenizer", "bpe:300"]
    first = CliRunner().invoke(corpus, [*arguments, "--json"], catch_exceptions=False)
    assert json.loads(first.stdout)["written"]
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out").iterdir()}
    second = CliRunner().invoke(corpus, [*arguments, "--json"], catch_exceptions=False)
    assert not json.loads(second.stdout)["written"]
    for other in (["--tokenizer", "bpe:290"], ["--validation-fraction", "10%"]):
        with pytest.raises(InputError, match="other text or settings"):
            CliRunner().invoke(corpus, [*arguments, *other], catch_exceptions=False)
    (tmp_path / "in" / "new.txt").write_text("one more")
    with pytest.raises(InputError, match="other text or settings"):
        CliRunner().invoke(corpus, arguments, catch_exceptions=False)
    assert before == {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json"])
def test_a_damaged_file_is_made_again(tmp_path: Path, name: str) -> None:
    write_documents(tmp_path / "in")
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300")
    good = (tmp_path / "out" / name).read_bytes()
    (tmp_path / "out" / name).write_bytes(good[:-2])
    said: list[str] = []
    _, written = build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300", say=said.append)
    assert written and (tmp_path / "out" / name).read_bytes() == good and any(name in line for line in said)


def test_a_folder_that_is_no_corpus_is_not_touched(tmp_path: Path) -> None:
    write_documents(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="no corpus"):
        build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.once
def test_a_killed_build_leaves_no_corpus_and_its_rest_is_cleared(tmp_path: Path) -> None:
    write_documents(tmp_path / "in")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    node = os.uname().nodename
    dead, alive = tmp_path / f"out-aside-{node}-{gone.pid}", tmp_path / f"out-aside-{node}-{os.getppid()}"
    theirs, elsewhere = tmp_path / f"out-replaced-{node}-mine", tmp_path / f"out-aside-of-another-machine-{gone.pid}"
    for folder in (dead, alive, theirs, elsewhere):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"half")
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300")
    assert not dead.exists() and alive.exists() and theirs.exists() and elsewhere.exists()


def test_corpus_config_is_what_a_run_config_takes(tmp_path: Path) -> None:
    from olmo_ext.config.run_config import load_run_config

    write_documents(tmp_path / "in")
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300")
    config = load_run_config(
        {"model": {"d_model": 64, "n_heads": 4, "n_layers": 2}, "data": {"corpus": tmp_path / "out"}}
    )
    assert config.model.vocab_size == 300 and config.model.embedding_size == 384
    assert config.data.paths == [str(tmp_path / "out" / "train.bin")]
    assert config.data.memmap_dtype == "uint16"
    (evaluator,) = config.evaluators
    assert evaluator.data.datasets == {"validation": [str(tmp_path / "out" / "validation.bin")]}


def test_a_corpus_file_that_was_cut_is_named_before_a_run_knows_it(tmp_path: Path) -> None:
    """A first start has no fingerprint to compare with: it would train on less, without a word."""
    from olmo_ext.config.run_config import load_run_config
    from olmo_ext.data.fingerprint import data_fingerprint, evaluation_fingerprints

    write_documents(tmp_path / "in", 40)
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300", validation_fraction=0.3)
    model = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_sequence_length": 16}
    values = load_run_config({"model": model, "data": {"corpus": tmp_path / "out"}})
    data_fingerprint(values), evaluation_fingerprints(values)
    for name, check in (("train.bin", data_fingerprint), ("validation.bin", evaluation_fingerprints)):
        size = (tmp_path / "out" / name).stat().st_size
        os.truncate(tmp_path / "out" / name, size - 64)
        with pytest.raises(InputError, match=f"{name}: {size - 64:,} bytes, the corpus was made with {size:,}"):
            check(values)


def test_a_runs_own_config_loads_where_its_corpus_is_no_more(tmp_path: Path) -> None:
    """Its weights are exported, evaluated and compared, and the run goes on from where the corpus lies now."""
    from olmo_ext.base.errors import InputError
    from olmo_ext.config.run_config import load_run_config

    write_documents(tmp_path / "in")
    build_corpus(FileSource([tmp_path / "in"]), tmp_path / "out", tokenizer="bpe:300")
    model = {"d_model": 64, "n_heads": 4, "n_layers": 2}
    config = load_run_config({"model": model, "data": {"corpus": tmp_path / "out"}})
    (tmp_path / "config.yaml").write_text(config.dump())
    (tmp_path / "out").rename(tmp_path / "moved")
    stored = load_run_config(tmp_path / "config.yaml")
    assert {**stored.plain(), "run_name": None} == {**config.plain(), "run_name": None}
    moved = load_run_config({"model": model, "data": {"corpus": tmp_path / "moved"}})
    assert moved.identity() == stored.identity()
    with pytest.raises(InputError, match="no corpus"):
        load_run_config({"model": model, "data": {"corpus": tmp_path / "out"}})
