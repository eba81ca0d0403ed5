"""`olmo-ext sync`: bring runs up to W&B, whole and once.

The curves come from metrics.jsonl and not from wandb's offline segments, through the public SDK, because that is
 - right: only rows of the surviving history go up, while segments of several attempts overlap and `wandb sync` sends
   both, the lost values first;
 - complete: it needs no flush before a kill, no login or `wandb` section at training time, and continues an online run
   whose server went away, whose file `wandb sync` would send a second time;
 - safe: the server's own last step decides where to go on, and is asked again after the upload. `wandb sync` exits 0
   when a torn segment made it drop the rest.
From the segments come the system metrics, which nothing else holds; a torn last record is cut off in a copy first.

What went up is kept in `wandb/uploads.json` of the run, one entry for each server, project and run id.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.sweep_directory import SweepDirectory
from olmo_ext.weights_and_biases.live_run import Writer, writer_settings
from olmo_ext.weights_and_biases.offline_file import Segment, find_files, read_segment, repair, settle
from olmo_ext.weights_and_biases.settings import ID_FILE, check_names, has_key, run_id, server_url
from olmo_ext.weights_and_biases.upload_rows import digest, history, overtaken_steps

LEDGER = "uploads.json"
START_SECONDS = 30.0
BASE_SECONDS = 60.0
"""Least time for an upload; `ROWS_PER_SECOND` adds to it for long runs."""

ROWS_PER_SECOND = 200


@dataclass(kw_only=True)
class Upload:
    """The outcome of one run's upload, or with `--dry-run` the plan for it."""

    run: str
    run_id: str | None = None
    status: str = "nothing"
    """uploaded | complete (was up already) | nothing (no rows) | busy (logging online now) | planned | failed"""

    rows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    attempts: int = 0
    waiting: int = 0
    """Rows of a run that still goes on, beyond its last complete checkpoint: a restart may overtake them."""

    segments: list[str] = field(default_factory=list)
    repaired: dict[str, int] = field(default_factory=dict)
    """Segment -> bytes of a torn last record."""

    system_rows: int = 0
    url: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status != "failed"

    def line(self) -> str:
        """One line for a person."""
        text = f"{self.run}: {self.status}"
        if self.rows:
            text += f", {_rows(self.rows)}, steps {self.first_step} to {self.last_step}"
        if self.attempts > 1:
            text += f" of {self.attempts} attempts"
        if self.system_rows:
            text += f", {self.system_rows} system rows of {len(self.segments)} segments"
        for name, size in self.repaired.items():
            text += f"; {name}: torn last record ({size} bytes) cut off"
        if self.waiting:
            text += f"; {_rows(self.waiting)} beyond the last checkpoint kept back"
        text += "".join(f"; {note}" for note in self.notes)
        return f"{text} -> {self.url}" if self.url else text


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def find_runs(path: Path) -> list[RunDirectory]:
    """The runs of a sweep's folder, or the one run that `path` is.

    :raises InputError: where there is neither.
    """
    run = RunDirectory(path)
    runs = [run] if run.exists() else SweepDirectory(path).run_folders()
    if not runs:
        raise InputError("no runs here", where=str(path), right="a folder runs/<sweep>, or one run's folder")
    return runs


class Ledger:
    """`wandb/uploads.json`: the record of what was uploaded to which project.

    :param key: server, entity, project and run id, joined by slashes.
    :raises InputError: for a file that is no such ledger.
    """

    def __init__(self, run: RunDirectory, key: str) -> None:
        self.path, self.key = run.wandb / LEDGER, key
        try:
            self.content: dict[str, Any] = json.loads(self.path.read_text())
            self.entry: dict[str, Any] = self.content.get(key, {})
            int(self.entry.get("through_step", -1))
        except FileNotFoundError:
            self.content, self.entry = {}, {}
        except (ValueError, TypeError, AttributeError):
            raise InputError(
                "no list of uploads", where=str(self.path), right="delete it: the server is asked as well"
            ) from None

    def write(self, **changes: Any) -> None:
        self.entry = {**self.entry, **changes}
        self.content[self.key] = self.entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.content, indent=1) + "\n")


def _new_segments(run: RunDirectory, upload: Upload, ledger: Ledger) -> list[Segment]:
    """The offline segments whose system metrics have not been sent, oldest first, repaired where they are torn."""
    sent = ledger.entry.get("segments", [])
    segments = []
    for path in find_files(run.wandb):
        segment = read_segment(path)
        if not segment.offline or segment.name in sent:
            continue
        if segment.run_id not in (None, upload.run_id):
            upload.notes.append(f"{segment.name} belongs to run id {segment.run_id} and is left alone")
            continue
        if segment.torn_bytes:
            upload.repaired[segment.name] = segment.torn_bytes
        segments.append(segment)
    upload.segments = [segment.name for segment in segments]
    upload.system_rows = sum(len(segment.stats) for segment in segments)
    return segments


