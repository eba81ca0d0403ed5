"""Needle scores as heat maps, length by depth, in one page that stands alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.evals.results import Result


def write_heat_map(results: Sequence[tuple[str, Sequence[Result]]], path: Path) -> None:
    """One panel per model and task.

    :param results: (name of the model, its results); rows without a depth are left out.
    :raises InputError: if no row has one.
    """
    import plotly.graph_objects as graph
    from plotly.subplots import make_subplots

    panels: list[tuple[str, dict[tuple[float, int], float]]] = []
    for name, of_model in results:
        by_task: dict[str, dict[tuple[float, int], float]] = {}
        for result in of_model:
            if result.depth is not None and result.length is not None:
                by_task.setdefault(result.task, {})[(result.depth, result.length)] = result.value
        panels += [(f"{name}: {task}", cells) for task, cells in by_task.items()]
    if not panels:
        raise InputError("no needle task was scored", where="--heat-map", right="--tasks niah")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=[title for title, _ in panels])
    for number, (_, cells) in enumerate(panels):
        depths = sorted({depth for depth, _ in cells})
        lengths = sorted({length for _, length in cells})
        values = [[cells.get((depth, length)) for length in lengths] for depth in depths]
        figure.add_trace(
            graph.Heatmap(
                x=[f"{length:,}" for length in lengths],
                y=[f"{depth:.0%}" for depth in depths],
                z=values,
                zmin=0,
                zmax=1,
                colorscale="RdYlGn",
                texttemplate="%{z:.0%}",
                showscale=number == 0,
            ),
            row=number // columns + 1,
            col=number % columns + 1,
        )
    figure.update_yaxes(autorange="reversed", title_text="depth")
    figure.update_xaxes(title_text="tokens")
    figure.update_layout(template="plotly_white", height=320 * rows + 80, title="Needles found")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, figure.to_html(include_plotlyjs=True, full_html=True))
