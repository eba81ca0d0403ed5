"""Checks before anything starts: batch, schedule, data, disk, memory, names. They take seconds and no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import load_hardware
from olmo_ext.base.quantities import format_bytes, format_count
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.run_length import batch_per_rank, check_one_batch, run_length, schedule_warnings
from olmo_ext.config.sweep import Sweep
from olmo_ext.config.sweep_run import SweepRun
from olmo_ext.data.shared_orders import order_warnings
from olmo_ext.launch.fit_to_node import Placement, describe, estimate


@dataclass(kw_only=True)
class Findings:
    """What the checks have found."""

    errors: list[str] = field(default_factory=list)
    """What would make a run fail."""

    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    settings: dict[str, list[str]] = field(default_factory=dict)
    """How runs will run (the node rule's choices in words) -> their groups."""

    def add_error(self, text: str) -> None:
        if text not in self.errors:
            self.errors.append(text)

    def refuse(self) -> None:
        """:raises InputError: with the first error, if there is one, and how many more there are."""
        if self.errors:
            others = len(self.errors) - 1
            raise InputError(self.errors[0], right=f"and {others} more, --dry-run shows them" if others else None)

    def add_warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def preflight(
    sweep: Sweep,
    missing: Sequence[SweepRun],
    sweep_directory: Path,
    *,
    placement: Placement | None = None,
    will_be_fetched: bool = False,
) -> Findings:
    """Check the runs that are about to start.

    :param missing: the runs of the sweep that are not finished and not queued.
    :param placement: the node type and numbers; None for this machine.
    :param will_be_fetched: whether a job before them brings the training data.
    """
    findings = Findings()
    checks: list[Callable[[], None]] = [
        lambda: _check_data(missing, findings, will_be_fetched=will_be_fetched),
        lambda: _check_space(missing, sweep_directory, findings),
        lambda: _check_orders(sweep, findings),
    ]
    for run in missing:
        checks.append(lambda run=run: _check_run(sweep, run, placement, findings))  # type: ignore[misc]
    for check in checks:
        try:
            check()
        except InputError as error:
            findings.add_error(str(error))
    return findings


def _check_run(sweep: Sweep, run: SweepRun, placement: Placement | None, findings: Findings) -> None:
    from olmo_ext.training.requirements import check_requirements
    from olmo_ext.weights_and_biases.live_run import check_names

    where, config = f"{sweep.source}, run {run.name}", run.config
    if config.node is not None:
        load_hardware().node(config.node, where=f"{sweep.source}, node")
    batch_per_rank(config, placement.world_size if placement else 1, where=where)
    check_requirements(config, where=where, trains_here=placement is None)
    try:
        for text in schedule_warnings(config, config.shape, run_length(config)):
            findings.add_warning(text)
    except InputError:
        pass  # in epochs: the data check counts them
    check_names(config.plain(), sweep=sweep.name, run=run.name)
    if placement is not None:
        needed, memory = estimate(run.config, placement).total, placement.node.gpu.usable_memory
        groups = findings.settings.setdefault(describe(run.config, placement), [])
        if run.group not in groups:
            groups.append(run.group)
        if needed > memory:
            raise InputError(
                f"a step needs {format_bytes(needed)} a GPU, {placement.node.gpu.name} has {format_bytes(memory)}",
                where=where,
                right="a smaller device_train_microbatch_size, FSDP, or activation_checkpointing",
            )


def _data_key(run: SweepRun) -> str:
    length = ("max_duration", "stop_at", "stop_after", "load_path", "reset_trainer_state", "global_train_batch_size")
    config = run.config.plain()
    needed = [config[key] for key in ("data", "evaluators", *length)]
    return json.dumps([needed, run.config.model.max_sequence_length, run.config.model.vocab_size], default=str)


def _check_data(runs: Sequence[SweepRun], findings: Findings, *, will_be_fetched: bool) -> None:
    """The training data is there, is whole, and is long enough; so are the evaluation sets."""
    from olmo_ext.data.fingerprint import data_fingerprint, evaluation_fingerprints

    for config in {_data_key(run): run.config for run in reversed(list(runs))}.values():
        paths = [str(path) for path in config.data.paths or []]
        if any("://" in path for path in paths):
            findings.add_warning("data.paths are remote: their length is seen when a run starts")
            continue
        try:
            if not will_be_fetched:
                _check_length(config, data_fingerprint(config))
        except InputError as error:
            findings.add_error(str(error))
        try:
            evaluation_fingerprints(config)
        except InputError as error:
            findings.add_error(str(error))


def _check_length(config: TrainConfig, data: dict[str, Any]) -> None:
    batch, instances = config.global_train_batch_size, data["instances"]
    where = str(config.data.subset or "data")
    steps = run_length(config, instances=instances, where=where).steps
    check_one_batch(instances, batch, where=where)
    in_epochs = str(config.max_duration).endswith("ep")
    if data["kind"] == "subset" and not in_epochs and steps > instances // batch:
        needed = steps * batch * config.model.max_sequence_length
        raise InputError(
            f"the subset holds {format_count(data['tokens'])} tokens, the run needs {format_count(needed)}",
            where=where,
            right=f"`olmo-ext data fetch --tokens {needed}` continues the subset",
        )


def _newest_checkpoint_bytes(checkpoints: Path) -> int:
    """Bytes of the largest checkpoint of a run, 0 without one: all of a run are of one size."""
    folders = checkpoints.glob("step*")
    return max((sum(f.stat().st_size for f in folder.glob("*") if f.is_file()) for folder in folders), default=0)


def _check_space(runs: Sequence[SweepRun], sweep_directory: Path, findings: Findings) -> None:
    """Room for the checkpoints of all runs that are missing, one more being written beside the kept ones."""
    from olmo_ext.training.checkpoint import estimated_bytes

    if not runs:
        return
    probe = sweep_directory.absolute()
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    sizes = [estimated_bytes(run.config, run.config.shape) for run in runs]
    # What other runs hold, or a run more than its newest one, makes no room for a checkpoint that is not there yet.
    present = [_newest_checkpoint_bytes(sweep_directory / run.name / "checkpoints") for run in runs]
    least = sum(max(0, size - there) for size, there in zip(sizes, present, strict=True)) + max(sizes)
    if least > free:
        raise InputError(
            f"{len(runs)} runs need {format_bytes(least)} for their newest checkpoints, {format_bytes(free)} are free",
            where=str(probe),
            right="free space, or another --runs-directory",
        )
    findings.facts.append(f"checkpoints: at least {format_bytes(least)} of {format_bytes(free)} free in {probe}")


def _check_orders(sweep: Sweep, findings: Findings) -> None:
    """Of all the runs, the finished ones too: it is with them that the others will be compared."""
    if len({(run.config.data.seed, run.config.epoch) for run in sweep.runs}) == 1:
        return
    known: dict[str, int | None] = {}
    for run in sweep.runs:
        key = _data_key(run)
        if key not in known:
            known[key] = _instances(run.config)
    for text in order_warnings((run.config, known[_data_key(run)]) for run in sweep.runs):
        findings.add_warning(text)


def _instances(config: TrainConfig) -> int | None:
    """Of one epoch; None for data that is not here, which `_check_data` tells."""
    from olmo_ext.data.fingerprint import data_fingerprint

    if any("://" in str(path) for path in config.data.paths or []):
        return None
    try:
        return data_fingerprint(config)["instances"]
    except InputError:
        return None