def _checked_values(run: RunDirectory, *, sweep: str | None, project: str | None, entity: str | None) -> dict[str, Any]:
    """The run's config with the project and entity of the command line."""
    values = run.read_config()
    section = {**(values.get("wandb") or {})}
    section.update({key: value for key, value in (("project", project), ("entity", entity)) if value})
    section["project"] = section.get("project") or os.environ.get("WANDB_PROJECT")
    if not section["project"]:
        raise InputError("no W&B project", where=f"{run.config_path}, wandb.project", right="sync with --project NAME")
    values = {**values, "wandb": section}
    check_names(values, sweep=sweep, run=run.name)
    return values


def sweep_of(run: RunDirectory, asked: Path) -> str | None:
    """The name of the sweep: the folder that was asked for, or a single run's parent where a sweep.json stands."""
    sweep = SweepDirectory(run.path.resolve().parent)
    return sweep.path.name if sweep.path == asked.resolve() or sweep.is_declared() else None


def sync_run(
    run: RunDirectory,
    *,
    sweep: str | None,
    project: str | None = None,
    entity: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    seconds: float | None = None,
) -> Upload:
    """Upload one run.

    :param project: instead of `wandb.project` of the config; needed for a run trained without a `wandb` section.
    :param again: send everything as a new W&B run with a new id.
    :param seconds: limit for the whole upload; by default a minute and more for many rows.
    :raises InputError: for a run without project, names that W&B does not take, or a file of its folder that cannot be
        read.
    """
    values = _checked_values(run, sweep=sweep, project=project, entity=entity)
    section = values["wandb"]
    upload = Upload(run=run.name)
    if again and not dry_run:
        (run.path / ID_FILE).unlink(missing_ok=True)
    upload.run_id = existing_id(run.path) if dry_run else run_id(run)

    all_rows = run.read_metrics()
    state = run.read_state()
    rows = history(all_rows, log_interval=section.get("log_interval") or 1)
    # What was sent is told by the digest of every step up to the last of it: how often a run logs may change.
    every_step = history(all_rows, log_interval=1)
    upload.attempts = len({row.attempt for row in run.read_all_metrics()})
    if state.status in ("pending", "running", "requeued"):
        # Beyond the checkpoint a restart trains again; the last step may still get its evaluation.
        settled = [(step, row) for step, row in rows if step <= state.step and step < rows[-1][0]]
        upload.waiting, rows = len(rows) - len(settled), settled
    entity = section.get("entity") or os.environ.get("WANDB_ENTITY")
    target = "/".join([server_url(), entity or "-", section["project"], upload.run_id or "-"])
    ledger = Ledger(run, target)
    segments = _new_segments(run, upload, ledger)
    through = int(ledger.entry.get("through_step", -1))
    before = [item for item in every_step if item[0] <= through]
    new = [item for item in rows if item[0] > through]
    upload.rows = len(new)
    if new:
        upload.first_step, upload.last_step = new[0][0], new[-1][0]
    upload.url = ledger.entry.get("url")
    if before and ledger.entry.get("digest") != digest(before):
        # W&B takes no second value for a step, so under this id the difference can only be reported.
        upload.status = "failed"
        upload.notes.append(
            f"W&B shows steps up to {through} of an attempt that another has overtaken with other values; "
            "--again uploads the run under a new id"
        )
        return upload
    if not rows:
        return upload
    if not new and not segments:
        upload.status = "complete"
        return upload
    if dry_run:
        upload.status = "planned"
        return upload
    settings = writer_settings(
        values,
        run_directory=run,
        shape=run.read_shape() if run.shape_path.exists() else {},
        provenance=run.read_provenance() if run.provenance_path.exists() else {},
        sweep=sweep,
        mode="online",
    )
    limit = seconds or BASE_SECONDS + len(new) / ROWS_PER_SECOND
    last = max(new[-1][0] if new else -1, through)
    trained = digest([item for item in every_step if item[0] <= last])
    _send(run, upload, settings, ledger=ledger, rows=new, trained=trained, segments=segments, limit=limit)
    return upload


def existing_id(folder: Path) -> str | None:
    """The W&B id of the run in this folder; none before its first start with W&B. Makes none, unlike `run_id`."""
    path = folder / ID_FILE
    return path.read_text().strip() or None if path.exists() else None


