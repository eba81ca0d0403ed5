"""Token sources: named lists of files, written compactly, read from where a map says they lie. No torch.

A source is one of: a name (`configs/data/NAME.yaml`, else the copy inside the package), a YAML of ours, a YAML of
OLMo (`data.paths` as they stand), or a text file with a path a line.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.resources
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.data.tokens import check_dtype

USER_FOLDER = Path("configs/data")
KEYS = ("name", "dtype", "sequence_length", "vocabulary_size", "tokenizer", "prefix", "groups", "list_sha256", "map")
GROUP_KEYS = ("name", "files", "twice")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A list of token files and how to read them."""

    name: str
    paths: list[str]
    """Every entry in order, as published; a file may be listed more than once."""

    groups: list[str]
    """The group of each entry."""

    dtype: str = "uint32"
    sequence_length: int = 4096
    vocabulary_size: int | None = None
    tokenizer: str | None = None
    locations: dict[str, str] = field(default_factory=dict)
    """Prefix of a path -> what it is read from instead."""

    def location(self, path: str) -> str:
        """Where a file is read from: the longest mapped prefix wins."""
        return mapped(path, self.locations)

    @property
    def list_sha256(self) -> str:
        """sha256 of the list as text, one path a line."""
        return hashlib.sha256(("\n".join(self.paths) + "\n").encode()).hexdigest()


def mapped(path: str, locations: Mapping[str, str]) -> str:
    """A path with its longest mapped prefix replaced."""
    prefix = max((old for old in locations if path.startswith(old)), key=len, default=None)
    return path if prefix is None else locations[prefix] + path[len(prefix) :]


def parse_map(entries: Sequence[str]) -> dict[str, str]:
    """`FROM=TO` strings of a command line."""
    locations = {}
    for entry in entries:
        old, equals, new = entry.partition("=")
        if not equals or not old or not new:
            raise InputError(f"--map {entry!r}", right="FROM=TO, as in http://olmo-data.org/=/data/olmo/")
        locations[old] = new
    return locations


def expand(pattern: str, *, where: str) -> list[str]:
    """`part-{00..15}-{0..4}.npy` as its list, the rightmost range fastest; the width of the first number is kept."""
    pieces = _RANGE.split(pattern)
    if any(character in text for text in pieces[::3] for character in "{}"):
        raise InputError(f"{pattern!r} has braces that are no range", where=where, right="write {000..187}")
    choices: list[list[str]] = []
    for start, stop in zip(pieces[1::3], pieces[2::3], strict=True):
        if int(stop) < int(start):
            raise InputError(f"range {start}..{stop} runs backwards", where=where, right=f"{{{stop}..{start}}}")
        choices.append([f"{number:0{len(start)}d}" for number in range(int(start), int(stop) + 1)])
    texts = pieces[::3]
    return [
        texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))
        for numbers in itertools.product(*choices)
    ]


def packaged_sources() -> list[str]:
    """Names of the sources inside the package."""
    folder = importlib.resources.files("olmo_ext.resources") / "data"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_source(name: str | Path, *, locations: Mapping[str, str] | None = None) -> Source:
    """A source by name or file.

    :param locations: a map that is added to the source's own and wins.
    :raises InputError: unknown name, unknown key, or a list that is not the published one.
    """
    path, text = Path(name), None
    if not path.is_file():
        if re.fullmatch(r"[\w.-]+", str(name)):
            mine = USER_FOLDER / f"{name}.yaml"
            packaged = importlib.resources.files("olmo_ext.resources") / "data" / f"{name}.yaml"
            path = mine if mine.is_file() else Path(str(packaged))
            text = packaged.read_text() if not mine.is_file() and packaged.is_file() else None
        if text is None and not path.is_file():
            raise InputError(
                f"no source {str(name)!r}",
                right=f"a file, a name in {USER_FOLDER}, or one of {', '.join(packaged_sources())}",
            )
    where = str(path)
    try:
        content_text = path.read_text() if text is None else text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=where, right="a YAML, or a text file of paths") from None
    if path.suffix in (".yaml", ".yml"):
        source = _from_yaml(content_text, where=where)
    else:
        lines = [line.strip() for line in content_text.splitlines()]
        paths = [line for line in lines if line and not line.startswith("#")]
        source = Source(name=path.stem, paths=paths, groups=[""] * len(paths))
    if not source.paths:
        raise InputError("the list is empty", where=where, right="at least one file")
    check_dtype(source.dtype, source.vocabulary_size, where=where)
    return Source(**{**source.__dict__, "locations": {**source.locations, **(locations or {})}})


