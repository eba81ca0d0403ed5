"""A sweep on W&B: a saved workspace view and a report, built with wandb-workspaces from the comparison our page shows.

The view is found again by a name derived from the sweep, the report by its title, so building again updates both.
Numbers that W&B cannot compute (paired differences, their intervals, Holm's p) are written into the runs' summaries,
where the run table shows them, and as a table into the report.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.compare.collect import TOKENS_PER_SECOND, TRAIN_LOSS, validation_metric
from olmo_ext.compare.dashboard_text import answer
from olmo_ext.weights_and_biases.settings import has_key, server_url
from olmo_ext.weights_and_biases.sync import existing_id

if TYPE_CHECKING:
    from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.views import AXIS_NAMES

SHAPE_COLUMNS = {
    "shape_d_model": "d_model",
    "shape_n_layers": "layers",
    "shape_num_sub_mlps": "sub-MLPs",
    "shape_d_ff_ratio": "d_ff / d_model",
    "shape_d_ff_first": "d_ff, first layer",
    "shape_d_ff_last": "d_ff, last layer",
    "shape_ffn_share": "FFN share",
    "shape_head_dim": "head_dim",
}
"""Keys of the runs' config that parallel coordinates go through, with their titles."""

DIFFERENCES = ("nats", "nats_low", "nats_high", "ppl", "p_holm")
SUMMARY_COLUMNS = tuple(f"difference_{name}" for name in DIFFERENCES)
API_SECONDS = 20
"""Limit of one request to the server."""

WIDTH = 24
"""Columns of W&B's panel grid."""


@dataclass(kw_only=True)
class Names:
    """Where the dashboard stands."""

    sweep: str
    project: str
    entity: str | None

    @property
    def title(self) -> str:
        return f"olmo-ext: {self.sweep}"[:128]

    @property
    def view(self) -> str:
        """The view's internal name, the same at every build."""
        digest = hashlib.sha256(f"{self.project}/{self.sweep}".encode()).hexdigest()
        return f"nw-olmoext{digest[:11]}-v"


@dataclass(kw_only=True)
class Saved:
    """What stands on the server now."""

    workspace: str
    report: str
    updated: bool
    """Whether the view was there before."""

    missing: list[str] = field(default_factory=list)
    """Runs that the server does not have: `olmo-ext sync` first."""


def _libraries() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise InputError(
            "wandb-workspaces is not installed", where="olmo-ext dashboard", right='pip install "olmo-ext[dashboard]"'
        ) from None
    return workspaces, reports


def choose_names(result: Comparison, *, project: str | None, entity: str | None) -> Names:
    """Project and entity from the command line, the runs' config, or the environment.

    :raises InputError: when nothing names a project.
    """
    sections = [run.config.get("wandb") or {} for run in result.sweep.runs]
    project = project or next((s["project"] for s in sections if s.get("project")), os.environ.get("WANDB_PROJECT"))
    entity = entity or next((s["entity"] for s in sections if s.get("entity")), os.environ.get("WANDB_ENTITY"))
    if not project:
        raise InputError("no W&B project", where=str(result.sweep.path), right="--project NAME")
    return Names(sweep=result.sweep.path.resolve().name, project=project, entity=entity)


def run_values(result: Comparison) -> dict[str, dict[str, float]]:
    """Run -> what its summary gets: the group's difference to its baseline, with interval and corrected p."""
    values: dict[str, dict[str, float]] = {}
    for group in result.groups:
        differences: dict[str, float | None] = {}
        if group.nats is not None:
            differences = {
                "difference_nats": group.nats.mean,
                "difference_nats_low": group.nats.low,
                "difference_nats_high": group.nats.high,
                "difference_ppl": group.perplexity.mean if group.perplexity else None,
                "difference_p_holm": group.adjusted_p,
            }
        elif group.baseline is None:
            differences = {"difference_nats": 0.0, "difference_ppl": 0.0}
        known = {key: value for key, value in differences.items() if value is not None}
        for run in group.runs:
            values[run.name] = known
    return values