def _send(
    run: RunDirectory,
    upload: Upload,
    settings: dict[str, Any],
    *,
    ledger: Ledger,
    rows: list[tuple[int, dict[str, Any]]],
    trained: str,
    segments: list[Segment],
    limit: float,
) -> None:
    for segment in segments:
        if segment.torn_bytes:
            repair(segment.path)
    run.wandb.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="olmo-ext-sync-") as scratch:
        settings.update(
            directory=scratch,
            start_seconds=min(START_SECONDS, limit),
            online_only=True,
        )
        writer = Writer(settings, log_path=str(run.wandb / "sync.log"), environment=dict(os.environ))
        try:
            writer.became_ready.wait(timeout=limit + 10.0)
            if writer.ready is None:
                writer.close(exit_code=1, seconds=2.0)
                reason = (writer.finished or {}).get("reason") or "no answer from the server"
                upload.status = "busy" if (writer.finished or {}).get("busy") else "failed"
                upload.notes.append(" ".join(reason.split()))
                return
            upload.url = writer.ready["url"]
            on_server = int(writer.ready["step"]) - 1
            through = int(ledger.entry.get("through_step", -1))
            if (problem := _disagreement(run, upload, rows, on_server=on_server, through=through)) is not None:
                upload.status = "failed"
                upload.notes.append(f"{upload.url} {problem}; --again uploads the run under a new id")
                writer.kill()
                return
            names = [segment.name for segment in segments]
            # Written first: system rows that went up before a kill must not go up again.
            ledger.write(segments=[*ledger.entry.get("segments", []), *names])
            for record in _system_records(segments):
                writer.put({"stats": record}, wait=True)
            for step, row in rows:
                if step > on_server:
                    writer.put({"row": row, "step": step}, wait=True)
            last = rows[-1][0] if rows else through
            writer.put({"expect_step": last})
            state = run.read_state()
            done = writer.close(exit_code=1 if state.status == "failed" else 0, seconds=limit)
        finally:
            if writer.process.poll() is None:
                writer.kill()
    finished = writer.finished or {}
    if not done:
        upload.status = "failed"
        upload.notes.append(finished.get("reason") or f"not finished within {limit:.0f} s")
        return
    if (taken := finished.get("stats", 0)) < upload.system_rows:
        upload.notes.append(f"{upload.system_rows - taken} system rows were not taken by this version of wandb")
        upload.system_rows = taken
    ledger.write(
        through_step=last,
        rows=ledger.entry.get("rows", 0) + len(rows),
        digest=trained,
        url=upload.url,
    )
    for segment in segments:
        settle(segment.path)
    upload.status = "uploaded"


def _disagreement(
    run: RunDirectory, upload: Upload, rows: list[tuple[int, dict[str, Any]]], *, on_server: int, through: int
) -> str | None:
    """Why the run on the server cannot be continued, in words, or None.

    :param on_server: the last step that it has.
    :param through: the last step that we have sent and that was confirmed.
    """
    if on_server < through:
        return f"ends at step {on_server}, although steps up to {through} were uploaded and confirmed"
    # An online attempt may have brought some of them up without our ledger knowing.
    already = [item for item in rows if item[0] <= on_server]
    if already:
        upload.notes.append(f"{len(already)} of the rows were up already")
    if lost := overtaken_steps(run, already):
        # They went up online before another attempt overtook them; W&B takes no second value for a step.
        return f"shows values of an overtaken attempt in steps {lost[0]} to {lost[-1]}"
    return None


def _system_records(segments: list[Segment]) -> Iterator[str]:
    for segment in segments:
        for record in segment.stats:
            yield base64.b64encode(record).decode()


def sync_sweep(path: Path, **options: Any) -> Iterator[Upload]:
    """Upload the runs of a sweep one after the other; a failed run does not stop the others.

    :raises InputError: before anything is sent, when there is no login.
    """
    runs = find_runs(path)
    if not options.get("dry_run") and not has_key():
        raise InputError("no W&B login", where=server_url(), right="set WANDB_API_KEY or run `wandb login`")
    for run in runs:
        _checked_values(run, sweep=sweep_of(run, path), project=options.get("project"), entity=options.get("entity"))
    for run in runs:
        try:
            yield sync_run(run, sweep=sweep_of(run, path), **options)
        except (InputError, WorkError, OSError) as error:
            yield Upload(run=run.name, status="failed", notes=[" ".join(str(error).split())])


def as_json(uploads: list[Upload]) -> list[Mapping[str, Any]]:
    """The uploads as plain data."""
    return [dict(vars(upload)) for upload in uploads]


__all__ = ["Upload", "as_json", "find_runs", "sync_run", "sync_sweep"]
