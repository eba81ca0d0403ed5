"""PyYAML against ruamel.yaml on every config: import, time to a tree with line numbers, scalars that read differently.

Needs `ruamel.yaml`, which the package does not. Time is that of the CPU, the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCALARS: tuple[str, ...] = ("4e-4", "1e3", ".5", "2.5B", "007", "1_000", "0x10", "0o7", "+5", "12:30:00", "2001-01-01")
SCALARS += ("yes", "no", "on", "off", "true", "True", "~", "", "null", ".inf", "<<")


def readers() -> dict[str, tuple[str, Callable[[str], Any], Callable[[str], Any]]]:
    """Name -> the module that it imports, text to nodes with marks, text to values."""
    import yaml

    ruamel = importlib.import_module("ruamel.yaml")
    fast, safe, round_trip = yaml.CSafeLoader, ruamel.YAML(typ="safe", pure=True), ruamel.YAML(typ="rt")
    found = {
        "PyYAML, C": ("yaml", lambda text: yaml.compose(text, fast), lambda text: yaml.load(text, fast)),
        "ruamel, safe": ("ruamel.yaml", safe.compose, safe.load),
        "ruamel, round trip": ("ruamel.yaml", round_trip.compose, round_trip.load),
    }
    try:
        from olmo_ext.base.yaml_tree import parse_yaml, read_scalar
    except ImportError:
        return found
    return found | {"ours": ("olmo_ext.base.yaml_tree", lambda text: parse_yaml(text, name="f"), read_scalar)}


def cpu_seconds(work: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def import_seconds(module: str, rounds: int) -> float:
    """In a process of its own each time."""
    code = f"import time; t = time.process_time(); import {module}; print(time.process_time() - t)"
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(rounds))


def attempt(read: Callable[[str], Any], text: str) -> str:
    try:
        return repr(read(text))
    except Exception as error:
        return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("configs"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted(arguments.folder.rglob("*.yaml"))]
    found = readers()
    print(f"{len(texts)} files, {sum(map(len, texts)):,} characters; milliseconds of CPU")
    for name, (module, compose, load) in found.items():
        loaded = import_seconds(module, arguments.rounds) * 1e3
        parsed = cpu_seconds(lambda: [compose(text) for text in texts], arguments.rounds) * 1e3  # noqa: B023
        node = compose("a: 1\nb: 2\n")
        line = node.value[1][0].start_mark.line + 1 if hasattr(node, "value") else "in origins"
        twice = attempt(compose if name == "ours" else load, "a: 1\na: 2\n")
        print(f"{name:20} import {loaded:6.1f}  parse {parsed:8.1f}  line of `b` {line}  `a` twice: {twice}")
    print(f"{'scalar':12}" + "".join(f"{name:34}" for name in found))
    for text in SCALARS:
        print(f"{text:12}" + "".join(f"{attempt(load, text):34}" for _, _, load in found.values()))


if __name__ == "__main__":
    main()