def _sections(result: Comparison, reports: Any) -> list[tuple[str, list[Any]]]:
    """Title and panels, made anew at every call: a panel's id stands in one place only."""
    config, summary = reports.Config, reports.SummaryMetric
    shape = config("shape_name")
    ppl = f"eval/{result.label}/Perplexity" if result.label else None
    loss = validation_metric(result.label) if result.label else None

    def lines(metric: str, title: str, *, log_y: bool = False, smooth: float | None = None) -> list[Any]:
        return [
            reports.LinePlot(
                title=f"{title} over {words_of_axis}",
                x=axis,
                y=[metric],
                log_x=True,
                log_y=log_y,
                title_x=words_of_axis,
                title_y=title,
                groupby=shape,
                groupby_aggfunc="mean",
                groupby_rangefunc="minmax",
                smoothing_factor=smooth,
                smoothing_type="exponential" if smooth else None,
                smoothing_show_original=False if smooth else None,
                max_runs_to_show=100,
            )
            for axis, words_of_axis in ((axis, AXIS_NAMES[axis]) for axis in ("tokens", "flops"))
        ]

    def scatter(key: str, title: str, *, log_x: bool = True) -> Any:
        return reports.ScatterPlot(title=f"PPL over {title}", x=config(key), y=summary(ppl), log_x=log_x)

    curves = lines(loss, "validation loss") + lines(ppl, "validation PPL", log_y=True) if loss and ppl else []
    sections = [("Curves", curves + lines(TRAIN_LOSS, "training loss", smooth=0.9))]
    if ppl:
        columns = [
            reports.ParallelCoordinatesPlotColumn(metric=config(key), display_name=name)
            for key, name in SHAPE_COLUMNS.items()
        ]
        columns.append(reports.ParallelCoordinatesPlotColumn(metric=summary(ppl), display_name="PPL"))
        sections.append(
            (
                "Where the parameters sit",
                [
                    reports.ParallelCoordinatesPlot(title="shape and PPL", columns=columns),
                    scatter("parameters_non_embedding", "non-embedding parameters"),
                    scatter("flops_per_token_training", "training FLOPs a token"),
                    scatter("shape_aspect", "d_model / layers"),
                    scatter("shape_d_ff_ratio", "d_ff / d_model", log_x=False),
                ],
            )
        )
        sections.append(
            (
                "Difference to the baseline",
                [
                    reports.BarPlot(title="nats", metrics=["difference_nats"], groupby=shape, groupby_aggfunc="mean"),
                    reports.BarPlot(title="PPL", metrics=[ppl], groupby=shape, groupby_rangefunc="stddev"),
                ],
            )
        )
    sections.append(
        (
            "Cost",
            [
                reports.BarPlot(title="tokens a second", metrics=[TOKENS_PER_SECOND], groupby=shape),
                reports.BarPlot(title="memory", metrics=["memory/peak_bytes"], groupby=shape),
            ],
        )
    )
    return sections


def _arrange(panels: list[Any], reports: Any) -> list[Any]:
    """Two a row; parallel coordinates take a whole one."""
    column = row = 0
    for panel in panels:
        wide = isinstance(panel, reports.ParallelCoordinatesPlot)
        if wide and column:
            column, row = 0, row + 8
        panel.layout = reports.Layout(x=column, y=row, w=WIDTH if wide else WIDTH // 2, h=8)
        column = 0 if wide or column else WIDTH // 2
        row += 8 if not column else 0
    return panels


def _columns(result: Comparison) -> list[str]:
    columns = ["run:displayName", "config:shape_name.value", "config:parameters_non_embedding.value"]
    columns.append("config:flops_per_token_training.value")
    if result.label:
        columns.append(f"summary:eval/{result.label}/Perplexity")
    return columns + [f"summary:{name}" for name in SUMMARY_COLUMNS]


def _filter(names: Names) -> str:
    """The sweep's runs, in wandb-workspaces' expression syntax, which reads Python literals."""
    # Not `sweep`: that name is read as W&B's own sweeps, even among the config's keys.
    return f"Config('sweep_name') == {names.sweep!r}"


def build_workspace(result: Comparison, names: Names) -> Any:
    """The saved view: curves, scatters, parallel coordinates, and the run table grouped by shape."""
    workspaces, reports = _libraries()
    table = reports.MarkdownPanel(markdown="\n\n".join(answer(result)))
    table.layout = reports.Layout(x=0, y=0, w=WIDTH, h=10)
    sections = [workspaces.Section(name="Answer", panels=[table], is_open=True)]
    for title, panels in _sections(result, reports):
        sections.append(workspaces.Section(name=title, panels=_arrange(panels, reports), is_open=True))
    baseline = next((group for group in result.groups if group.baseline is None), None)
    ids = [run_id for run in (baseline.runs if baseline else []) if (run_id := existing_id(run.path))]
    workspace = workspaces.Workspace(
        entity=names.entity or "-",
        project=names.project,
        name=names.title,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=_filter(names),
            groupby=[workspaces.Config("shape_name")],
            order=[workspaces.Ordering(workspaces.Summary("difference_nats"), ascending=True)],
            pinned_columns=_columns(result),
            baseline_run=ids[0] if ids else None,
        ),
    )
    workspace._internal_name = names.view
    return workspace


