"""The W&B view and report: what would be saved, and what a server receives."""

from __future__ import annotations

import json
import re
import socket

import pytest
import yaml

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.compare import dashboard, dashboard_text
from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.weights_and_biases import settings as wandb_settings
from olmo_ext.weights_and_biases import sync
from tests.compare.synthetic import make_shape, make_sweep
from tests.weights_and_biases.wandb_runs import command, compare_with_golden
from tests.weights_and_biases.wandb_server import WandbServer

EXPECTED = {
    "paper": {"title": "A paper", "arxiv": "0000.00000"},
    "figures": [
        {"run": "control", "metric": "loss", "value": 3.4, "source": "table 1"},
        {"run": "it's|taper", "metric": "loss", "value": 3.36, "source": "table 1"},
    ],
}


@pytest.fixture
def sweep(tmp_path):
    """Two groups of three paired seeds; the second has a name that quoting has to survive, and is better."""
    tapered = make_shape(d_ff=[[640], [560], [464], [384]])
    groups = {
        "control": {"final": [3.50, 3.51, 3.49], "steps": 20},
        "it's|taper": {"final": [3.45, 3.47, 3.44], "steps": 20, "shape": tapered},
    }
    path = make_sweep(tmp_path / "runs" / "shapes", groups, baseline="control")
    (path / "expected.yaml").write_text(yaml.safe_dump(EXPECTED))
    for number, run in enumerate(sync.find_runs(path)):
        (run.path / "wandb_run_id").write_text(f"run{number}\n")
    return path


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    with WandbServer() as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("WANDB_MODE")
        yield server
        assert not server.errors
        assert not server.unanswered


def compared(path):
    return compare_sweep(read_sweep(path), expected=path / "expected.yaml")


def specified(path, **names):
    result = compared(path)
    return dashboard.specification(result, dashboard.choose_names(result, project="shapes", entity=None, **names))


def test_the_specification_is_the_golden_file_and_the_same_at_every_build(sweep, monkeypatch):
    def no_network(*arguments, **keywords):
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket, "socket", no_network)
    first = specified(sweep)
    assert specified(sweep) == first
    compare_with_golden("wandb_dashboard.json", first)


