"""YAML as text and structure: what a scalar means is decided by the key it stands under, not by YAML 1.1.

PyYAML reads `4e-4` as text and `12:30:00` as 45000, OmegaConf reads the first as a float. Here a plain scalar stays the
text that was written (`Plain`) until the schema gives it a type, so the launcher and the trainer cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.base.errors import InputError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
STANDARD_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value")
}
LARGEST_TREE, DEEPEST_TREE = 2_000_000, 60
"""Values that a file may hold, aliases expanded, and levels of nesting."""

Origins = dict[str, str]
"""Dotted key -> where it was set, `file:line` or `command line`."""


class Plain(str):
    """An unquoted scalar, as written."""


def plain_value(value: Any) -> Any:
    """What an untyped plain scalar means: null, true, false, a number, or text (YAML 1.2's core rules)."""
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if not isinstance(value, Plain):
        return value
    if value in ("", "~", "null", "Null", "NULL"):
        return None
    if value in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return value.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return float(value)
    return str(value)


def is_null(value: Any) -> bool:
    return value is None or (isinstance(value, Plain) and plain_value(value) is None)


def _check_size(root: yaml.Node, name: str) -> None:
    """Refuse what aliases make endless or huge, and nesting that no config has, before anything is expanded.

    :raises InputError: naming the line.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    stack: list[tuple[yaml.Node, bool]] = [(root, False)]
    while stack:
        node, seen = stack.pop()
        place = f"{name}:{node.start_mark.line + 1}" if node.start_mark else name
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        if seen:
            open_nodes.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
            if sizes[id(node)] > LARGEST_TREE:
                raise InputError("YAML aliases that expand beyond all use", where=place, right="write it out")
        elif id(node) in open_nodes:
            raise InputError("a YAML alias inside what it stands for", where=place, right="write it out")
        elif id(node) not in sizes:
            open_nodes.add(id(node))
            if len(open_nodes) > DEEPEST_TREE:
                raise InputError(f"more than {DEEPEST_TREE} levels", where=place)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children)]


def _convert(node: yaml.Node, key: str, name: str, origins: Origins) -> Any:
    if key:
        origins[key] = f"{name}:{node.start_mark.line + 1}" if node.start_mark else name
    where = origins.get(key, name)
    if node.tag not in STANDARD_TAGS:
        raise InputError(f"YAML tag {node.tag!r}", where=where, right="only plain YAML is read")
    if isinstance(node, yaml.ScalarNode):
        return Plain(node.value) if not node.style else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, f"{key}.{i}" if key else str(i), name, origins) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("a key that is not text", where=where)
        word = key_node.value
        if word == "<<":
            raise InputError("YAML merge key '<<'", where=where, right="use `extends`")
        if word in result:
            line = key_node.start_mark.line + 1
            raise InputError(f"key {word!r} stands twice", where=f"{name}:{line}", right="keep one of them")
        result[word] = _convert(value_node, f"{key}.{word}" if key else word, name, origins)
    return result


def parse_yaml(text: str, *, name: str, origins: Origins | None = None, key: str = "") -> Any:
    """Parse YAML text into dicts, lists, `str` (quoted) and `Plain` (unquoted).

    :param name: what to call the source in errors: a file's path or `command line`.
    :param origins: filled with the place of every key.
    :raises InputError: for text that is not YAML, repeated keys and tags.
    """
    try:
        node = yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(f"not YAML: {getattr(error, 'problem', None) or error}", where=place) from None
    if node is None:
        return None
    _check_size(node, name)
    return _convert(node, key, name, {} if origins is None else origins)


def read_yaml(path: Path, origins: Origins | None = None) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", where=str(path)) from None
    tree = parse_yaml(text, name=str(path), origins=origins)
    if is_null(tree):
        return {}
    if not isinstance(tree, dict):
        raise InputError("holds no `key: value` lines", where=str(path), right="a config is a YAML mapping")
    return tree


def merge(base: Any, over: Any) -> Any:
    """Merge mappings deeply; anything else (lists too) is replaced by `over`."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}
    return over


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is neither a mapping nor a list."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{key}.{index}" if key else str(index))
    else:
        yield key, tree


def set_key(tree: dict[str, Any], dotted: str, value: Any, *, where: str) -> None:
    """Set `a.b.0.c`, making mappings on the way; numbers index existing lists."""
    parts = dotted.split(".")
    node: Any = tree
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        path = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                right = f"0 to {len(node) - 1}" if node else "a list, written as a whole"
                raise InputError(f"no element {part!r} in a list of {len(node)}", where=f"{where}, {path}", right=right)
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise InputError(f"{'.'.join(parts[:depth])} is a single value", where=f"{where}, {path}")
        if last:
            node[index] = merge(node.get(index), value) if isinstance(node, dict) else value
        else:
            if isinstance(node, dict) and (index not in node or is_null(node[index])):
                node[index] = {}
            node = node[index]