def build_report(result: Comparison, names: Names) -> Any:
    """The report: the answer in words and numbers, then the same panels over the sweep's runs."""
    _, reports = _libraries()

    def runset() -> Any:
        # Neither entity nor project: the report's own, and nothing is looked up while building.
        return reports.Runset(
            name=names.sweep,
            filters=_filter(names),
            groupby=["config.shape_name"],
            order=[reports.OrderBy(name="difference_nats", ascending=True)],
            pinned_columns=_columns(result),
        )

    blocks: list[Any] = [reports.H1(text=names.title)]
    blocks += [reports.MarkdownBlock(text=part) for part in answer(result)]
    for title, panels in _sections(result, reports):
        blocks.append(reports.H2(text=title))
        blocks.append(reports.PanelGrid(runsets=[runset()], panels=_arrange(panels, reports)))
    blocks.append(reports.H2(text="Runs"))
    comparer = reports.RunComparer(diff_only=True)
    blocks.append(reports.PanelGrid(runsets=[runset()], panels=_arrange([comparer], reports)))
    return reports.Report(
        project=names.project,
        entity=names.entity or "-",
        title=names.title,
        description=result.verdict,
        blocks=blocks,
        width="fluid",
    )


def specification(result: Comparison, names: Names) -> dict[str, Any]:
    """What would be saved, as plain JSON, the same at every call: random ids are numbered in their order."""
    view, report = build_workspace(result, names)._to_model(), build_report(result, names)._to_model()
    return {
        "entity": names.entity,
        "project": names.project,
        "workspace": {
            "name": view.name,
            "display_name": view.display_name,
            "spec": stable(json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))),
        },
        "report": {
            "display_name": report.display_name,
            "description": report.description,
            "spec": stable(json.loads(report.spec.model_dump_json(by_alias=True, exclude_none=True))),
        },
        "run_values": run_values(result),
    }


def stable(spec: Any) -> Any:
    """A copy of a specification in which ids made at random are replaced by their order of appearance."""
    seen: dict[str, str] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {
                key: seen.setdefault(value, f"id{len(seen) + 1}")
                if key in ("id", "__id__") and isinstance(value, str) and value
                else walk(value)
                for key, value in node.items()
            }
        if isinstance(node, list):
            return [walk(item) for item in node]
        return node

    return walk(spec)


def save(result: Comparison, names: Names) -> Saved:
    """Write view, report and the runs' differences to the server.

    :raises InputError: without a login.
    :raises WorkError: when the server refuses or is away.
    """
    _libraries()
    if not has_key():
        raise InputError("no W&B login", where=server_url(), right="set WANDB_API_KEY, run `wandb login`, or --dry-run")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    try:
        api = wandb.Api(timeout=API_SECONDS)
        names.entity = names.entity or api.default_entity
        if not names.entity:
            raise InputError("the login has no default entity", where=server_url(), right="--entity NAME")
        workspace, report = build_workspace(result, names), build_report(result, names)
        known = _known_view(names)
        workspace._internal_id = known or ""
        report.id = _known_report(api, names) or ""
        missing = _write_values(api, result, names)
        workspace.save()
        report.save()
        return Saved(workspace=workspace.url, report=report.url, updated=known is not None, missing=missing)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the SDK raises is one line for the user)
        raise WorkError(f"{server_url()}: {' '.join(str(error).split())[:400] or type(error).__name__}") from error


def _known_view(names: Names) -> str | None:
    from wandb_workspaces.workspaces.internal import get_view_dict

    try:
        return get_view_dict(names.entity or "", names.project, names.view.removeprefix("nw-").removesuffix("-v"))["id"]
    except ValueError:
        return None  # Neither this view nor, the first time, the project.


def _known_report(api: Any, names: Names) -> str | None:
    try:
        for report in api.reports(f"{names.entity}/{names.project}"):
            if report.display_name == names.title:
                return report.id
    except ValueError:
        pass  # The project does not exist yet.
    return None


def _write_values(api: Any, result: Comparison, names: Names) -> list[str]:
    """Write the differences into the runs' summaries; the runs that the server does not have."""
    import wandb

    missing = []
    values = run_values(result)
    for run in result.sweep.runs:
        identity = existing_id(run.path)
        try:
            if identity is None:
                raise ValueError("never logged to W&B")
            remote = api.run(f"{names.entity}/{names.project}/{identity}")
        except (ValueError, wandb.errors.CommError):
            missing.append(run.name)
            continue
        # Values of an earlier build that no longer hold must not stay beside the new ones.
        for name in SUMMARY_COLUMNS:
            if name not in values[run.name] and name in remote.summary:
                del remote.summary[name]
        remote.summary.update(values[run.name])
    return missing
