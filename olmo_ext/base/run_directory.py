"""A run's folder: the only thing that reports, `status` and a restart read.

config.yaml  shape.json  provenance.json  metrics.jsonl  state.json  checkpoints/  logs/  wandb/  evals/  diagnosis/
"""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import append_line, write_atomically
from olmo_ext.base.yaml_tree import dump_yaml, parse_yaml

STATUSES = ("pending", "running", "requeued", "done", "failed")


@dataclass(kw_only=True)
class RunState:
    """What `state.json` holds."""

    status: str = "pending"
    """One of `STATUSES`."""

    attempt: int = 0
    """How often the run was started; 0 before the first start."""

    step: int = 0
    """The last step that a complete checkpoint or the end of training has reached."""

    max_steps: int = 0
    """The step at which training ends; 0 before the data was looked at."""

    reason: str = ""
    """Why the last attempt ended, in words."""

    updated: str = ""
    """When this was written: UTC, ISO 8601, to the second."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    slurm_job: str | None = None
    """`SLURM_JOB_ID`, or `ARRAY_TASK` for an element of an array."""


@dataclass(kw_only=True)
class MetricsRow:
    """One line of `metrics.jsonl`; `tokens`, `flops` and `seconds` are cumulative over the surviving attempts."""

    kind: str
    """`attempt` (a start: `step` is the restored step), `train` or `eval`."""

    attempt: int
    step: int
    tokens: int = 0
    flops: float = 0.0
    """`tokens` times the training FLOPs of a token."""

    seconds: float = 0.0
    """Seconds spent in training steps; evaluation and saving are not counted."""

    time: float = 0.0
    """Unix time."""

    values: dict[str, float] = field(default_factory=dict)


_LARGEST = 2**63


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_whole(value)


def is_metrics_row(row: Any) -> bool:
    """Whether a JSON value can be a row of `metrics.jsonl`: after a full disk or an edit the file may hold anything."""
    return (
        type(row) is dict
        and type(row.get("kind")) is str
        and _is_whole(row.get("attempt"))
        and _is_whole(row.get("step"))
        and _is_whole(row.get("tokens", 0))
        and _is_number(row.get("flops", 0))
        and _is_number(row.get("seconds", 0))
        and _is_number(row.get("time", 0))
        and type(row.get("values", {})) is dict
    )


def _is_state(content: Any) -> bool:
    """Whether a JSON value can be what `state.json` holds."""
    return (
        type(content) is dict
        and content.get("status") in STATUSES
        and all(_is_whole(content.get(name, 0)) for name in ("attempt", "step", "max_steps", "pid"))
        and all(type(content.get(name, "")) is str for name in ("reason", "updated", "host"))
        and type(content.get("slurm_job")) in (str, type(None))
    )


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, or of a part of it, without lines that were torn or are no rows."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        rows = map(_parsed, lines)
    return [row for row in rows if is_metrics_row(row)]


def surviving_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what a later attempt has overtaken: its first row carries the step it restored, and rows of earlier
    attempts beyond that step belong to a history that no checkpoint holds."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["kind"] == "attempt":
            while kept and kept[-1]["step"] > row["step"]:
                kept.pop()
        kept.append(row)
    return kept


def _typed(rows: list[dict[str, Any]]) -> list[MetricsRow]:
    names = MetricsRow.__dataclass_fields__
    return [MetricsRow(**{key: value for key, value in row.items() if key in names}) for row in rows]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class RunDirectory:
    """Typed access to one run's folder. Reading never creates anything."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.shape_path = self.path / "shape.json"
        self.provenance_path = self.path / "provenance.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.state_path = self.path / "state.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.wandb = self.path / "wandb"
        self.evals = self.path / "evals"
        self.diagnosis = self.path / "diagnosis"

    @property
    def name(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        return self.config_path.is_file()

    def is_run(self) -> bool:
        """Whether this is a run's folder, also where one of its two first files was lost."""
        return self.exists() or self.state_path.is_file()

    @property
    def has_begun(self) -> bool:
        """Whether anything was trained here, whatever `state.json` says: a kill or a full disk may have torn that.

        Attempts alone are nothing: they ended before a row or a checkpoint that a restart could go on from. A line of
        `metrics.jsonl` that cannot be read counts as a row.
        """
        if self.checkpoints.exists():
            return True
        try:
            lines = self.metrics_path.read_bytes().split(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        rows = (_parsed(line) for line in lines if line.strip())
        return any(not is_metrics_row(row) or row["kind"] != "attempt" for row in rows)

    def read_config(self) -> dict[str, Any]:
        try:
            content = parse_yaml(self.config_path.read_text(encoding="utf-8"), name=str(self.config_path))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                "no config.yaml", where=str(self.path), right="name the folder of a run that was started"
            ) from None
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=str(self.config_path)) from None
        except UnicodeDecodeError:
            raise InputError("not YAML", where=str(self.config_path)) from None
        if not isinstance(content, dict):
            raise InputError("holds no `key: value` lines", where=str(self.config_path))
        return content

    def write_config(self, values: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config_path, dump_yaml(values))

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"no {path.name}", where=str(self.path), right="was the run started?") from None
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"not JSON ({error})", where=str(path)) from None
        if not isinstance(content, dict):
            raise InputError("not a JSON object", where=str(path))
        return content

    def _write_json(self, path: Path, content: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1, sort_keys=False) + "\n")

    def read_shape(self) -> dict[str, Any]:
        return self._read_json(self.shape_path)

    def write_shape(self, shape: dict[str, Any]) -> None:
        self._write_json(self.shape_path, shape)

    def read_provenance(self) -> dict[str, Any]:
        return self._read_json(self.provenance_path)

    def write_provenance(self, provenance: dict[str, Any]) -> None:
        self._write_json(self.provenance_path, provenance)

    def read_state(self) -> RunState:
        """The state; a run that was never started is `pending`, a torn or foreign file counts as never written.

        :raises InputError: for a file that is there and cannot be read.
        """
        try:
            content = json.loads(self.state_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            return RunState()
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=str(self.state_path)) from None
        if not _is_state(content):
            return RunState()
        return RunState(**{key: value for key, value in content.items() if key in RunState.__dataclass_fields__})

    def last_attempt(self) -> int:
        """The number of the last start, also where `state.json` was lost: the logs carry it in their names."""
        logs = [re.match(r"attempt(\d+)-", path.name) for path in self.logs.glob("attempt*-rank*")]
        return max([self.read_state().attempt, *(int(match[1]) for match in logs if match)])

    def write_state(self, state: RunState) -> None:
        if state.status not in STATUSES:
            raise ValueError(f"status {state.status!r} is none of {STATUSES}")
        state.updated = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._write_json(self.state_path, asdict(state))

    def append_metrics(self, row: MetricsRow) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        append_line(self.metrics_path, json.dumps(asdict(row)))

    def _read_rows(self) -> list[dict[str, Any]]:
        try:
            return parse_rows(self.metrics_path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=str(self.metrics_path)) from None

    def read_all_metrics(self) -> list[MetricsRow]:
        """Every row that was written, lost attempts included; torn lines (a kill inside a write) are left out.

        :raises InputError: for a file that is there and cannot be read.
        """
        return _typed(self._read_rows())

    def read_metrics(self) -> list[MetricsRow]:
        """The rows that count, in order of steps: see `surviving_rows`."""
        return _typed(self.read_plain_metrics())

    def read_plain_metrics(self) -> list[dict[str, Any]]:
        """The same as plain dictionaries, several times faster: a report reads 50 x 5,000 of them."""
        return surviving_rows(self._read_rows())
