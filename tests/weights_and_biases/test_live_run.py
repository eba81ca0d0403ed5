"""W&B logging: one run for all attempts and ranks, names and sizes within limits, and a training that never waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.weights_and_biases import live_run as wandb_run
from olmo_ext.weights_and_biases import settings as wandb_settings
from tests.weights_and_biases.wandb_runs import CONFIG, LOSS, SHAPE, attempt, compare_with_golden, gone_within, make
from tests.weights_and_biases.wandb_server import API_KEY, WandbServer

pytestmark = pytest.mark.once


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    with WandbServer() as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WANDB_MODE", "online")
        yield server


@pytest.fixture
def quick(monkeypatch):
    """A limit of a few seconds at the end instead of twenty."""
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 3.0)


def test_an_online_run_arrives_as_in_the_golden_file(server, tmp_path):
    run = make(tmp_path / "run")
    logger = attempt(run, 1, range(1, 4))
    assert logger.url == f"{server.url}/loopback/shapes/runs/{wandb_settings.run_id(run)}"
    [received] = server.runs.values()
    for line in received.lines:
        line.pop("_runtime")
    config = {key: value["value"] for key, value in received.config.items()}
    # wandb lists the axes in any order, names a step metric (5) by its place in that list, and may or may not have
    # written out the metrics that the glob stands for.
    listed = config.pop("_wandb")["m"]
    axes = [{**axis, "5": listed[axis["5"] - 1]["1"]} if "5" in axis else axis for axis in listed]
    axes = [axis for axis in axes if axis.get("1") in ("tokens", "flops") or axis.get("2") == "*"]
    axes.sort(key=lambda axis: axis.get("1", "*"))
    fields = {key: received.fields[key] for key in ("project", "groupName", "displayName", "jobType", "tags")}
    compare_with_golden(
        "wandb_online_run.json", {"fields": fields, "config": config, "axes": axes, "history": received.lines}
    )
    assert received.exit_code == 0
    assert not server.unanswered and not server.errors


def test_no_key_reaches_a_file(server, tmp_path):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 4))
    files = [path for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 8
    assert not [path for path in files if API_KEY.encode() in path.read_bytes()]


def test_attempts_share_one_run_and_steps_never_go_back(server, tmp_path, caplog):
    run = make(tmp_path / "run")
    attempt(run, 1, range(1, 20))
    attempt(run, 2, range(11, 25))
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == list(range(1, 25))
    assert "9 rows of steps" in caplog.text
    assert sum("W&B" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_server_away_at_the_start_costs_training_nothing(server, tmp_path, caplog, quick, how, monkeypatch):
    monkeypatch.setattr(wandb_run, "START_SECONDS", 3.0)
    if how == "refused":
        server.stop()
    else:
        server.hang.set()
    run = make(tmp_path / "run")
    begun = time.monotonic()
    logger = wandb_run.start(run.read_config(), run_directory=run, shape=SHAPE, provenance={}, sweep="sweep", attempt=1)
    for step in range(1, 2001):
        logger.log({LOSS: 1.0}, step=step, tokens=step, flops=step)
    assert time.monotonic() - begun < 2.5  # less than the three seconds that something may wait
    # The writer itself takes as long as the machine needs to start wandb and to give up.
    assert logger._writer.became_ready.wait(90)
    begun = time.monotonic()
    logger.finish(0)
    assert time.monotonic() - begun < 20
    assert sum("going on offline" in record.message for record in caplog.records) == 1
    server.hang.clear()


@pytest.mark.parametrize("how", ["refused", "silent", "broken"])
def test_a_server_away_from_the_middle_to_the_end_costs_seconds(server, tmp_path, caplog, quick, how):
    run = make(tmp_path / "run")
    logger = wandb_run.start(run.read_config(), run_directory=run, shape=SHAPE, provenance={}, sweep="sweep", attempt=1)
    logger.log({LOSS: 1.0}, step=1, tokens=1, flops=1)
    assert logger._writer.became_ready.wait(90)
    if how == "refused":
        server.stop()
    elif how == "silent":
        server.hang.set()
    else:
        server.fail = True
    begun = time.monotonic()
    for step in range(2, 500):
        logger.log({LOSS: 1.0}, step=step, tokens=step, flops=step)
    assert time.monotonic() - begun < 2.5  # less than the three seconds that something may wait
    logger.finish(0)
    assert time.monotonic() - begun < 30
    assert logger._writer.process.poll() is not None
    assert "`olmo-ext sync` uploads the rest" in caplog.text
    server.hang.clear()


def test_the_exit_code_is_trainings_and_a_writer_outlives_no_training(server, tmp_path):
    """A stopped, a killed and a missing writer: the process that trains ends with its own code, within seconds."""
    program = """
import os, signal, sys, time
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.weights_and_biases import live_run as wandb_run
wandb_run.FINISH_SECONDS = 1.0
run = RunDirectory(sys.argv[1])
logger = wandb_run.start(run.read_config(), run_directory=run, shape={}, provenance={}, sweep=None, attempt=1)
logger.log({"a": 1.0}, step=1, tokens=1, flops=1.0)
logger._writer.became_ready.wait(30)
os.kill(logger._writer.process.pid, getattr(signal, sys.argv[2]))
for step in range(2, 5000):
    logger.log({"a": 1.0}, step=step, tokens=1, flops=1.0)
