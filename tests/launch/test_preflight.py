"""What is said before anything starts, and how a config is fitted to a node."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import load_hardware
from olmo_ext.base.run_directory import MetricsRow
from olmo_ext.config.sweep import load_sweep
from olmo_ext.launch.fit_to_node import Placement, estimate, node_settings
from olmo_ext.launch.freeze import freeze_code, link_code
from olmo_ext.launch.members import members_of, prepare
from olmo_ext.launch.preflight import preflight
from olmo_ext.training.train import is_finished

BASE = """
model: {d_model: 64, n_heads: 4, n_layers: 2, max_sequence_length: 8, vocab_size: 256, embedding_size: 256,
        ffn: {d_ff: 128}}
tokenizer: {identifier: none}
data: {paths: [tokens.bin], memmap_dtype: uint16}
scheduler: {name: constant}
max_duration: 5
global_train_batch_size: 8
device_train_microbatch_size: 8
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    np.arange(256, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    return tmp_path


def findings(project: Path, text: str = "", overrides: tuple[str, ...] = (), placement: Placement | None = None):
    (project / "sweep.yaml").write_text("base: base.yaml\n" + text)
    sweep = load_sweep(project / "sweep.yaml", overrides)
    return preflight(sweep, sweep.runs, project / "runs" / sweep.name, placement=placement)


def place(name: str, num_nodes: int, gpus: int) -> Placement:
    return Placement(node=load_hardware().node(name), num_nodes=num_nodes, gpus_per_node=gpus)


def test_a_sweep_that_can_run_has_no_errors(project: Path) -> None:
    found = findings(project, "seeds: [1, 2]")
    assert found.errors == found.warnings == []
    assert found.facts[0].startswith("checkpoints: at least")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.paths=[absent.bin]",), "absent.bin"),
        (("global_train_batch_size=64",), "instances, less than one batch of 64"),
        (("device_train_microbatch_size=3",), "do not divide into micro-batches of 3"),
        (("wandb.project=p", f"wandb.entity={'e' * 200}"), "200 characters"),
        (("data.subset=nowhere", "data.paths=null"), "not a subset"),
        (("model.init_fn=kaiming_normal",), "model.init_fn: 'kaiming_normal'"),
        (("model.flash_attention=true",), "model.flash_attention: the flash-attn package"),
        (("node=nonsense",), "node: unknown node type 'nonsense'; known: b200, rtx6000ada"),
    ],
)
def test_what_would_fail_is_named_once_for_the_whole_sweep(project: Path, overrides, says: str) -> None:
    found = findings(project, "seeds: [1, 2, 3]", overrides)
    # What lies in the runs' own configs is named by run.
    times = 3 if "micro-batches" in says or says.startswith("model.") else 1
    assert len([text for text in found.errors if says in text]) == times, found.errors


def test_a_disk_too_small_for_the_newest_checkpoints_is_refused(project: Path, monkeypatch) -> None:
    real = shutil.disk_usage(project)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    assert "2 runs need" in findings(project, "seeds: [1, 2]").errors[0]


def test_checkpoints_of_finished_runs_make_no_room_for_those_of_the_missing_ones(project: Path, monkeypatch) -> None:
    def least(*there: str) -> float:
        for name in there:
            (project / "runs" / "sweep" / name).mkdir(parents=True)
            with open(project / "runs" / "sweep" / name / "model", "wb") as file:
                file.truncate(1 << 40)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1))
        (project / "sweep.yaml").write_text("base: base.yaml\nseeds: [1, 2, 3]")
        sweep = load_sweep(project / "sweep.yaml")
        (error,) = preflight(sweep, sweep.runs[1:], project / "runs" / "sweep").errors
        return float(re.search(r"need ([\d.]+) MiB", error)[1])

    real = shutil.disk_usage(project)
    nothing = least()
    assert least("sweep-s1/checkpoints/step5") == nothing
    # Of a run's own only the newest counts: one of three is written anew.
    assert least("sweep-s2/checkpoints/step5", "sweep-s2/checkpoints/step10") == pytest.approx(
        nothing * 2 / 3, rel=0.05
    )


