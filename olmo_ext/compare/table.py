"""The comparison on a terminal, as JSON and as tidy CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from olmo_ext.compare import words
from olmo_ext.compare.cells import Cell, row_cells
from olmo_ext.compare.collect import RecordedSweep, Run
from olmo_ext.compare.downstream import NEEDLE_KEYS
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison

if TYPE_CHECKING:
    from rich.console import Console


COLUMNS = {
    "seeds": "seeds",
    "non_embedding": "non-emb.",
    "flops_per_token": "FLOP/token",
    "tokens": "tokens",
    "loss": "val. loss",
    "ppl": "PPL",
    "difference": "Δ nats [95 %]",
    "p_value": "p (Holm)",
    "seeds_needed": "seeds needed",
    "tokens_per_second": "tokens/s",
}
"""Cell of a group's row -> its heading on the terminal."""


def print_comparison(result: Comparison, console: Console) -> None:
    """Verdict, table, what is missing, notes."""
    from rich.table import Table

    console.print(f"\n[bold]{_escape(result.sweep.name)}[/bold]")
    console.print(_escape(result.verdict) + "\n")
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    narrow = console.width < 150
    table.add_column("group", overflow="fold")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=not narrow)
    for group in result.groups:
        cells = row_cells(group)
        table.add_row(*(_escape(_cell_text(name, cells[name])) for name in ("group", *COLUMNS)))
    console.print(table)
    if result.label is not None:
        others = [label for label in result.labels if label != result.label]
        more = f"; also there: {', '.join(others)} (--validation)" if others else ""
        console.print(f"\nValidation set: {_escape(result.label + more)}", style="dim")
    for group in result.groups:
        for reason in group.blocking:
            console.print(f"[yellow]not compared[/yellow] {_escape(group.name)}: {_escape(reason)}")
    for run in result.unfinished:
        console.print(f"[yellow]{run.state.status}[/yellow] {_escape(describe_unfinished(run))}")
    for run in result.sweep.runs:
        for problem in run.problems:
            console.print(f"[yellow]note[/yellow] {_escape(run.name)}: {_escape(problem)}")
    if result.paper:
        _print_paper(result, console)
    console.print()
    for note in result.notes:
        console.print(_escape(note), style="dim")


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _cell_text(name: str, cell: Cell) -> str:
    """The text, and by how many percent it is off the baseline's: tenths for parameters, whole ones for FLOPs."""
    if cell.change is None:
        return cell.text
    return f"{cell.text} ({words.percent(cell.change, 0 if name == 'flops_per_token' else 1)})"


def describe_unfinished(run: Run) -> str:
    """Name, how far it came, and why it ended."""
    step = run.progress()[0] or run.state.step
    of = f" of {run.state.max_steps:,}" if run.state.max_steps else ""
    reason = f": {run.state.reason}" if run.state.reason else ""
    return f"{run.name}, step {step:,}{of}{reason}"


def _print_paper(result: Comparison, console: Console) -> None:
    console.print("\n[bold]Paper beside ours[/bold]")
    for row in result.paper:
        ours, verdict = words.number(row.our_value, 3), f"{row.verdict or 'shown'} ({row.why})"
        console.print(_escape(f"{row.group}: paper {row.metric} {row.paper_value:g}, ours {ours}: {verdict}"))


def to_json(result: Comparison) -> dict[str, Any]:
    """Everything that the report shows, without the curves."""
    return _clean(
        {
            "sweep": result.sweep.name,
            "baseline": result.sweep.baseline,
            "verdict": result.verdict,
            "validation_set": result.label,
            "validation_sets": result.labels,
            "comparisons": result.comparisons,
            "correction": "holm",
            "groups": [_group_json(group) for group in result.groups],
            "unfinished": [
                {"run": run.name, "group": run.group, "status": run.state.status, "step": run.progress()[0],
                 "max_steps": run.state.max_steps, "reason": run.state.reason}
                for run in result.unfinished
            ],
            "problems": {run.name: run.problems for run in result.sweep.runs if run.problems},
            "downstream": [dataclasses.asdict(score) for score in result.downstream],
            "learning_rates": [dataclasses.asdict(row) for row in result.learning_rates],
            "scaling": None if result.scaling is None else {
                "fits": [
                    {key: value for key, value in dataclasses.asdict(fit).items() if key not in _BULKY}
                    for fit in result.scaling.fits
                ],
                "crossings": [dataclasses.asdict(crossing) for crossing in result.scaling.crossings],
                "skipped": result.scaling.skipped,
            },
            "paper": [dataclasses.asdict(row) for row in result.paper],
            "notes": result.notes,
        }
    )  # fmt: skip


def _group_json(group: GroupResult) -> dict[str, Any]:
    shape = group.features
    return {
        "group": group.name,
        "baseline": group.baseline,
        "seeds_finished": [run.seed for run in group.finished],
        "seeds_asked": [run.seed for run in group.runs],
        "family": shape.family,
        "parameters": {
            "non_embedding": shape.non_embedding, "total": shape.total, "attention": shape.attention, "ffn": shape.ffn
        },
        "training_flops_per_token": shape.flops_per_token,
        "training_flops_per_token_causal": shape.flops_per_token_causal,
        "tokens": group.tokens,
        "total_flops": group.total_flops,
        "loss": group.loss,
        "loss_deviation": group.loss_deviation,
        "ppl": group.ppl,
        "losses": [{"seed": seed, "loss": loss} for seed, loss in group.losses.items()],
        "difference_nats": group.nats and dataclasses.asdict(group.nats),
        "difference_ppl": group.perplexity and dataclasses.asdict(group.perplexity),
        "p_holm": group.adjusted_p,
        "seeds_needed": group.seeds_needed if group.seeds_needed is not None else ("unknown" if group.nats else None),
        "views": {axis: dataclasses.asdict(view) for axis, view in group.views.items()},
        "speed_up": group.speed_up and dataclasses.asdict(group.speed_up),
        "validation_sets": {
            label: {"loss": loss, "difference_nats": difference and dataclasses.asdict(difference)}
            for label, (loss, difference) in group.other_sets.items()
        },
        "size_change": group.size_change,
        "flops_change": group.flops_change,
        "tokens_per_second": group.tokens_per_second,
        "not_compared_because": group.blocking,
        "differs_besides_shape": group.remarks,
    }  # fmt: skip


def _clean(value: Any) -> Any:
    """Plain JSON: no NaN, no numpy, string keys."""
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


_BULKY = ("draws", "grid", "fitted", "low", "high")
CSV_HEADER = ("run", "group", "seed", "metric", "step", "tokens", "flops", "seconds", "value")


def csv_rows(sweep: RecordedSweep) -> Iterator[tuple[Any, ...]]:
    """One value a row: every metric of every run's surviving history, finished or not, then the rows of evals/."""
    for run in sweep.runs:
        for metric, series in run.series.items():
            columns = (series.step, series.tokens, series.flops, series.seconds, series.value)
            for step, tokens, flops, seconds, value in zip(*(column.tolist() for column in columns), strict=True):
                yield run.name, run.group, run.seed, metric, step, tokens, flops, seconds, value
        for row in run.evaluations:
            place = "".join(f"/{key}={row[key]}" for key in NEEDLE_KEYS if row.get(key) is not None)
            name = f"evals/{row.get('task')}/{row.get('metric')}{place}"
            yield run.name, run.group, run.seed, name, row.get("step"), None, None, None, row.get("value")


def to_csv(sweep: RecordedSweep) -> str:
    """The tidy table as text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    writer.writerows(csv_rows(sweep))
    return text.getvalue()
