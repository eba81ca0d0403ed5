"""The command line starts at once and fails in one line."""

from __future__ import annotations

import subprocess
import sys

from olmo_ext.cli import COMMANDS

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
        assert done.returncode == 2 and "Traceback" not in done.stderr, arguments


def test_bad_input_is_one_line_and_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "olmo_ext", "plan", "no/such/file.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no/such/file.yaml" in done.stderr
