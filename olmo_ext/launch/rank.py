"""One rank of a run under torchrun: trains, and leaves with 0 where the run is done or saved."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from olmo_ext.base.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.launch.worker import record_failure, train_run
from olmo_ext.training.signals import StopRequest


def main(arguments: list[str]) -> int:
    directory = RunDirectory(arguments[0])
    planned, met = os.environ.get("OLMO_EXT_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if planned != met:
        reason = f"{met} ranks have met, {planned} were planned"
        print(f"olmo-ext: {reason}", file=sys.stderr)
        if os.environ.get("RANK") == "0":
            record_failure(directory, reason)
        return EXIT_BAD_INPUT
    with StopRequest() as stop:
        code, reason = train_run(Path(arguments[0]), stop)
    if code in (EXIT_FAILED, EXIT_BAD_INPUT) and os.environ.get("RANK") == "0":
        record_failure(directory, reason)
    # A saved run is no failure of a process: torchrun would print a traceback and end the other nodes for it. The
    # batch shell reads the state.
    return EXIT_DONE if code == EXIT_REQUEUE else code
