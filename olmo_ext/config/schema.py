"""Turning the text of a config into its typed sections (`olmo_ext.base.sections`). No torch."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.base import sections, upstream_sections
from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.base.quantities import parse_count, parse_fraction, parse_number, parse_seconds
from olmo_ext.base.registry import Registry
from olmo_ext.base.sections import OpenSection
from olmo_ext.base.yaml_tree import Origins, as_text
from olmo_ext.config.ranges import out_of_range
from olmo_ext.config.schedulers import SCHEDULERS
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, TAPER_SCHEDULES

DEFAULT_ORDER_SEED = 6198
"""The seed of OLMo-2's published data order."""


OPEN_SECTIONS: dict[str, tuple[str, str, Registry[Any]]] = {
    "FFNSection": ("type", "type", FFN_TYPES),
    "AttentionSection": ("type", "type", ATTENTION_TYPES),
    "TaperSection": ("schedule", "schedule", TAPER_SCHEDULES),
    "SchedulerConfig": ("name", "scheduler", SCHEDULERS),
}
"""Sections that also take the options of what they name: the key that names it, the word for it, and its registry."""

SWEEP_WORDS = ("name", "base", "axes", "runs", "seeds", "seeds_change_data", "baseline", "unequal_budgets", "expected")
"""What a sweep file holds beside the keys of a config (`olmo_ext.config.sweep`)."""

SECTIONS: dict[str, type] = {
    cls.__name__: cls
    for module in (upstream_sections, sections)
    for cls in vars(module).values()
    if dataclasses.is_dataclass(cls) and isinstance(cls, type)
}
"""The classes that a config's sections become, by name; ours stand for the ones of OLMo that they extend."""


@functools.cache
def load_schema() -> dict[str, Any]:
    """What the fields of the sections say: {"classes": {name: {key: entry}}, "enums": {name: [values]}}.

    An entry is {"type": ..., "optional": ...} with "items" for lists and mappings, and "default" or "required".
    """
    enums: dict[str, list[str]] = {}
    classes = {
        name: {f.name: _entry(f, enums) for f in dataclasses.fields(cls) if f.name != "options"}
        for name, cls in SECTIONS.items()
        if cls is not OpenSection
    }
    return {"classes": classes, "enums": enums}


def _entry(field: dataclasses.Field[Any], enums: dict[str, list[str]]) -> dict[str, Any]:
    entry = _type_entry(field.type, enums)
    if field.default is not dataclasses.MISSING:
        return {**entry, "default": field.default}
    if field.default_factory is not dataclasses.MISSING:
        is_section = entry["type"].startswith("class:")
        return {**entry, "default": {} if is_section else field.default_factory()}
    return {**entry, "required": True}


def _type_entry(hint: Any, enums: dict[str, list[str]]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind = hint.__metadata__[0]
        if kind.startswith("enum:"):
            enums[kind.removeprefix("enum:")] = list(typing.get_args(arguments[0]))
        return {"type": kind, "optional": False}
    if origin in (typing.Union, types.UnionType):
        return {**_type_entry(arguments[0], enums), "optional": True}
    if origin in (list, dict):
        return {"type": origin.__name__, "items": _type_entry(arguments[-1], enums), "optional": False}
    if hint.__name__ in SECTIONS:
        return {"type": f"class:{hint.__name__}", "optional": False}
    return {"type": hint.__name__, "optional": False}


def parse_duration(value: Any) -> int | str:
    """`max_duration` in its one canonical form: steps (int), tokens (`"2500000000T"`) or epochs (`"2ep"`).

    :raises ValueError: for anything else; `2.5B` alone says neither tokens nor steps.
    """
    text = str(value).strip()
    # "T" ends OLMo's token counts ("2e12T", "2.5BT"); as a bare suffix it would be trillions of steps.
    match = re.fullmatch(r"(.+?)\s*(ep|T)", text)
    if match is None and re.fullmatch(r".*[KMBG]", text):
        raise ValueError(f"{text!r} names no unit: {text}T is tokens, a bare number is steps")
    amount = parse_count(match[1] if match else value)
    if amount < 1:
        raise ValueError(f"{text!r} is no training at all: at least one step")
    return f"{amount}{match[2]}" if match else amount


def _truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _float(value: Any) -> float:
    number = float(parse_number(value))
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _number(value: Any) -> int | float:
    number = parse_number(value)
    return int(number) if number == number.to_integral_value() else float(number)


def _count_or_list(value: Any) -> int | list[int]:
    return [parse_count(item) for item in value] if isinstance(value, list) else parse_count(value)


def _text_or_list(value: Any) -> str | list[str]:
    return [as_text(item) for item in value] if isinstance(value, list) else as_text(value)


CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "int": parse_count,
    "float": _float,
    "number": _number,
    "bool": _truth,
    "str": as_text,
    "text": as_text,
    "duration": parse_duration,
    "seconds": parse_seconds,
    "fraction": parse_fraction,
    "count_or_list": _count_or_list,
    "text_or_list": _text_or_list,
}


