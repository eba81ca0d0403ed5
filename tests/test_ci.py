"""The second run of failed tests, in small projects: what it forgives, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "test_twice.py"
FLAKY = """
def test_flaky(pytestconfig):
    mark = pytestconfig.rootpath / "has-run"
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
ALWAYS = "def test_that_fails():\n    assert False\n"
ONCE = f"import pytest\npytestmark = pytest.mark.once\n{FLAKY}"
DIES = "import os\ndef test_dies():\n    os._exit(3)\n"
PASSES = "def test_passes():\n    pass\n"


def run(folder: Path, *tests: str, options: tuple[str, ...] = (), first: tuple[str, ...] = ()):
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = once\n")
    for index, text in enumerate(tests):
        (folder / f"test_{index}.py").write_text(text)
    command = [sys.executable, str(SCRIPT), "-q", *options, "--first", *first]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("first", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_test_that_passes_the_second_time_is_named_and_fails_nothing(tmp_path: Path, first: tuple[str, ...]) -> None:
    done = run(tmp_path, FLAKY, PASSES, first=first)
    assert done.returncode == 0, done.stdout
    assert "FLAKY: test_0.py::test_flaky\n" in done.stdout and "FAILED" not in done.stdout.split("second time")[1]


def test_a_test_that_fails_twice_fails_beside_a_flaky_one(tmp_path: Path) -> None:
    done = run(tmp_path, FLAKY, ALWAYS)
    assert done.returncode == 1
    assert "FLAKY: test_0.py::test_flaky\n" in done.stdout and "FAILED twice: test_1.py::test_that_fails" in done.stdout


@pytest.mark.parametrize("first", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_failure_of_a_test_marked_once_has_no_second_run(tmp_path: Path, first: tuple[str, ...]) -> None:
    done = run(tmp_path, ONCE, PASSES, first=first)
    assert done.returncode == 1
    assert "FAILED, no second run: test_0.py::test_flaky\n" in done.stdout and "FLAKY" not in done.stdout


def test_a_test_whose_process_died_has_no_second_run(tmp_path: Path) -> None:
    done = run(tmp_path, DIES, PASSES, first=("-n", "2"))
    assert done.returncode != 0 and "FAILED, no second run: test_0.py::test_dies\n" in done.stdout
    assert run(tmp_path, DIES, PASSES).returncode == 3, "the process of all tests died"


def test_a_second_run_that_skips_the_test_forgives_nothing(tmp_path: Path) -> None:
    skips = FLAKY.replace("assert was_there", "import pytest; assert was_there and pytest.skip()")
    done = run(tmp_path, skips)
    assert done.returncode == 1 and "FAILED twice: test_0.py::test_flaky" in done.stdout


@pytest.mark.parametrize(
    ("tests", "options", "code"),
    [
        ([PASSES], (), 0),
        ([PASSES], ("-k", "nothing"), 5),
        ([], (), 5),
        (["import no_such_module\n", FLAKY], (), 2),
        ([FLAKY], ("--no-such-option",), 4),
    ],
    ids=["all pass", "none is selected", "there is none", "a file cannot be imported", "a wrong option"],
)
def test_whatever_else_pytest_ends_with_is_final(
    tmp_path: Path, tests: list[str], options: tuple[str, ...], code: int
) -> None:
    done = run(tmp_path, *tests, options=options)
    assert done.returncode == code and "second time" not in done.stdout


def test_failures_of_an_earlier_pytest_are_not_run_again(tmp_path: Path) -> None:
    run(tmp_path, ALWAYS)
    (tmp_path / "test_0.py").write_text(ALWAYS + PASSES)
    done = run(tmp_path, options=("-k", "passes"))
    assert done.returncode == 0 and "second time" not in done.stdout
