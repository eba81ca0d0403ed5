"""Write olmo_ext/resources/upstream_schema.json: ai2-olmo's config classes as data, so that `plan` needs no torch.

    python scripts/generate_upstream_schema.py           # rewrites the file
tests/test_schema.py fails when the file and the installed ai2-olmo differ.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "olmo_ext" / "resources" / "upstream_schema.json"


def describe_type(annotation: Any, classes: dict[str, type], enums: dict[str, list[str]]) -> dict[str, Any]:
    """A type annotation as {"type": ..., "optional": ...}."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        optional = len(inner) < len(arguments)
        if set(inner) == {int, float}:
            return {"type": "number", "optional": optional}
        if set(inner) == {int, str}:
            return {"type": "duration", "optional": optional}
        (single,) = inner
        return {**describe_type(single, classes, enums), "optional": optional}
    if origin in (list, tuple):
        return {"type": "list", "items": describe_type(arguments[0], classes, enums), "optional": False}
    if origin is dict:
        return {"type": "dict", "items": describe_type(arguments[1], classes, enums), "optional": False}
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        classes[annotation.__name__] = annotation
        return {"type": f"class:{annotation.__name__}", "optional": False}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        # OmegaConf takes a member of a str enum by its value, and of torch's ShardingStrategy by its name.
        names = [m.value if isinstance(m.value, str) else m.name for m in annotation]
        enums[annotation.__name__] = names
        return {"type": f"enum:{annotation.__name__}", "optional": False}
    return {"type": {int: "int", float: "float", bool: "bool", str: "str"}[annotation], "optional": False}


def plain_default(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    return list(value) if isinstance(value, tuple) else value


def build_schema() -> dict[str, Any]:
    from olmo.config import TrainConfig
    from olmo.version import VERSION

    classes: dict[str, type] = {"TrainConfig": TrainConfig}
    enums: dict[str, list[str]] = {}
    described: dict[str, Any] = {}
    while pending := [name for name in classes if name not in described]:
        cls = classes[pending[0]]
        hints = typing.get_type_hints(cls)
        fields = {}
        for field in dataclasses.fields(cls):
            entry = describe_type(hints[field.name], classes, enums)
            if field.default is not dataclasses.MISSING:
                entry["default"] = plain_default(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                made = field.default_factory()
                entry["default"] = {} if dataclasses.is_dataclass(made) else plain_default(made)
            else:
                entry["required"] = True
            fields[field.name] = entry
        described[cls.__name__] = fields
    return {"ai2_olmo": VERSION, "classes": described, "enums": enums}


def main() -> None:
    TARGET.write_text(json.dumps(build_schema(), indent=1) + "\n")


if __name__ == "__main__":
    main()