def test_what_the_issue_asks_for_is_in_view_and_report(sweep):
    found = specified(sweep)
    for part in ("workspace", "report"):
        text = json.dumps(found[part]["spec"])
        for word in (
            '"tokens"',
            '"flops"',
            "config:parameters_non_embedding.value",
            "config:flops_per_token_training.value",
            "summary:eval/corpus/Perplexity",
            "Parallel Coordinates Plot",
            "Scatter Plot",
            "config:shape_d_model.value",
            "shape_name.value",
            "summary:difference_nats",
            "The papers' figures beside ours",
            "not comparable",
        ):
            assert word in text, (part, word)
    [runset] = found["workspace"]["spec"]["section"]["runSets"]
    assert runset["baselineRunId"] == runset["pinnedRunIds"][0]
    grids = [block for block in found["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    for chosen in [runset, *(block["metadata"]["runSets"][0] for block in grids)]:
        [only] = chosen["filters"]["filters"]
        assert (only["key"], only["op"], only["value"]) == ({"section": "config", "name": "sweep_name"}, "=", "shapes")
        assert chosen["grouping"] == [{"section": "config", "name": "shape_name.value"}]
    assert found["run_values"]["it's|taper-s2"]["difference_nats"] == pytest.approx(-0.0467, abs=1e-4)
    assert found["run_values"]["control-s1"] == {"difference_nats": 0.0, "difference_ppl": 0.0}


def test_every_config_key_in_the_specification_is_one_that_runs_carry(sweep):
    text = json.dumps(specified(sweep))
    used = set(re.findall(r"config:(\w+)\.value", text)) | {"sweep_name", "shape_name"}
    run = RunDirectory(next(iter(sync.find_runs(sweep))).path)
    carried = wandb_settings.wandb_config(
        run.read_config(), shape=run.read_shape(), provenance={}, sweep="s", shape_name="g", run_name="r"
    )
    assert len(used) > 8 and not used - set(carried)


def test_a_name_with_quotes_survives_the_filter():
    from wandb_workspaces import expr

    names = dashboard.Names(sweep='it\'s "so" \\ x', project="p", entity=None)
    [only] = expr.filters_tree_to_v2(expr.expr_to_filters(dashboard._filter(names)))["filters"]
    assert only["value"] == names.sweep


def test_a_bar_in_a_name_does_not_break_the_table(sweep):
    table = dashboard_text.comparison_table(compared(sweep))
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1


def test_the_server_receives_view_report_and_differences_and_a_second_build_updates_them(server, sweep):
    uploads = list(sync.sync_sweep(sweep, project="shapes"))
    assert [upload.status for upload in uploads] == ["uploaded"] * 6
    result = compared(sweep)
    first = dashboard.save(result, dashboard.choose_names(result, project="shapes", entity=None))
    assert (first.updated, first.missing) == (False, [])
    again = dashboard.save(result, dashboard.choose_names(result, project="shapes", entity=None))
    assert (again.updated, again.workspace, again.report) == (True, first.workspace, first.report)
    view, report = sorted(server.views.values(), key=lambda view: view["type"])
    assert (view["type"], report["type"]) == ("project-view", "runs")
    assert view["displayName"] == report["displayName"] == "olmo-ext: shapes"
    golden = specified(sweep)
    received = {
        "workspace": dashboard.stable(json.loads(view["spec"])),
        "report": dashboard.stable(json.loads(report["spec"])),
    }
    assert received["report"] == golden["report"]["spec"]
    # The pinned runs are global ids, which hold the login's entity.
    for spec in (received["workspace"], golden["workspace"]["spec"]):
        for runset in spec["section"]["runSets"]:
            assert len(runset.pop("pinnedRunIds")) == 1 and runset.pop("baselineRunId")
    assert received["workspace"] == golden["workspace"]["spec"]
    for run in server.runs.values():
        name = run.fields["displayName"]
        assert {key: run.summary[key] for key in golden["run_values"][name]} == golden["run_values"][name]
        assert run.summary["_step"] == 20 and "eval/corpus/Perplexity" in run.summary


def test_runs_that_were_never_uploaded_are_named(server, sweep):
    uploads = [sync.sync_run(run, sweep="shapes", project="shapes") for run in sync.find_runs(sweep)[:2]]
    assert all(upload.ok for upload in uploads)
    done = command(["dashboard", str(sweep), "--project", "shapes"], {})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Built http") and "4 runs are not on W&B yet" in done.stderr


def test_the_command_prints_the_specification_without_login_or_network(sweep, tmp_path):
    done = command(
        ["dashboard", str(sweep), "--project", "shapes", "--dry-run"],
        {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == specified(sweep)
    refused = command(["dashboard", str(sweep), "--dry-run"], {"HOME": str(tmp_path)})
    assert refused.returncode == 2 and "--project" in refused.stderr


def test_a_server_that_is_away_and_a_missing_login_are_one_line(server, sweep, monkeypatch):
    result = compared(sweep)
    names = dashboard.choose_names(result, project="shapes", entity="team")
    monkeypatch.setattr(dashboard, "API_SECONDS", 2)
    server.fail = True
    with pytest.raises(WorkError, match=server.url):
        dashboard.save(result, names)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(InputError, match="no W&B login"):
        dashboard.save(result, names)


def test_project_and_entity_come_from_the_runs_config(sweep):
    for run in sync.find_runs(sweep):
        values = RunDirectory(run.path).read_config()
        run.write_config({**values, "wandb": {"project": "from-config", "entity": "team"}})
    names = dashboard.choose_names(compared(sweep), project=None, entity=None)
    assert (names.project, names.entity) == ("from-config", "team")
    assert dashboard.choose_names(compared(sweep), project="p", entity="e").project == "p"