def test_a_run_that_was_done_at_an_earlier_stop_goes_on_when_the_sweep_lets_it(project: Path) -> None:
    (project / "sweep.yaml").write_text("base: base.yaml\nstop_at: 3")
    short = load_sweep(project / "sweep.yaml")
    (member,) = members_of(short, project / "runs")
    prepare(short, project / "runs", [member])
    state = member.directory.read_state()
    state.status, state.step, state.attempt = "done", 3, 1
    member.directory.write_state(state)
    (member,) = members_of(short, project / "runs")
    assert member.is_done
    prepare(short, project / "runs", [member])
    assert member.directory.read_state().status == "done"
    (project / "sweep.yaml").write_text("base: base.yaml")
    longer = load_sweep(project / "sweep.yaml")
    (member,) = members_of(longer, project / "runs")
    assert not member.is_done
    prepare(longer, project / "runs", [member])
    state = member.directory.read_state()
    assert (state.status, state.step, state.attempt) == ("pending", 3, 1)
    assert not is_finished(member.run.config, member.directory)


def test_a_longer_sweep_over_runs_that_began_names_the_way_to_go_on(project: Path) -> None:
    (project / "sweep.yaml").write_text("base: base.yaml")
    (member,) = members_of(load_sweep(project / "sweep.yaml"), project / "runs")
    prepare(load_sweep(project / "sweep.yaml"), project / "runs", [member])
    member.directory.append_metrics(MetricsRow(kind="train", attempt=1, step=5))
    for line, right in (
        ("max_duration: 9", "--extend` continues one run for longer"),
        ("max_duration: 9\nseed: 8", "another sweep name or --runs-directory"),
    ):
        (project / "sweep.yaml").write_text(f"base: base.yaml\n{line}")
        with pytest.raises(InputError, match=right):
            members_of(load_sweep(project / "sweep.yaml"), project / "runs")


@pytest.mark.parametrize(
    ("duration", "shares"),
    [("1ep", False), ("2ep", True), ("4", False), ("5", True), ("256T", False), ("257T", True)],
)
def test_orders_of_the_data_that_are_the_same_are_told(project: Path, duration: str, shares: bool) -> None:
    """Four steps, or 256 tokens, are an epoch here."""
    same = "data.seed 1 epoch 1 and data.seed 2 epoch 0 are the same order of the data"
    found = findings(project, "seeds: [1, 2]\nseeds_change_data: true", (f"max_duration={duration}",))
    assert (same in found.warnings) is shares, found.warnings
    sweep = load_sweep(project / "sweep.yaml", [f"max_duration={duration}"])
    later = preflight(sweep, sweep.runs[1:], project / "runs" / sweep.name)
    assert (same in later.warnings) is shares, "the first run is done: the second is compared with it all the same"
    assert not findings(project, "seeds: [1, 2]", (f"max_duration={duration}",)).warnings


def test_runs_that_begin_in_a_later_epoch_share_the_order_of_another_seed(project: Path) -> None:
    text = "max_duration: 4\nruns: {a: {data.seed: 1, epoch: 1}, b: {data.seed: 2}}"
    found = findings(project, text)
    assert "data.seed 1 epoch 1 and data.seed 2 epoch 0 are the same order of the data" in found.warnings


def test_a_warm_up_longer_than_the_run_is_told(project: Path) -> None:
    found = findings(project, "", ("scheduler.name=cosine_with_warmup", "scheduler.t_warmup=10"))
    assert "peak learning rate is never reached" in found.warnings[0]


# -- the node rule -------------------------------------------------------------------------------------------------

LARGE = (
    BASE.replace("d_model: 64", "d_model: 4096")
    .replace("n_heads: 4", "n_heads: 32")
    .replace("d_ff: 128", "d_ff: 11008")
)
LARGE = LARGE.replace("n_layers: 2", "n_layers: 32").replace("max_sequence_length: 8", "max_sequence_length: 4096")