def _from_yaml(text: str, *, where: str) -> Source:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        what = f"not YAML ({' '.join(str(error).split())})"
        raise InputError(what, where=where, right="a source, or a config of OLMo") from None
    if not isinstance(content, dict):
        raise InputError("no mapping", where=where, right="name, dtype, groups .. or a config of OLMo")
    if "groups" in content:
        return _from_groups(content, where=where)
    if isinstance(content.get("data"), dict) and content["data"].get("paths"):
        return _from_olmo(content, where=where)
    raise InputError("neither `groups` nor `data.paths`", where=where, right="a source, or a config of OLMo")


_WORDS = {int: "a whole number above 0", str: "a text", list: "a list", dict: "a mapping"}


def _typed(content: Mapping[str, Any], key: str, kind: type, default: Any = None, *, where: str) -> Any:
    """A value of the right kind, or the default where the key is missing or null."""
    value = content.get(key)
    if value is None and kind is not list:
        return default
    if not isinstance(value, kind) or (isinstance(value, int) and (isinstance(value, bool) or value < 1)):
        raise InputError(f"{key}: {value!r}", where=where, right=_WORDS[kind])
    return value


def _from_groups(content: Mapping[str, Any], *, where: str) -> Source:
    for key in content:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}", where=where, right=f"one of {', '.join(KEYS)}")
    paths: list[str] = []
    groups: list[str] = []
    prefix, stated = str(content.get("prefix") or ""), str(content.get("list_sha256") or "")
    for number, group in enumerate(_typed(content, "groups", list, where=where)):
        here = f"{where}, groups[{number}]"
        if not isinstance(group, dict) or set(group) - set(GROUP_KEYS):
            raise InputError(f"{group!r}", where=here, right=f"keys {', '.join(GROUP_KEYS)}")
        files, doubled = group.get("files"), 0
        files = files if isinstance(files, list) else [files]
        if not files or not all(isinstance(one, str) and one for one in files):
            raise InputError(f"files: {group.get('files')!r}", where=here, right="a path, or a list of paths")
        for path in (path for one in files for path in expand(prefix + one, where=here)):
            twice = bool(group.get("twice")) and fnmatch.fnmatchcase(path, str(group["twice"]))
            doubled += twice
            paths += [path] * (1 + twice)
            groups += [str(group.get("name", number))] * (1 + twice)
        if group.get("twice") and not doubled:
            raise InputError(
                f"twice: {group['twice']!r} is none of its files", where=here, right="a pattern of the path"
            )
    source = Source(
        name=str(content.get("name", Path(where).stem)),
        paths=paths,
        groups=groups,
        dtype=content.get("dtype", "uint32"),
        sequence_length=_typed(content, "sequence_length", int, 4096, where=where),
        vocabulary_size=_typed(content, "vocabulary_size", int, where=where),
        tokenizer=_typed(content, "tokenizer", str, where=where),
        locations={str(old): str(new) for old, new in (_typed(content, "map", dict, where=where) or {}).items()},
    )
    if stated and stated != source.list_sha256:
        raise InputError(
            f"expands to {len(paths)} paths with sha256 {source.list_sha256[:12]}, the published list has"
            f" {stated[:12]}",
            where=where,
            right="undo the edit, or leave list_sha256 out for a list of your own",
        )
    return source


def _from_olmo(content: Mapping[str, Any], *, where: str) -> Source:
    data, model = content["data"], _typed(content, "model", dict, where=where) or {}
    paths = [str(path) for path in _typed(data, "paths", list, where=where)]
    unresolved = next((path for path in paths if "${" in path), None)
    if unresolved:
        raise InputError(f"{unresolved!r} is not resolved", where=f"{where}, data.paths", right="write the paths out")
    return Source(
        name=str(content.get("run_name", Path(where).stem)),
        paths=paths,
        groups=[""] * len(paths),
        dtype=data.get("memmap_dtype", "uint16"),
        sequence_length=_typed(model, "max_sequence_length", int, 4096, where=where),
        vocabulary_size=_typed(model, "vocab_size", int, where=where),
        tokenizer=(_typed(content, "tokenizer", dict, where=where) or {}).get("identifier"),
    )