def _place(key: str, origins: Origins) -> str:
    """`file:line, key`, from the nearest key whose place is known."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (place := origins.get(".".join(parts[:end]))) is not None:
            return f"{place}, {key}"
    return key


def like_default(value: Any, default: Any) -> Any:
    """Convert an option of a registered type by the type of its default."""
    if isinstance(default, bool):
        return _truth(value)
    if isinstance(default, int):
        return parse_count(value)
    if isinstance(default, float):
        return _float(value)
    if isinstance(default, str):
        return as_text(value)
    return value


Section = TypeVar("Section")


def coerce_class(
    cls: type[Section], section: Any, *, key: str, origins: Origins, options: Mapping[str, Any]
) -> Section:
    """Type every key of a section, fill defaults, and refuse unknown keys with the nearest known one.

    :param options: extra keys of an open section and their defaults.
    :raises InputError: naming the file, line and key path.
    """
    name = cls.__name__
    fields = load_schema()["classes"][name]
    if not isinstance(section, Mapping):
        raise InputError(f"{section!r} is no section", where=_place(key, origins), right="it holds `key: value` lines")
    for word in section:
        if word not in fields and word not in options:
            path = f"{key}.{word}" if key else word
            known, sweep_words = [*fields, *options], [] if key else SWEEP_WORDS
            right = did_you_mean(word, [*known, *sweep_words], otherwise=f"known here: {', '.join(sorted(known))}")
            if word in sweep_words:
                right = "it makes a sweep, which `olmo-ext launch` runs"
            if owners := _owners(name, word):
                # How a config drops what the one it extends says to another type.
                if section[word] is None:
                    continue
                right = f"it belongs to {OPEN_SECTIONS[name][1]} {' and '.join(owners)}; set an inherited one to null"
            raise InputError(f"unknown key {word!r}", where=_place(path, origins), right=right)
    result: dict[str, Any] = {}
    for word, entry in fields.items():
        path = f"{key}.{word}" if key else word
        if word in section:
            result[word] = coerce(section[word], entry, key=path, origins=origins)
            if (allowed := out_of_range(name, word, result[word])) is not None:
                raise InputError(f"{section[word]!r}", where=_place(path, origins), right=allowed)
        elif entry.get("required"):
            raise InputError(f"{word!r} is missing", where=_place(path, origins))
        else:
            default = copy.deepcopy(entry["default"])
            is_section = entry["type"].startswith("class:") and default is not None
            result[word] = coerce(default, entry, key=path, origins=origins) if is_section else default
    typed: dict[str, Any] = {}
    for word, default in options.items():
        path = f"{key}.{word}" if key else word
        try:
            given = word in section and section[word] is not None
            typed[word] = like_default(section[word], default) if given else copy.deepcopy(default)
        except ValueError as error:
            raise InputError(str(error), where=_place(path, origins)) from None
    return cls(**result, options=typed) if issubclass(cls, OpenSection) else cls(**result)


def _owners(name: str, word: str) -> list[str]:
    """What has this option, of all that an open section may name."""
    if name not in OPEN_SECTIONS:
        return []
    registry = OPEN_SECTIONS[name][2]
    return [owner for owner in registry if word in registry.get(owner).options]


def _options(name: str, section: Any, key: str, origins: Origins) -> Mapping[str, Any]:
    if name not in OPEN_SECTIONS or not isinstance(section, Mapping):
        return {}
    chooser, what, registry = OPEN_SECTIONS[name]
    entry, where = load_schema()["classes"][name][chooser], _place(f"{key}.{chooser}", origins)
    named = section.get(chooser, entry["default"])
    if entry["optional"] and named is None:
        return {}
    options: dict[str, Any] = {}
    for each in named if isinstance(named, list) else [named]:
        if isinstance(each, (Mapping, list)) or each is None:
            raise InputError(f"{each!r} names no {what}", where=where)
        options.update(registry.get(str(each), where=where).options)
    return options


def coerce(value: Any, entry: Mapping[str, Any], *, key: str, origins: Origins) -> Any:
    """Give a value the type that the schema entry names.

    :raises InputError: naming the file, line and key path.
    """
    kind = entry["type"]
    if value is None:
        if entry["optional"]:
            return None
        if kind.startswith("class:"):
            value = {}
        else:
            raise InputError("no value", where=_place(key, origins), right=f"a value of type {kind} is needed")
    if kind.startswith("class:"):
        name = kind.partition(":")[2]
        options = _options(name, value, key, origins)
        return coerce_class(SECTIONS[name], value, key=key, origins=origins, options=options)
    try:
        if kind.startswith("enum:"):
            values = load_schema()["enums"][kind.partition(":")[2]]
            if str(value) not in values:
                raise ValueError(f"{str(value)!r} is none of {', '.join(values)}")
            return str(value)
        if kind == "list":
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{value!r} is not a list")
            items = entry["items"]
            return [coerce(item, items, key=f"{key}.{i}", origins=origins) for i, item in enumerate(value)]
        if kind == "dict":
            if not isinstance(value, Mapping):
                raise ValueError(f"{value!r} is not a mapping")
            items = entry["items"]
            return {str(k): coerce(v, items, key=f"{key}.{k}", origins=origins) for k, v in value.items()}
        return CONVERTERS[kind](value)
    except ValueError as error:
        raise InputError(str(error), where=_place(key, origins)) from None
