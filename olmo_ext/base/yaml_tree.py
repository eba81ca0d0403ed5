"""YAML 1.2 through PyYAML: the place of every key is known, and no scalar is read as what nobody meant.

PyYAML's own rules are YAML 1.1's: they take `12:30:00` for 45000, `on` for true and `4e-4` for text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from olmo_ext.base.errors import InputError

LARGEST_TREE, DEEPEST_TREE = 2_000_000, 60
"""Values that a file may hold, aliases expanded, and levels of nesting."""

Origins = dict[str, str]
"""Dotted key -> where it was set, `file:line` or `command line`."""

_TAG = "tag:yaml.org,2002:"
_NULLS = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_EXPONENT = "[eE][-+]?[0-9]{1,3}"


def _float(text: str) -> float | str:
    """The number, or the text itself where a float would hold another number than the one that was written."""
    number = float(text)
    return number if math.isfinite(number) and Decimal(repr(number)) == Decimal(text) else text


_SCALARS: dict[str, tuple[str, Iterable[str], Callable[[str], Any]]] = {
    "null": ("|".join(_NULLS), ("", *"~nN"), _NULLS.__getitem__),
    "bool": ("|".join(_TRUTHS), "tTfF", _TRUTHS.__getitem__),
    "int": ("0|-?[1-9][0-9]{0,99}", "-0123456789", int),
    "float": (
        rf"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|[0-9]+{_EXPONENT})",
        "-+.0123456789",
        _float,
    ),
}
"""What is no text: its form, the characters that it begins with, its value. `007`, `+5` and `1_000` are text, which a
key that holds a number reads."""


class _Resolver(yaml.resolver.BaseResolver):
    """YAML 1.2's core rules, for whole numbers in their one canonical form."""


class _Loader(_Resolver, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would take for something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML escapes these line breaks between double quotes only; elsewhere a reader makes them blanks.
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


for _name, (_form, _first, _) in _SCALARS.items():
    for _class in (_Resolver, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_form})\Z"), list(_first))


def read_scalar(text: str) -> Any:
    """None, true or false, a number or text: what an unquoted scalar means."""
    return _value(_Resolver().resolve(yaml.ScalarNode, text, (True, False)), text)


def _value(tag: str, text: str) -> Any:
    name = tag.removeprefix(_TAG)
    return text if name == "str" else _SCALARS[name][2](text)


def as_text(value: Any) -> str:
    """A value under a key that holds text. A whole number is the text that was written: its form is the only one.

    :raises ValueError: for null, a list or mapping, and for a value that could have been written in another way.
    """
    if isinstance(value, (Mapping, list)):
        shown = repr(value)
        raise ValueError(f"{shown if len(shown) <= 80 else shown[:77] + '...'} is not a single value")
    if value is None:
        raise ValueError("no value; text is needed")
    if isinstance(value, (bool, float)):
        raise ValueError(f"{str(value).lower()} is no text; write it in quotes, exactly as it is meant")
    return str(value)


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
    if isinstance(node, yaml.ScalarNode):
        try:
            return _value(node.tag, node.value)
        except (KeyError, ValueError):
            raise InputError(f"YAML tag {node.tag!r}", where=where, right="only plain YAML is read") from None
    if node.tag not in (_TAG + "seq", _TAG + "map"):
        raise InputError(f"YAML tag {node.tag!r}", where=where, right="only plain YAML is read")
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
    """Parse YAML text into dicts, lists and Python's None, bool, int, float and str.

    :param name: what to call the source in errors: a file's path or `command line`.
    :param origins: filled with the place of every key.
    :raises InputError: for text that is not YAML, repeated keys and tags.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
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
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError("holds no `key: value` lines", where=str(path), right="a config is a YAML mapping")
    return tree


def dump_yaml(tree: Any, **layout: Any) -> str:
    """YAML that `parse_yaml`, and a reader of YAML 1.1, read back to the same values; `layout` is PyYAML's."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)


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
            if isinstance(node, dict) and (index not in node or node[index] is None):
                node[index] = {}
            node = node[index]