logger.finish(0)
print(logger._writer.process.pid)
assert "wandb" not in sys.modules and "torch" not in sys.modules
sys.exit(17)
"""
    for name in ("SIGSTOP", "SIGKILL"):
        begun = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", program, str(make(tmp_path / name).path), name],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 17, result.stderr
        assert time.monotonic() - begun < 60
        with pytest.raises(ProcessLookupError):
            os.kill(int(result.stdout), 0)


def test_two_ranks_are_one_run(server, tmp_path):
    program = """
import sys
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.weights_and_biases import live_run as wandb_run
run = RunDirectory(sys.argv[1])
logger = wandb_run.start(run.read_config(), run_directory=run, shape={}, provenance={}, sweep=None, attempt=1)
logger.log({"a": 1.0}, step=1, tokens=1, flops=1.0)
if hasattr(logger, "_writer"):
    logger._writer.became_ready.wait(90)
logger.finish(0)
"""
    run = make(tmp_path / "run")
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(run.path)], env={**os.environ, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(180) for rank in ranks] == [0, 0]
    [received] = server.runs.values()
    assert received.curve("a") == [(1, 1.0)]


def test_a_killed_training_leaves_a_closed_segment(server, tmp_path, monkeypatch):
    """SIGKILL of the training process alone: the writer ends the run by itself and nothing is torn."""
    from olmo_ext.weights_and_biases import offline_file

    monkeypatch.setenv("WANDB_MODE", "offline")
    program = """
import os, sys, time
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.weights_and_biases import live_run as wandb_run
run = RunDirectory(sys.argv[1])
logger = wandb_run.start(run.read_config(), run_directory=run, shape={}, provenance={}, sweep=None, attempt=1)
for step in range(1, 101):
    logger.log({"a": 1.0}, step=step, tokens=1, flops=1.0)
while not logger._writer._queue.empty():
    time.sleep(0.01)
time.sleep(0.5)
print(logger._writer.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = make(tmp_path / "run")
    result = subprocess.run([sys.executable, "-c", program, str(run.path)], capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert gone_within(int(result.stdout), 120)
    [path] = offline_file.find_files(run.wandb)
    segment = offline_file.read_segment(path)
    assert (segment.rows, segment.torn_bytes, segment.finished) == (100, 0, True)


def test_without_a_login_the_run_is_offline_and_without_a_section_there_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_settings.choose_mode() == "offline"
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {API_KEY}\n")
    assert wandb_settings.choose_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_settings.choose_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    assert wandb_settings.choose_mode() == "online"
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert wandb_settings.choose_mode() == mode
    run = make(tmp_path / "run", wandb=False)
    logger = wandb_run.start({"wandb": None}, run_directory=run, shape={}, provenance={}, sweep=None, attempt=1)
    assert isinstance(logger, wandb_run.NullRun) and not run.wandb.exists()


def test_upstreams_cancel_check_is_off_unless_asked_for(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    assert not wandb_run.cancel_check_wanted()
    monkeypatch.setenv("OLMO_EXT_WANDB_CANCEL", "1")
    assert wandb_run.cancel_check_wanted()


def test_a_run_tagged_cancel_on_the_server_asks_training_to_stop(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_EXT_WANDB_CANCEL", "1")
    monkeypatch.setenv("OLMO_EXT_WANDB_CANCEL_SECONDS", "0.2")
    run = make(tmp_path / "run")
    logger = wandb_run.start(run.read_config(), run_directory=run, shape=SHAPE, provenance={}, sweep="sweep", attempt=1)
    assert logger._writer.became_ready.wait(30)
    assert logger.cancel_requested is None
    server.runs[wandb_settings.run_id(run)].fields["tags"] = ["test", "cancel"]
    deadline = time.monotonic() + 20
    while logger.cancel_requested is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert logger.cancel_requested == "tagged 'cancel' on W&B"
    logger.finish(0)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "n" * 200}, ("wandb.name", "200 characters", "128")),
        ({"group": "g" * 129}, ("wandb.group", "129 characters", "128")),
        ({"entity": "e" * 129}, ("wandb.entity", "128")),
        ({"project": "p" * 129}, ("wandb.project", "128")),
        ({"project": "a/b"}, ("wandb.project", "/")),
        ({"project": None}, ("wandb.project",)),
        ({"tags": ["ok", "t" * 65]}, ("wandb.tags[1]", "64")),
        ({"tags": [""]}, ("wandb.tags[0]", "empty")),
        ({"log_interval": 0}, ("wandb.log_interval",)),
    ],
)
def test_names_that_wandb_refuses_are_refused_at_submit(section, words):
    wandb_run.check_names(CONFIG)
    with pytest.raises(InputError) as caught:
        wandb_run.check_names({**CONFIG, "wandb": {**CONFIG["wandb"], **section}})
    assert all(word in str(caught.value) for word in words)