def test_small_models_are_replicated_and_large_ones_sharded(project: Path) -> None:
    (project / "large.yaml").write_text(LARGE)
    small = load_sweep(project / "base.yaml").runs[0].config
    large = load_sweep(project / "large.yaml").runs[0].config
    assert node_settings(small, place("b200", 1, 8))["distributed_strategy"] == "ddp"
    settings = node_settings(large, place("b200", 1, 8))
    assert (settings["distributed_strategy"], settings["fsdp.sharding_strategy"]) == ("fsdp", "FULL_SHARD")
    assert node_settings(large, place("rtx6000ada", 2, 4))["fsdp.sharding_strategy"] == "HYBRID_SHARD"
    # Two GPUs of a node are too few for its share: then the shards lie on all nodes.
    assert node_settings(large, place("rtx6000ada", 4, 2))["fsdp.sharding_strategy"] == "FULL_SHARD"
    with pytest.raises(InputError, match="not even one sequence"):
        node_settings(large, place("rtx6000ada", 1, 1))
    with pytest.raises(InputError, match="does not divide over 3 ranks"):
        node_settings(small, place("b200", 1, 3))


def test_the_largest_micro_batch_that_fits_is_taken(project: Path) -> None:
    (project / "large.yaml").write_text(LARGE)
    placement = place("b200", 1, 8)
    run = load_sweep(
        project / "large.yaml", ["global_train_batch_size=512"], rule=lambda c: node_settings(c, placement)
    )
    # The file itself says 8: it wins over the rule.
    assert run.runs[0].config.device_train_microbatch_size == 8
    (project / "child.yaml").write_text("extends: large.yaml\nglobal_train_batch_size: 512")
    config = load_sweep(project / "child.yaml", rule=lambda c: node_settings(c, placement)).runs[0].config
    assert config.device_train_microbatch_size != 8 and config.precision == "amp_bf16"
    memory = placement.node.gpu.usable_memory
    assert estimate(config, placement).total <= 0.92 * memory
    micro_batch = config.device_train_microbatch_size
    assert micro_batch == 64 or estimate(
        load_sweep(
            project / "child.yaml",
            [f"device_train_microbatch_size={2 * micro_batch}"],
            rule=lambda c: node_settings(c, placement),
        ).runs[0].config,
        placement,
    ).total > 0.92 * memory  # fmt: skip


def test_the_rule_changes_nothing_that_makes_the_run(project: Path) -> None:
    plain = load_sweep(project / "base.yaml").runs[0].config
    (project / "child.yaml").write_text("extends: base.yaml\nrun_name: base")
    fitted = load_sweep(project / "child.yaml", rule=lambda c: node_settings(c, place("b200", 1, 8))).runs[0].config
    assert fitted.plain() != plain.plain() and fitted.identity() == plain.identity()


# -- frozen code ---------------------------------------------------------------------------------------------------


def test_a_plugin_found_through_pythonpath_comes_along_for_a_job_inherits_none(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "lab" / "kit").mkdir(parents=True)
    (tmp_path / "lab" / "kit" / "__init__.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{tmp_path}/lab:")
    monkeypatch.syspath_prepend(str(tmp_path / "lab"))
    code = freeze_code(tmp_path / "sweep", ["kit", "click"])
    assert (code / "kit" / "__init__.py").read_text() == "x = 1\n"
    assert not (code / "click").exists()


def test_frozen_code_is_the_package_as_it_is_stored_once(tmp_path: Path, monkeypatch) -> None:
    import olmo_ext

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plugin.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = freeze_code(tmp_path / "sweep", ["my_plugin"])
    package = Path(olmo_ext.__file__).parent
    for path in package.rglob("*.py"):
        assert (code / "olmo_ext" / path.relative_to(package)).read_bytes() == path.read_bytes()
    assert (code / "my_plugin.py").read_text() == "x = 1\n"
    description = json.loads((code / "code.json").read_text())
    assert description["code"]["version"] == olmo_ext.__version__ and description["files_sha256"].startswith(code.name)
    assert freeze_code(tmp_path / "sweep", ["my_plugin"]) == code
    (tmp_path / "my_plugin.py").write_text("x = 2\n")
    assert freeze_code(tmp_path / "sweep", ["my_plugin"]) != code
    assert (code / "my_plugin.py").read_text() == "x = 1\n"
    link_code(tmp_path / "sweep" / "run", code)
    link_code(tmp_path / "sweep" / "run", code)
    assert os.readlink(tmp_path / "sweep" / "run" / "code") == f"../.code/{code.name}"
    with pytest.raises(InputError, match="plugin 'absent'"):
        freeze_code(tmp_path / "sweep", ["absent"])
