"""Compact descriptions expand to the published lists, and a source is read from wherever it lies."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import pytest
import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.data.sources import expand, load_source, packaged_sources, parse_map

PUBLISHED_SHA256 = "eabf4ae9c05665249233fec9dbfc000a6188500cfd377a188a151a71f443eade"
ROOT = Path(__file__).parents[2]


def test_the_stage_1_description_expands_to_exactly_the_published_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = load_source("olmo2-1b-stage1")
    assert len(source.paths) == 1122 and len(set(source.paths)) == 1117
    assert source.list_sha256 == PUBLISHED_SHA256
    doubled = [k for k in range(1121) if source.paths[k] == source.paths[k + 1]]
    assert [source.paths[k].rsplit("part-", 1)[1] for k in doubled] == [f"104-0000{k}.npy" for k in range(5)]
    assert list(dict.fromkeys(source.groups)) == [
        "algebraic-stack",
        "arxiv",
        "open-web-math",
        "pes2o",
        "starcoder",
        "dclm",
        "wiki",
    ]


def test_the_validation_sets_are_the_eleven() -> None:
    source = load_source("olmo2-validation")
    assert len(source.paths) == 11 and all(path.endswith("/val/part-0-00000.npy") for path in source.paths)
    assert all(group.endswith("-validation") for group in source.groups)


def test_the_users_copies_equal_those_in_the_package() -> None:
    packaged = importlib.resources.files("olmo_ext.resources") / "data"
    names = packaged_sources()
    assert sorted(path.stem for path in (ROOT / "configs/data").glob("*.yaml")) == names
    for name in names:
        assert (ROOT / f"configs/data/{name}.yaml").read_text() == (packaged / f"{name}.yaml").read_text()


def test_the_users_copy_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/data").mkdir(parents=True)
    mine = {"name": "mine", "groups": [{"files": "a/{0..2}.npy"}]}
    (tmp_path / "configs/data/olmo2-1b-stage1.yaml").write_text(yaml.safe_dump(mine))
    assert load_source("olmo2-1b-stage1").paths == ["a/0.npy", "a/1.npy", "a/2.npy"]


def test_an_edited_description_of_the_published_list_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "configs/data/olmo2-1b-stage1.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace("{000..187}", "{000..186}"))
    with pytest.raises(InputError, match="expands to 1117 paths .* the published list has eabf4ae9c056"):
        load_source(tmp_path / "edited.yaml")


def test_ranges_expand_rightmost_fastest_and_keep_their_width() -> None:
    assert expand("p{08..10}-{0..1}", where="") == ["p08-0", "p08-1", "p09-0", "p09-1", "p10-0", "p10-1"]
    for bad in ("p{3..1}", "p{a,b}", "p{1..}"):
        with pytest.raises(InputError):
            expand(bad, where="here")


def test_a_config_of_olmo_is_a_source_as_it_stands(tmp_path: Path) -> None:
    config = {
        "run_name": "theirs",
        "model": {"max_sequence_length": 2048, "vocab_size": 100278},
        "data": {"paths": ["/x/b.npy", "/x/a.npy", "/x/b.npy"], "memmap_dtype": "uint32"},
        "tokenizer": {"identifier": "tokenizers/allenai_dolma2.json"},
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(config))
    source = load_source(tmp_path / "theirs.yaml")
    assert source.paths == ["/x/b.npy", "/x/a.npy", "/x/b.npy"]
    assert (source.sequence_length, source.dtype, source.vocabulary_size) == (2048, "uint32", 100278)


def test_a_text_file_is_a_list(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("# mine\n/x/a.npy\n\n/x/b.npy\n")
    assert load_source(tmp_path / "list.txt").paths == ["/x/a.npy", "/x/b.npy"]


def test_the_longest_mapped_prefix_wins(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("http://a/b/c.npy\nhttp://a/d.npy\nhttp://z/e.npy\n")
    source = load_source(tmp_path / "list.txt", locations=parse_map(["http://a/=/disk/", "http://a/b/=s3://bucket/"]))
    assert [source.location(path) for path in source.paths] == ["s3://bucket/c.npy", "/disk/d.npy", "http://z/e.npy"]


def test_what_is_no_source_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no source 'nope'; .*olmo2-1b-stage1"):
        load_source("nope")
    for content in ("groups: [{file: x}]", "gruops: []", "just text", "groups: [{files: x}]\nsed: 1", "a: [", "{}"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(InputError):
            load_source(tmp_path / "bad.yaml")
    for content, message in (
        ("groups: 5", "groups: 5; a list"),
        ("groups:", "groups: None; a list"),
        ("groups: [{files: }]", r"groups\[0\]: files: None; a path"),
        ("groups: [{files: x, twice: y}]", "twice: 'y' is none of its files"),
        ("groups: [{files: x}]\nsequence_length: 0", "sequence_length: 0; a whole number above 0"),
        ("groups: [{files: x}]\nsequence_length: 4096.5", "sequence_length: 4096.5; a whole number"),
        ("groups: [{files: x}]\nvocabulary_size: many", "vocabulary_size: 'many'; a whole number"),
        ("groups: [{files: x}]\nmap: [1]", "map: .*; a mapping"),
        ("groups: [{files: x}]\nlist_sha256: 5", "the published list has 5"),
        ("data: {paths: abc.npy}", "paths: 'abc.npy'; a list"),
        ("data: {paths: [a]}\nmodel: {vocab_size: 100278}", "uint16 holds ids up to 65,535, .* 100,278; uint32"),
        ("data: {paths: [a]}\ntokenizer: gpt2", "tokenizer: 'gpt2'; a mapping"),
    ):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(InputError, match=f"bad.yaml.*{message}"):
            load_source(tmp_path / "bad.yaml")
    with pytest.raises(InputError, match="FROM=TO"):
        parse_map(["http://a/"])
