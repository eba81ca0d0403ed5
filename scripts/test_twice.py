"""Run pytest; run the tests that failed once more, alone: `test_twice.py OPTION ... --first OPTION ...`.

Both runs get the options before `--first`, the first run also those after it. A test that passes the second time is
printed as `FLAKY: nodeid` and fails nothing. There is no second run for a test that is marked `once`, for one whose
process died, and for a pytest that did not run to its end: any of them fails at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HAS_FAILED = pytest.ExitCode.TESTS_FAILED
PHASES = ("setup", "call", "teardown")


class Outcomes:
    """A pytest plugin that writes what became of each test to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: list[str] = []
        self.failed: dict[str, bool] = {}
        """Test or file -> whether it has no second run."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # xdist reports a test whose process died with "???" for its phase, and without its marks.
            self.failed[report.nodeid] = "once" in report.keywords or report.when not in PHASES
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = True

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps([self.passed, self.failed]))


def run_pytest(options: list[str]) -> tuple[int, set[str], dict[str, bool]]:
    """Exit code, tests that passed, and tests that failed, of pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        code = subprocess.run([sys.executable, __file__, f"--outcomes={path}", *options]).returncode
        passed, failed = json.loads(path.read_text()) if path.is_file() else ([], {})
    return code, set(passed) - set(failed), failed


def main(arguments: list[str]) -> int:
    split = arguments.index("--first") if "--first" in arguments else len(arguments)
    both, first = arguments[:split], arguments[split + 1 :]
    # Failures that an earlier pytest has left in the cache are not this one's.
    code, _, failed = run_pytest([*both, *first, "--cache-clear"])
    for nodeid in (nodeid for nodeid, once in failed.items() if once):
        print(f"FAILED, no second run: {nodeid}")
    if code != HAS_FAILED or not failed or any(failed.values()):
        return code
    print(f"\n{len(failed)} failed and run a second time, alone", flush=True)
    code, passed, _ = run_pytest([*both, "--last-failed"])
    for nodeid in failed:
        print(f"FLAKY: {nodeid}" if nodeid in passed else f"FAILED twice: {nodeid}")
    return code or (0 if passed >= set(failed) else HAS_FAILED)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--outcomes="):
        sys.path.insert(0, os.getcwd())  # as `python -m pytest` has it
        sys.exit(pytest.main(sys.argv[2:], plugins=[Outcomes(Path(sys.argv[1].partition("=")[2]))]))
    sys.exit(main(sys.argv[1:]))
