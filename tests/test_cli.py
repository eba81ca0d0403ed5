"""The command line starts at once and fails in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_ext.cli import COMMANDS, main, unexpected

PROBE = "import sys; from olmo_ext.cli import main\ntry: main(%r)\nfinally: print(sorted(sys.modules), file=sys.stderr)"
HEAVY = ("torch", "olmo", "numpy", "pandas", "wandb", "datasets", "transformers", "plotly", "scipy", "yaml")


def test_help_imports_nothing_heavy_and_lists_every_command() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE % (["--help"],)], capture_output=True, text=True)
    loaded = set(done.stderr.rsplit("[", 1)[1].replace("'", "").replace("]", "").split(", "))
    assert not loaded & set(HEAVY)
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_is_there_and_imports_no_torch_for_its_help() -> None:
    calls = "\n".join(
        f"try: main([{name!r}, '--help'])\nexcept SystemExit as end: assert end.code in (0, None), {name!r}"
        for name in COMMANDS
    )
    code = f"import sys; from olmo_ext.cli import main\n{calls}\nassert not {{'torch', 'olmo'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_unknown_command_or_option_ends_with_2() -> None:
    for arguments in (["tarin"], ["plan", "--no-such-option"], ["plan"]):
        done = subprocess.run([sys.executable, "-m", "olmo_ext", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, (arguments, done.stderr)
        assert done.stderr.startswith("olmo-ext: ") and "--help`" in done.stderr


def test_bad_input_is_one_line_and_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "olmo_ext", "plan", "no/such/file.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no/such/file.yaml" in done.stderr


def _deep(levels: int) -> str:
    return "a: " + "[" * levels + "]" * levels


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\x7fELF\x00\xff\xfe", "cannot be read"),
        (b"\xff\xfea\x00", "cannot be read"),
        (b"- 1", "key: value"),
        (b"5", "key: value"),
        (b"model: [", "not YAML"),
        (_deep(61).encode(), "levels"),
        (_deep(5000).encode(), "YAML"),
        (b"a: &a [*a]", "alias inside"),
        (b"model: &a {ffn: *a}", "alias inside"),
        (BOMB.encode(), "aliases"),
        (b"? [a]\n: 1", "not text"),
        (b"extends: nothere.yaml", "nothere.yaml"),
        (b"extends: {a: b}", "extends"),
        (b"extends: .", "cannot be read"),
        ("folder", "no .yaml|directory"),
        ("loop", "symbolic links"),
        ("below a file", "irectory"),
        ("nothing", "no such file"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [("plan",), ("launch", "--dry-run"), ("train",)], ids=lambda command: command[0])
def test_a_file_of_any_kind_is_one_line_that_names_it(tmp_path: Path, capsys, command, content, named: str) -> None:
    import re

    path = tmp_path / "what it's $(id) 50%.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path.name)
    elif content == "below a file":
        path.write_text("")
        path = path / "x.yaml"
    with pytest.raises(SystemExit) as end:
        main([*command, str(path)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and re.search(named, error), error
    assert tmp_path.name in error


def test_a_file_that_cannot_be_used_is_bad_input_and_what_the_machine_refuses_is_failed_work() -> None:
    for number, code in ((errno.EACCES, 2), (errno.EROFS, 2), (errno.ENOTDIR, 2), (errno.ENOSPC, 1), (errno.EIO, 1)):
        found, text = unexpected(OSError(number, os.strerror(number), "a b/c"))
        assert (found, text) == (code, f"a b/c: {os.strerror(number)}")
    full = os.strerror(errno.ENOSPC)
    assert unexpected(RuntimeError(f"I/O error: {full} (os error 28)")) == (1, f"I/O error: {full} (os error 28)")
    assert unexpected(ValueError("two\nlines")) == (1, "ValueError: two lines (--debug shows where)")
