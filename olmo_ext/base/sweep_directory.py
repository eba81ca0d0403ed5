"""A sweep's folder: `sweep.json`, which `launch` writes, and one folder per run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.run_directory import RunDirectory


class SweepDirectory:
    """Typed access to one sweep's folder. Reading never creates anything."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.description_path = self.path / "sweep.json"

    @classmethod
    def around(cls, path: Path) -> SweepDirectory:
        """The sweep that a folder belongs to: the folder itself, or the one above a run's."""
        sweep = cls(path.absolute())
        is_run = RunDirectory(sweep.path).is_run() and not sweep.is_declared()
        return cls(sweep.path.parent) if is_run else sweep

    def is_declared(self) -> bool:
        """Whether a `sweep.json` names the runs. Runs that were trained one by one have none."""
        return self.description_path.is_file()

    def read_description(self) -> dict[str, Any]:
        """What `sweep.json` holds; `runs` is a list of mappings, each with a `name`.

        :raises OSError, ValueError, KeyError, TypeError: where it cannot be read, or is no sweep's description.
        """
        content = json.loads(self.description_path.read_bytes())
        if not all(isinstance(run["name"], str) for run in content["runs"]):
            raise TypeError("names are text")
        return content

    def write_description(self, content: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.description_path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def run_folders(self) -> list[RunDirectory]:
        """The folders in it that hold a run's config, by name, whatever `sweep.json` says."""
        return [RunDirectory(config.parent) for config in sorted(self.path.glob("*/config.yaml"))]

    def runs(self) -> list[RunDirectory]:
        """The runs in the sweep's order, those without a folder too; a single run's folder is a sweep of one.

        :raises InputError: if `sweep.json` cannot be read.
        """
        if self.is_declared():
            try:
                return [RunDirectory(self.path / run["name"]) for run in self.read_description()["runs"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                where = str(self.description_path)
                raise InputError(f"not a sweep's description ({error})", where=where) from None
        run = RunDirectory(self.path.absolute())
        return [run] if run.is_run() else self.run_folders()
