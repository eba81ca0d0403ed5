"""`olmo-ext sync` against a W&B server on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory, RunState
from olmo_ext.launch.node_agent import children_of
from olmo_ext.weights_and_biases import offline_file, sync
from tests.weights_and_biases.wandb_runs import (
    LOSS,
    add_system_record,
    attempt,
    command,
    framed,
    gone_within,
    make,
    row,
    sweep_file,
)
from tests.weights_and_biases.wandb_server import WandbServer

pytestmark = pytest.mark.once


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    with WandbServer() as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield server
        assert not server.errors
        assert not server.unanswered


def test_three_overlapping_offline_segments_become_one_curve_of_the_surviving_attempts(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 20), offset=9.0)
    attempt(run, 2, range(11, 16), offset=7.0)
    attempt(run, 3, range(13, 21))
    assert len(offline_file.find_files(run.wandb)) == 3
    upload = sync.sync_run(run, sweep=None)
    assert (upload.status, upload.rows, upload.attempts) == ("uploaded", 20, 3)
    [received] = server.runs.values()
    expected = [9.0] * 10 + [7.0] * 2 + [0.0] * 8
    assert received.curve(LOSS) == [
        (step, pytest.approx(5.0 - 0.1 * step + offset)) for step, offset in zip(range(1, 21), expected, strict=True)
    ]
    assert received.lines[3]["tokens"] == 4000 and received.lines[3]["flops"] == 4e9
    assert received.exit_code == 0 and received.summary["_step"] == 20
    assert received.lines[3]["_timestamp"] == pytest.approx(1_790_000_004)


def test_system_metrics_which_the_segments_alone_hold_arrive_with_their_own_times(server, tmp_path):
    run = make(tmp_path / "run")
    for number, steps in enumerate([range(1, 6), range(4, 9)], start=1):
        attempt(run, number, steps)
    written = [(1_790_000_000 + 15 * n, 100.0 + n) for n in range(6)]
    for n, path in enumerate(offline_file.find_files(run.wandb)):
        for seconds, power in written[3 * n : 3 * n + 3]:
            add_system_record(path, seconds=seconds, watts=power)
    upload = sync.sync_run(run, sweep=None)
    [received] = server.runs.values()
    watts = "system.gpu.0.powerWatts"
    sent = [(event["_timestamp"], event[watts]) for event in received.events if watts in event]
    assert sent == written
    # wandb's own sampling adds what the time of the test happens to give.
    assert upload.system_rows == len(received.events) >= len(written) and not upload.notes


def test_a_second_sync_sends_nothing_and_a_later_one_only_what_is_new(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 11), log=False)
    assert sync.sync_run(run, sweep=None).rows == 10
    asked = len(server.operations)
    again = sync.sync_run(run, sweep=None)
    assert (again.status, again.rows) == ("complete", 0)
    assert len(server.operations) == asked
    attempt(run, 2, range(11, 16), log=False)
    assert sync.sync_run(run, sweep=None).rows == 5
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == list(range(1, 16))


def test_a_ledger_lost_to_a_kill_does_not_send_a_row_twice(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 11), log=False)
    sync.sync_run(run, sweep=None)
    (run.wandb / sync.LEDGER).unlink()
    attempt(run, 2, range(11, 13), log=False)
    upload = sync.sync_run(run, sweep=None)
    assert upload.status == "uploaded" and "10 of the rows were up already" in upload.line()
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == list(range(1, 13))


def test_an_online_run_whose_server_went_away_is_completed(server, tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    monkeypatch.setenv("WANDB_MODE", "online")
    attempt(run, 1, range(1, 6))
    attempt(run, 2, range(6, 11), log=False)
    upload = sync.sync_run(run, sweep=None)
    assert "5 of the rows were up already" in upload.line()
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == list(range(1, 11))


def test_a_run_that_logs_online_right_now_is_left_alone(server, tmp_path, monkeypatch):
    from olmo_ext.weights_and_biases import live_run as wandb_run

    run = make(tmp_path / "run")
    monkeypatch.setenv("WANDB_MODE", "online")
    logger = wandb_run.start(
        run.read_config(), run_directory=run, shape=run.read_shape(), provenance={}, sweep=None, attempt=1
    )
    assert logger._writer.became_ready.wait(30)
    attempt(run, 1, range(1, 6), log=False)
    upload = sync.sync_run(run, sweep=None)
    assert (upload.status, upload.ok) == ("busy", True)
    logger.finish(0)
    assert sync.sync_run(run, sweep=None).status == "uploaded"


def test_an_online_run_that_shows_an_overtaken_attempt_is_reported(server, tmp_path, monkeypatch):
    run = make(tmp_path / "run")
    monkeypatch.setenv("WANDB_MODE", "online")
    attempt(run, 1, range(1, 20), offset=9.0)
    attempt(run, 2, range(11, 25))
    upload = sync.sync_run(run, sweep=None)
    assert upload.status == "failed" and "steps 11 to 19" in upload.line()
    upload = sync.sync_run(run, sweep=None, again=True)
    assert upload.status == "uploaded"
    values = dict(server.runs[upload.run_id].curve(LOSS))
    assert values[10] == pytest.approx(13.0) and values[11] == pytest.approx(3.9)


def test_values_overtaken_after_their_upload_are_reported_and_again_makes_a_new_run(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 11), offset=3.0, log=False)
    sync.sync_run(run, sweep=None)
    attempt(run, 2, range(6, 11), log=False)
    upload = sync.sync_run(run, sweep=None)
    assert upload.status == "failed" and "--again" in upload.line()
    upload = sync.sync_run(run, sweep=None, again=True)
    assert upload.status == "uploaded" and upload.rows == 10
    assert len(server.runs) == 2
    assert server.runs[upload.run_id].curve(LOSS)[-1] == (10, pytest.approx(4.0))


def test_logging_less_often_after_a_restart_is_no_conflict(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 11), log=False)
    sync.sync_run(run, sweep=None)
    values = run.read_config()
    run.write_config({**values, "wandb": {**values["wandb"], "log_interval": 5}})
    attempt(run, 2, range(11, 21), log=False)
    upload = sync.sync_run(run, sweep=None)
    assert (upload.status, upload.rows) == ("uploaded", 2), upload.line()
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == [*range(1, 11), 15, 20]
    assert sync.sync_run(run, sweep=None).status == "complete"


def test_a_repetition_with_the_same_values_is_no_conflict(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 11), log=False)
    sync.sync_run(run, sweep=None)
    attempt(run, 2, range(6, 13), log=False)
    assert (sync.sync_run(run, sweep=None).status, len(server.runs)) == ("uploaded", 1)


def test_rows_beyond_the_checkpoint_of_a_run_that_goes_on_wait(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 20), log=False)
    run.write_state(RunState(status="running", attempt=1, step=12))
    upload = sync.sync_run(run, sweep=None)
    assert (upload.last_step, upload.waiting) == (12, 7)


def test_a_segment_torn_by_sigkill_is_repaired_into_a_copy_and_its_rest_is_sent(server, tmp_path):
    run = make(tmp_path / "run")
    logger = attempt(run, 1, range(1, 400), state="failed", kill=True)
    [path] = offline_file.find_files(run.wandb)
    deadline = time.monotonic() + 120
    while not (path.exists() and len(offline_file.scan(path).records) > 20):
        assert time.monotonic() < deadline, "wandb has written nothing"
        time.sleep(0.1)
    # wandb's own service leads a session of its own, and might write once more.
    services = children_of(logger._writer.process.pid)
    os.killpg(logger._writer.process.pid, signal.SIGKILL)
    logger._writer.process.wait()
    for service in services:
        with contextlib.suppress(ProcessLookupError):
            os.kill(service, signal.SIGKILL)
        assert gone_within(service, 60)
    whole = path.read_bytes()
    path.write_bytes(whole[:-11])  # Flushes are whole records most of the time: tear one for certain.
    intact = len(offline_file.scan(path).records)
    assert offline_file.scan(path).torn_bytes > 0
    torn = path.read_bytes()
    copy = offline_file.repair(path)
    assert copy is not None and path.read_bytes() == torn
    assert offline_file.scan(copy).torn_bytes == 0 and len(offline_file.scan(copy).records) == intact
    upload = sync.sync_run(run, sweep=None)
    assert upload.status == "uploaded" and upload.rows == 399
    assert upload.repaired == {path.parent.name: len(torn) - offline_file.scan(path).total_bytes}
    assert "torn last record" in upload.line()
    assert not copy.exists()
    [received] = server.runs.values()
    assert len(received.curve(LOSS)) == 399 and received.exit_code == 1


def test_a_file_cut_anywhere_gives_a_prefix_of_its_records(tmp_path):
    records = [bytes([n % 256]) * size for n, size in enumerate([1, 500, 32_000, 80_000, 7, 32_754, 9, 0, 3])]
    data = offline_file.IDENT.pack(b":W&B", 0xBEE1, 0)
    ends = []
    for record in records:
        data = framed(data, record)
        ends.append(len(data))
    path = tmp_path / "run-x.wandb"
    for cut in [*range(0, 600), *range(32_000, len(data), 997), len(data), *(end - 1 for end in ends), *ends]:
        path.write_bytes(data[:cut])
        found = offline_file.scan(path)
        count = sum(end <= cut for end in ends)
        assert found.records == records[:count]
        assert (found.torn_bytes == 0) == (cut == 0 or cut == 7 or cut in ends), cut
    damaged = bytearray(data)
    damaged[ends[1] + 100] ^= 1
    path.write_bytes(damaged)
    assert offline_file.scan(path).records == records[:2]
    path.write_bytes(b"not a wandb file")
    with pytest.raises(InputError, match="not an offline file"):
        offline_file.scan(path)


def test_the_link_latest_run_does_not_double_a_segment(tmp_path):
    folder = tmp_path / "offline-run-20260101_000000-abc"
    folder.mkdir()
    (folder / "run-abc.wandb").write_bytes(b"")
    (tmp_path / "latest-run").symlink_to(folder)
    (tmp_path / "run-20250101_000000-abc").symlink_to(folder)
    assert offline_file.find_files(tmp_path) == [folder / "run-abc.wandb"]


def test_the_command_uploads_a_sweep_and_says_what_went_up(server, tmp_path):
    sweep = tmp_path / "runs" / "sweep"
    names = ["narrow", "wide"]
    for name in names:
        attempt(make(sweep / name, wandb=False), 1, range(1, 4), log=False)
    sweep_file(sweep, names)
    environment = server.environment(tmp_path / "home")
    refused = command(["sync", str(sweep)], environment)
    assert refused.returncode == 2 and "--project" in refused.stderr and refused.stderr.count("\n") == 1
    done = command(["sync", str(sweep), "--project", "shapes", "--json"], environment)
    assert done.returncode == 0, done.stderr
    assert [(u["run"], u["status"], u["rows"]) for u in json.loads(done.stdout)] == [
        ("narrow", "uploaded", 3),
        ("wide", "uploaded", 3),
    ]
    assert {run.fields["groupName"] for run in server.runs.values()} == {"sweep"}
    assert {run.fields["displayName"] for run in server.runs.values()} == set(names)
    config = {key: value["value"] for key, value in next(iter(server.runs.values())).config.items() if key != "_wandb"}
    assert config["shape_name"] == "narrow" and config["parameters_non_embedding"] == 57344


def test_a_server_that_is_away_is_exit_code_1_within_seconds(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 4), log=False)
    server.stop()
    begun = time.monotonic()
    failed = command(["sync", str(run.path), "--seconds", "4"], server.environment(tmp_path / "home"))
    assert failed.returncode == 1 and "did not go up: run" in failed.stderr
    assert time.monotonic() - begun < 90
    assert not (run.wandb / sync.LEDGER).exists()


def test_a_dry_run_needs_no_login_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 4), log=False)
    before = sorted(path.name for path in run.path.rglob("*"))
    [upload] = sync.sync_sweep(run.path, dry_run=True)
    assert (upload.status, upload.rows) == ("planned", 3)
    assert sorted(path.name for path in run.path.rglob("*")) == before
    with pytest.raises(InputError, match="no W&B login"):
        list(sync.sync_sweep(run.path))


def test_train_and_eval_of_a_step_become_one_row(tmp_path):
    run = RunDirectory(tmp_path)
    evaluation = row(1, 2)
    evaluation.kind, evaluation.values = "eval", {"eval/validation/CrossEntropyLoss": 3.0}
    run.append_metrics(row(1, 1))
    run.append_metrics(row(1, 2))
    run.append_metrics(evaluation)
    rows = sync.history(run.read_metrics(), log_interval=2)
    assert [step for step, _ in rows] == [2]
    assert rows[0][1]["eval/validation/CrossEntropyLoss"] == 3.0 and LOSS in rows[0][1]


def test_nothing_in_the_folder_is_taken_for_a_sweep(tmp_path):
    with pytest.raises(InputError, match="no runs here"):
        sync.find_runs(Path(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", '{"KEY": []}', '{"KEY": {"through_step": "x"}}'])
def test_a_ledger_that_is_none_is_one_line(tmp_path, content):
    run = RunDirectory(tmp_path)
    run.wandb.mkdir()
    (run.wandb / sync.LEDGER).write_text(content.replace("KEY", "server/team/project/id"))
    with pytest.raises(InputError, match="uploads.json: no list of uploads; delete it"):
        sync.Ledger(run, "server/team/project/id")
