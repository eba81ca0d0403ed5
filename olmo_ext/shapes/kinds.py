"""A layer's type and options in words: what plans and reports say about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.base.registry import Registry
from olmo_ext.shapes.registry import AttentionType, FFNType


def changed_options(
    registry: Registry[FFNType] | Registry[AttentionType], type_name: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that differ from the type's defaults, in the type's order.

    All of them for a type that is not registered here, as that of somebody else's run: its defaults are not known.
    """
    if type_name not in registry:
        return dict(options)
    defaults = registry.get(type_name).options
    return {name: options[name] for name, default in defaults.items() if name in options and options[name] != default}


def value_text(value: Any) -> str:
    """As a config writes it, numbers in six digits: `mag`, `64`, `false`, `[1, 4]`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def options_text(options: Mapping[str, Any]) -> str:
    """`form mag, window 64`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in options.items())


def kind_text(registry: Registry[FFNType] | Registry[AttentionType], type_name: str, options: Mapping[str, Any]) -> str:
    """`titans, form mag, window 64`: the type, and the options that are not its defaults."""
    changed = options_text(changed_options(registry, type_name, options))
    return f"{type_name}, {changed}" if changed else type_name
