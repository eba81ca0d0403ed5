"""Read a sweep's run directories into arrays. Nothing else is read: no logs, no W&B, no checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.base.sweep_directory import SweepDirectory

TRAIN_LOSS = "train/CrossEntropyLoss"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
_VALIDATION = re.compile(r"^eval/(?!downstream/)(.+)/CrossEntropyLoss$")
_DOWNSTREAM = re.compile(r"^eval/downstream/(.+)$")
_SEED_PART = re.compile(r"[-_.,](?:seed|s)[-_=]?(\d+)$")


@dataclass(kw_only=True)
class Series:
    """One metric of one run over its surviving history; all arrays have the same length."""

    step: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    """Cumulative training FLOPs."""

    seconds: np.ndarray
    """Cumulative seconds in training steps."""

    value: np.ndarray

    def __len__(self) -> int:
        return len(self.value)

    def axis(self, name: str) -> np.ndarray:
        """`tokens`, `flops` or `seconds`."""
        return getattr(self, name)


@dataclass(kw_only=True)
class Run:
    """Everything a report uses of one run."""

    name: str
    group: str
    seed: int | None
    axes: dict[str, Any]
    """The values by which the sweep made this run."""

    path: Path
    state: RunState
    config: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Rows of evals/*.jsonl."""

    diagnosis: dict[str, Any] = field(default_factory=dict)
    """The newest diagnosis/step<N>.json."""

    problems: list[str] = field(default_factory=list)
    """Files that are missing or cannot be read."""

    @property
    def finished(self) -> bool:
        return self.state.status == "done"

    @property
    def data(self) -> dict[str, Any]:
        return self.provenance.get("data") or {}

    def last(self, metric: str) -> float | None:
        """The metric's last value, which may be nan; none where it was never logged."""
        series = self.series.get(metric)
        return float(series.value[-1]) if series is not None and len(series) else None

    def progress(self) -> tuple[int, int, float]:
        """Steps, tokens and FLOPs of the surviving history."""
        ends = [(int(s.step[-1]), int(s.tokens[-1]), float(s.flops[-1])) for s in self.series.values() if len(s)]
        return max(ends, default=(self.state.step, 0, 0.0))

    def early_step(self, step: Any) -> int | None:
        """A step before the end of the surviving history, as of an earlier checkpoint; none for the end or unknown."""
        return step if isinstance(step, int) and step < self.progress()[0] else None

    def validation_labels(self) -> list[str]:
        """Labels of validation sets, in the order in which the run logged them."""
        return [match[1] for name in self.series if (match := _VALIDATION.match(name))]

    def downstream(self) -> dict[str, float]:
        """The last in-loop value of every downstream metric."""
        last_values = {}
        for name in self.series:
            if match := _DOWNSTREAM.match(name):
                last_values[match[1]] = float(self.series[name].value[-1])
        return last_values

    def tokens_per_second(self) -> float | None:
        """Median over the run without its first tenth (warm-up, compilation), or the mean where it was not logged;
        over all devices together, evaluation and saving not counted."""
        series = self.series.get(TOKENS_PER_SECOND)
        if series is not None and len(series):
            return float(np.median(series.value[len(series) // 10 :]))
        for series in self.series.values():
            if len(series) and series.seconds[-1] > 0:
                return float(series.tokens[-1] / series.seconds[-1])
        return None


@dataclass(kw_only=True)
class RecordedSweep:
    """The runs that a sweep's folder holds, and the group that the others are compared with."""

    name: str
    path: Path
    baseline: str
    runs: list[Run]
    budget_checked: bool = True
    declared: bool = True
    """Whether a sweep.json named the runs; without one, groups follow from the folders' names."""

    def groups(self) -> dict[str, list[Run]]:
        """Runs by group, the baseline first."""
        groups: dict[str, list[Run]] = {self.baseline: []}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups


def validation_metric(label: str) -> str:
    return f"eval/{label}/CrossEntropyLoss"


def split_seed(name: str) -> tuple[str, int | None]:
    """`wide-s2` or `wide-seed2` -> (`wide`, 2); a name without a seed part is its own group."""
    match = _SEED_PART.search(name)
    return (name[: match.start()], int(match[1])) if match and match.start() else (name, None)


def read_sweep(path: Path | str, *, baseline: str | None = None, every_metric: bool = False) -> RecordedSweep:
    """Read a sweep's folder.

    :param baseline: group to compare with; needed where there is no sweep.json, else it overrides the sweep's.
    :param every_metric: also keep what no report shows (for CSV and TensorBoard).
    :raises InputError: for a folder without runs, or a baseline that is none of the groups.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError("no such folder", where=str(path), right="name the folder of a sweep, as in runs/<sweep>")
    folder = SweepDirectory(path)
    keep = None if every_metric else _is_reported
    if folder.is_declared():
        sweep = _read_declared(folder, keep)
        sweep.baseline = baseline or sweep.baseline
    else:
        runs = [_read_undeclared(run, keep) for run in folder.run_folders()]
        if not runs:
            if RunDirectory(path).exists():
                raise InputError("this is one run", where=str(path), right="name the folder above it")
            raise InputError("neither sweep.json nor a run's folder in it", where=str(path))
        names = ", ".join(sorted({run.group for run in runs}))
        if baseline is None:
            raise InputError("no sweep.json, so --baseline is needed", where=str(path), right=f"one of: {names}")
        sweep = RecordedSweep(name=path.resolve().name, path=path, baseline=baseline, runs=runs, declared=False)
    _separate_repetitions(sweep.runs)
    groups = {run.group for run in sweep.runs}
    if sweep.baseline not in groups:
        known = ", ".join(sorted(groups))
        raise InputError(f"baseline {sweep.baseline!r} is no group of this sweep", where=str(path), right=known)
    return sweep


def _read_declared(folder: SweepDirectory, keep: Callable[[str], bool] | None) -> RecordedSweep:
    try:
        content = folder.read_description()
        entries = [(e["name"], e["group"], e.get("seed"), e.get("values") or {}) for e in content["runs"]]
        name, baseline = content["name"], content["baseline"]
        if not all(isinstance(text, str) for text in (name, baseline, *(group for _, group, _, _ in entries))):
            raise TypeError("names are text")
        if not all(isinstance(e[2], (int, type(None))) and isinstance(e[3], dict) for e in entries):
            raise TypeError("a seed is a number, values are a mapping")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        where = str(folder.description_path)
        raise InputError(f"unreadable ({error!r})", where=where, right="launch writes it") from None
    runs = [
        _read_run(RunDirectory(folder.path / n), group=g, seed=s, axes=axes, keep=keep) for n, g, s, axes in entries
    ]
    listed = {run.name for run in runs}
    for directory in folder.run_folders():
        if directory.name not in listed:
            # A folder the sweep does not name any more is shown, so that nobody wonders where it went.
            run = _read_undeclared(directory, keep)
            run.problems.append("not named by sweep.json")
            runs.append(run)
    checked = bool(content.get("budget_checked", True))
    return RecordedSweep(name=name, path=folder.path, baseline=baseline, runs=runs, budget_checked=checked)


def _read_undeclared(directory: RunDirectory, keep: Callable[[str], bool] | None) -> Run:
    """A run of which only the name of its folder says the group and the seed."""
    group, seed = split_seed(directory.name)
    return _read_run(directory, group=group, seed=seed, axes={}, keep=keep)


def _separate_repetitions(runs: list[Run]) -> None:
    """Give a second run of one group and seed a group of its own: over seeds, one would stand in for the other."""
    first: dict[tuple[str, int | None], str] = {}
    taken = {run.group for run in runs}
    for run in runs:
        earlier = first.setdefault((run.group, run.seed), run.name)
        if earlier == run.name:
            continue
        seed = "no seed" if run.seed is None else f"seed {run.seed}"
        run.problems.append(f"{seed} of group {run.group}, as {earlier}: shown as a group of its own")
        run.group = run.name if run.name not in taken else f"{run.name} (again)"
        taken.add(run.group)


def _is_reported(metric: str) -> bool:
    return metric in (TRAIN_LOSS, TOKENS_PER_SECOND) or metric.startswith("eval/")


def _read_run(
    directory: RunDirectory,
    *,
    group: str,
    seed: int | None,
    axes: dict[str, Any],
    keep: Callable[[str], bool] | None,
) -> Run:
    path = directory.path
    run = Run(name=path.name, group=group, seed=seed, axes=dict(axes), path=path, state=directory.read_state())
    if not path.is_dir():
        run.problems.append("not started: no folder")
        return run
    for name, file, reader in (
        ("config", directory.config_path, directory.read_config),
        ("shape", directory.shape_path, directory.read_shape),
        ("provenance", directory.provenance_path, directory.read_provenance),
    ):
        try:
            setattr(run, name, reader())
        except InputError:
            run.problems.append(f"no readable {file.name}")
    if run.seed is None and isinstance(run.config.get("seed"), int):
        run.seed = run.config["seed"]
    run.series = _series(directory.read_plain_metrics(), keep)
    run.evaluations = list(_json_lines(sorted(directory.evals.glob("*.jsonl")), run.problems))
    run.diagnosis = _newest_diagnosis(directory, run.problems)
    return run


def _series(rows: list[dict[str, Any]], keep: Callable[[str], bool] | None) -> dict[str, Series]:
    wanted: dict[str, tuple[list[int], list[float]]] = {}
    ignored: set[str] = set()
    rows = [row for row in rows if row["kind"] != "attempt"]
    for index, row in enumerate(rows):
        for name, value in row.get("values", {}).items():
            if name in ignored:
                continue
            if name not in wanted:
                if keep is not None and not keep(name):
                    ignored.add(name)
                    continue
                wanted[name] = ([], [])
            if isinstance(value, (int, float)):
                indices, values = wanted[name]
                indices.append(index)
                values.append(value)
    columns = {
        name: np.array([row.get(name) or 0 for row in rows], dtype=kind)
        for name, kind in (("step", np.int64), ("tokens", np.int64), ("flops", np.float64), ("seconds", np.float64))
    }
    series = {}
    for name, (indices, values) in wanted.items():
        at = np.array(indices, dtype=np.int64)
        if len(at):
            series[name] = Series(
                step=columns["step"][at],
                tokens=columns["tokens"][at],
                flops=columns["flops"][at],
                seconds=columns["seconds"][at],
                value=np.array(values, dtype=np.float64),
            )
    return series


def _json_lines(paths: Iterable[Path], problems: list[str]) -> Iterable[dict[str, Any]]:
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                problems.append(f"{path.parent.name}/{path.name} line {number} is not JSON")
                continue
            if isinstance(row, dict):
                yield row
            else:
                problems.append(f"{path.parent.name}/{path.name} line {number} is no JSON object")


def _newest_diagnosis(directory: RunDirectory, problems: list[str]) -> dict[str, Any]:
    def step(path: Path) -> int:
        digits = re.sub(r"\D", "", path.stem)
        return int(digits) if digits else -1

    for path in sorted(directory.diagnosis.glob("*.json"), key=step, reverse=True):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            content = None
        if isinstance(content, dict):
            return content | {"step": content.get("step", step(path))}
        problems.append(f"diagnosis/{path.name} is no readable JSON object")
    return {}
