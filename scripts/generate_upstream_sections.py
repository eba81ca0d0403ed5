"""Write olmo_ext/base/upstream_sections.py: ai2-olmo's config classes as plain dataclasses, so that `plan` needs no
torch.

    python scripts/generate_upstream_sections.py           # rewrites the file
tests/config/test_schema.py fails when the file and the installed ai2-olmo differ.
"""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "olmo_ext" / "base" / "upstream_sections.py"

HEAD = '''"""The config of ai2-olmo {version} as plain dataclasses: its names, types and defaults.

`scripts/generate_upstream_sections.py` writes this file, and a test compares it with the installed ai2-olmo. Words that
OLMo holds in enums are strings here, and its tuples are lists, as YAML has them.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

Duration = Annotated[int | str, "duration"]
Number = Annotated[int | float, "number"]
'''


class Writer:
    """Collects the text of the module; a class or enum stands before its first use."""

    def __init__(self) -> None:
        self.enums: dict[str, str] = {}
        self.classes: dict[str, str] = {}

    def annotation(self, hint: Any) -> str:
        """The source of a type hint."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            inner = [argument for argument in arguments if argument is not type(None)]
            none = " | None" if len(inner) < len(arguments) else ""
            if len(inner) > 1:
                return {frozenset((int, float)): "Number", frozenset((int, str)): "Duration"}[frozenset(inner)] + none
            return self.annotation(inner[0]) + none
        if origin in (list, tuple):
            return f"list[{self.annotation(arguments[0])}]"
        if origin is dict:
            return f"dict[str, {self.annotation(arguments[1])}]"
        if dataclasses.is_dataclass(hint):
            self.add_class(hint)
        elif issubclass(hint, enum.Enum):
            words = ", ".join(repr(plain_default(member)) for member in hint)
            self.enums[hint.__name__] = f'{hint.__name__} = Annotated[Literal[{words}], "enum:{hint.__name__}"]'
        else:
            assert hint in (int, float, bool, str), hint
        return str(hint.__name__)

    def add_class(self, cls: Any) -> None:
        if cls.__name__ in self.classes:
            return
        hints = typing.get_type_hints(cls)
        lines = ["@dataclass(frozen=True, kw_only=True)", f"class {cls.__name__}:"]
        lines += [f"    {f.name}: {self.annotation(hints[f.name])}{default_of(f)}" for f in dataclasses.fields(cls)]
        self.classes[cls.__name__] = "\n".join(lines)


def plain_default(value: Any) -> Any:
    """OmegaConf takes a member of a str enum by its value, and of torch's ShardingStrategy by its name."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    return list(value) if isinstance(value, tuple) else value


def default_of(field: dataclasses.Field[Any]) -> str:
    """The source of a field's default, with the equals sign; empty for a required field."""
    if field.default is not dataclasses.MISSING:
        value = plain_default(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        value = plain_default(field.default_factory())
    else:
        return ""
    if dataclasses.is_dataclass(value):
        return f" = field(default_factory={type(value).__name__})"
    if isinstance(value, list):
        return f" = field(default_factory=lambda: {value!r})" if value else " = field(default_factory=list)"
    return f" = {value!r}"


def build_module() -> str:
    """The text of the module, formatted."""
    from olmo.config import TrainConfig
    from olmo.version import VERSION

    writer = Writer()
    writer.add_class(TrainConfig)
    text = "\n".join((HEAD.format(version=VERSION), *writer.enums.values(), "", *writer.classes.values()))
    command = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={TARGET}", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    TARGET.write_text(build_module())