def test_a_sweeps_and_a_runs_own_name_are_checked_too():
    for names in ({"sweep": "s" * 200}, {"run": "r" * 200}):
        with pytest.raises(InputError, match="200 characters"):
            wandb_run.check_names(CONFIG, **names)
    wandb_run.check_names({"wandb": None}, sweep="s" * 200)


def test_wandb_agrees_with_our_limits():
    import wandb

    wandb.Settings(project="p" * 128, run_tags=("t" * 64,), run_id="abc")
    for wrong in ({"project": "p" * 129}, {"project": "a/b"}, {"run_tags": ("t" * 65,)}):
        with pytest.raises(Exception, match="characters"):
            wandb.Settings(**wrong)


def test_forty_thousand_paths_become_a_count_and_a_hash(tmp_path):
    paths = [f"/data/part-{number}.npy" for number in range(40_000)]
    run = RunDirectory(tmp_path / "run")

    def config_of(**data):
        return wandb_settings.wandb_config(
            {**CONFIG, "data": data}, shape=SHAPE, provenance={}, sweep="s", shape_name="g", run_name=run.name
        )

    config = config_of(paths=paths)
    assert config["data"]["paths"]["count"] == 40_000
    assert config["data"]["paths"]["sha256"] != config_of(paths=paths[:-1] + ["x"])["data"]["paths"]["sha256"]
    assert len(json.dumps(config)) < 10_000
    huge = config_of(**{f"key{number}": "x" * 4000 for number in range(2000)})
    assert len(json.dumps(huge)) <= wandb_settings.MAX_CONFIG_BYTES
    assert set(huge["data"]) == {"bytes", "sha256"} and huge["shape_d_model"] == 64


def test_secrets_in_a_config_do_not_go_up():
    config = wandb_settings.bounded(
        {"api_key": "abc", "url": "s3://user:word@host/bucket", "tokenizer": {"identifier": "t"}, "my_secret": "x"}
    )
    assert config["tokenizer"] == {"identifier": "t"} and config["url"] == "s3://host/bucket"
    assert "abc" not in config["api_key"] and config["my_secret"] != "x"


def test_upstreams_team_is_never_used_silently():
    from olmo_ext.config.schema import load_schema

    assert load_schema()["classes"]["WandbConfig"]["entity"]["default"] is None


def test_rows_between_intervals_stay_at_home_but_every_evaluation_goes():
    assert [step for step in range(1, 11) if wandb_settings.wanted(step, {LOSS: 1.0}, 5)] == [5, 10]
    assert wandb_settings.wanted(3, {"eval/validation/Perplexity": 2.0}, 5)


def test_the_id_is_made_once_and_kept(tmp_path):
    run = RunDirectory(tmp_path / "run")
    first = wandb_settings.run_id(run)
    assert wandb_settings.run_id(RunDirectory(tmp_path / "run")) == first
    assert (tmp_path / "run" / "wandb_run_id").read_text() == first + "\n"


def test_a_real_training_on_two_ranks_is_one_run_over_its_attempts(server, tmp_path, config, on_ranks, monkeypatch):
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 120.0)  # the runs end before wandb has started
    from olmo_ext.training.train import train
    from olmo_ext.weights_and_biases import sync

    run = RunDirectory(tmp_path / "runs" / "tiny")

    def attempt_of(steps: int):
        run_config = config(
            f"max_duration={steps}",
            "scheduler.t_max=6",
            "global_train_batch_size=8",
            "device_train_microbatch_size=4",
            "save_interval=2",
            wandb={"project": "shapes"},
        )
        return lambda rank: train(run_config, run_directory=run.path, progress=False)

    ended = on_ranks(2, attempt_of(4))
    assert [end.code for end in ended] == [0, 0], ended
    [received] = server.runs.values()
    assert [step for step, _ in received.curve(LOSS)] == [1, 2, 3, 4]
    surviving = {row.step: row for row in run.read_metrics() if row.kind == "train"}
    assert received.curve(LOSS) == [(step, pytest.approx(row.values[LOSS])) for step, row in surviving.items()]
    assert {line["_step"]: line["tokens"] for line in received.lines if LOSS in line} == {
        step: row.tokens for step, row in surviving.items()
    }
    assert received.config["parameters_non_embedding"]["value"] == run.read_shape()["parameters"]["non_embedding"]
    assert received.exit_code == 0
    assert sync.sync_run(run, sweep=None).status in ("uploaded", "complete")
    assert [step for step, _ in received.curve(LOSS)] == [1, 2, 3, 4]


def test_a_run_stopped_to_be_continued_is_shown_as_preempted(server, tmp_path):
    run = make(tmp_path / "run")
    logger = wandb_run.start(run.read_config(), run_directory=run, shape=SHAPE, provenance={}, sweep=None, attempt=1)
    logger.log({LOSS: 1.0}, step=1, tokens=1, flops=1)
    logger._writer.became_ready.wait(90)
    logger.finish(75)
    [received] = server.runs.values()
    assert received.preempting and received.exit_code == 75
