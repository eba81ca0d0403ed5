"""What a sweep varies: aspect ratio, FFN ratio, taper, learning rate, size. Nothing where it does not."""

from __future__ import annotations

from html import escape

from olmo_ext.base.quantities import format_count
from olmo_ext.compare import words
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.html import Html, behind, heatmap, items, plot, section, table


def axes(result: Comparison, present: set[str]) -> Html:
    """U-shape, ratio, learning rate, schedule x range: those that this sweep varies."""
    parts: list[str] = []
    for name, title, x, of in (
        ("aspect", "Depth against width.", "d_model / layers", lambda g: g.features.aspect),
        ("ratio", "How narrow each sub-MLP is.", "d_ff / d_model", lambda g: g.features.ratio),
    ):
        if name in present:
            # As in the plot: losses of a group of other data or length do not stand beside the others'.
            shown = [group for group in result.groups if not group.blocking]
            rows = [[g.name, g.features.family, words.number(of(g), 3), words.number(g.ppl, 3)] for g in shown]
            data = behind(table(["Group", "Family", x, "PPL"], rows, caption=f"Perplexity over {x}", numeric_from=2))
            parts.append(
                plot(
                    name,
                    f"Perplexity over {x}",
                    f"<b>{title}</b> Perplexity over {x}; groups of one family are joined.",
                    data,
                )
            )
    grid = _schedules(result)
    if grid:
        parts.append(grid)
    return section("axes", "Along the axes of the sweep", *parts, short="Axes") if parts else Html()


def schedule_cells(result: Comparison) -> tuple[dict[tuple[str, str], list[GroupResult]], list[str], list[str]]:
    """(schedule, range) -> compared groups, the schedules, the ranges; empty unless at least two of each."""
    cells: dict[tuple[str, str], list[GroupResult]] = {}
    for group in result.groups:
        shape = group.features
        if shape.taper and shape.taper_range and group.nats is not None and shape.taper not in ("groups", "widths"):
            cells.setdefault((shape.taper, shape.taper_range), []).append(group)
    schedules, ranges = list(dict.fromkeys(k for k, _ in cells)), list(dict.fromkeys(r for _, r in cells))
    return (cells, schedules, ranges) if len(schedules) >= 2 and len(ranges) >= 2 else ({}, [], [])


def _schedules(result: Comparison) -> str:
    cells, schedules, ranges = schedule_cells(result)
    if not cells:
        return ""
    # Unlike groups in one cell (another K, another rate) would be averaged silently: they are listed instead.
    values = [group.nats.mean for groups_of_cell in cells.values() for group in groups_of_cell if group.nats]
    most = max(map(abs, values)) or 1.0
    rows = []
    for span in ranges:
        row = []
        for schedule in schedules:
            groups_of_cell = cells.get((schedule, span), [])
            inner = "".join(
                f'<span data-group="{result.groups.index(g)}">{words.signed(g.nats.mean)}<small>'
                f'{words.number(g.ppl, 2)} PPL'
                f"{'' if len(groups_of_cell) == 1 else ' · ' + escape(g.name)}</small></span>"
                for g in groups_of_cell if g.nats
            )  # fmt: skip
            mean = groups_of_cell[0].nats.mean if len(groups_of_cell) == 1 and groups_of_cell[0].nats else None
            tone = "" if mean is None else f'{"good" if mean < 0 else "bad"}" style="--v:{abs(mean) / most:.3f}'
            row.append(f'<td class="heat {tone}">{inner or words.DASH}</td>')
        rows.append((span, row))
    caption = "Difference to the baseline in nats by taper schedule and range (first to last layer)"
    return (
        f"<figure>{heatmap('Schedule by range', caption, schedules, rows)}<figcaption><b>Schedule by range.</b> "
        "Blue is better than the baseline, orange worse; the shade is the size of the difference.</figcaption></figure>"
    )


def learning_rates(result: Comparison) -> Html:
    """Best over learning rate, and at equal learning rate."""
    if not result.learning_rates:
        return Html()
    rates = sorted({rate for row in result.learning_rates for rate in row.losses})
    rows = []
    for row in result.learning_rates:
        cells: list[object] = [row.shape]
        for rate in rates:
            equal = (row.equal_differences or {}).get(rate)
            loss = words.number(row.losses.get(rate), 4)
            best = "b" if rate == row.best else "span"
            cells.append(
                Html(f"<{best}>{loss}</{best}>" + (f"<small>{words.estimate(equal)}</small>" if equal else ""))
            )
        edge = " (at the edge of the range)" if row.at_edge else ""
        cells += [Html(f"{row.best:g}<small>{edge}</small>"), words.estimate(row.best_difference)]
        rows.append(cells)
    head = ["Shape", *(f"LR {rate:g}" for rate in rates), "Best LR", "Best against best, nats"]
    data = table(
        head,
        rows,
        caption="Final loss by learning rate; below it the difference to the baseline's shape at the same rate",
    )
    caption = (
        "<b>Learning rate.</b> Final loss of each shape over its learning rates: compare the lowest points, and points "
        "above each other."
    )
    figure = plot("learning-rate", "Loss over learning rate", caption, "")
    return section("learning-rate", "Each shape at its own learning rate", figure, data, short="Learning rate")


def scaling(result: Comparison) -> Html:
    """Fits of L(N)."""
    if result.scaling is None:
        return Html()
    rows = []
    for fit in result.scaling.fits:
        bounds = words.DASH if fit.exponent_interval is None else "[{:.3f}, {:.3f}]".format(*fit.exponent_interval)
        sizes = ", ".join(format_count(size) for size in fit.sizes)
        rows.append(
            [fit.family, sizes, fit.form, f"{fit.offset:.3f}", f"{fit.factor:.3g}", f"{fit.exponent:.4f}", bounds]
        )
    data = table(
        ["Family", "Sizes", "Form", "E", "A", "alpha", "95 % of alpha"],
        rows,
        caption="Fitted scaling of the loss",
        numeric_from=3,
    )
    said = []
    for crossing in result.scaling.crossings:
        at = f" at {format_count(crossing.size)}" if crossing.size and crossing.low else ""
        bounds = (
            f" (95 % {format_count(crossing.low)} to {format_count(crossing.high)})"
            if crossing.low and crossing.high
            else ""
        )
        said.append(f"{crossing.left} and {crossing.right}: {crossing.text}{at}{bounds}.")
    if result.learning_rates:
        said.append("Every size counts with its best learning rate alone.")
    reasons: dict[str, list[str]] = {}
    for family, why in result.scaling.skipped.items():
        reasons.setdefault(why, []).append(family)
    said += [f"No fit for {', '.join(families)}: {why}." for why, families in reasons.items()]
    caption = "<b>Loss over size.</b> Fits per family with a 95 % band from resampled losses, within the sizes seen."
    figure = plot("scaling", "Loss over non-embedding parameters with fits", caption, "")
    return section("scaling", "How it scales", figure, data, items(said), short="Scaling")
