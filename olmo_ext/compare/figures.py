"""The report's plots for a paper: PNG (300 dpi) and SVG, in colours that survive printing and colour blindness.

Okabe and Ito's colours, and a dash pattern or marker of its own for every group, so that grey prints can be read too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.compare import words
from olmo_ext.compare.collect import Series, validation_metric
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.axes import schedule_cells
from olmo_ext.compare.report.heatmaps import QUANTITIES, layer_means, needle_scores
from olmo_ext.compare.report.payload import emphasised, payload
from olmo_ext.compare.verdict import is_sure
from olmo_ext.compare.views import AXES, AXIS_NAMES

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT = "#1b1d21", "#a0a4ab"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (5, 1.6, 1.2, 1.6)))
MARKERS = ("s", "D", "^", "P", "v", "X", "*", "o")
WIDTH, HEIGHT = 5.2, 3.3
SETTINGS = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#6b7078",
    "axes.linewidth": 0.7,
    "axes.labelcolor": INK,
    "xtick.color": "#4a4e55",
    "ytick.color": "#4a4e55",
    "grid.color": "#e6e4de",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "olmo-ext",
    "figure.constrained_layout.use": True,
}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InputError("--figures needs matplotlib", right="pip install 'olmo-ext[figures]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


class _Styles:
    """Colour, dash and marker of each group."""

    def __init__(self, groups: list[GroupResult]) -> None:
        strong = emphasised(groups)
        self.strong = {group.name: group.name in strong for group in groups}
        self._known: dict[str, dict[str, Any]] = {}
        place = 0
        for group in groups:
            if group.baseline is None:
                self._known[group.name] = {"color": INK, "linestyle": "-", "marker": "o"}
            elif not self.strong[group.name]:
                self._known[group.name] = {"color": FAINT, "linestyle": "-", "marker": "."}
            else:
                # The dash changes with every group, not only with every round of colours: for grey prints.
                self._known[group.name] = {
                    "color": PALETTE[place % len(PALETTE)],
                    "linestyle": DASHES[(place + 1) % len(DASHES)],
                    "marker": MARKERS[place % len(MARKERS)],
                }
                place += 1

    def line(self, name: str) -> dict[str, Any]:
        return {key: self._known[name][key] for key in ("color", "linestyle")}

    def point(self, name: str) -> dict[str, Any]:
        return {key: self._known[name][key] for key in ("color", "marker")}


def write_figures(result: Comparison, folder: Path) -> list[str]:
    """Write every figure that the sweep has; their names without a suffix.

    :raises InputError: without matplotlib.
    """
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    styles = _Styles(result.groups)
    data = payload(result)
    drawings: dict[str, Callable[[Any], bool]] = {"differences": partial(_differences, result=result)}
    for axis in AXES:
        drawings[f"curves-{axis}"] = partial(_curves, result=result, axis=axis, styles=styles)
    for figure in data["figures"]:
        drawings[figure["id"]] = partial(_points, result=result, figure=figure, styles=styles)
    drawings["widths"] = lambda axes: _widths(axes, result, styles)
    drawings["schedules"] = lambda axes: _schedules(axes, result)
    for name in QUANTITIES:
        drawings[f"layers-{name.replace('_', '-')}"] = partial(_layers, result=result, name=name, styles=styles)
    for group in result.groups:
        for key in needle_scores(group):
            drawings[f"needles-{_file_name('-'.join((group.name, *key)))}"] = partial(_needles, group=group, key=key)
    written = []
    with plt.rc_context(SETTINGS):
        for name, draw in drawings.items():
            height = max(1.6, 0.34 * len(result.groups) + 0.8) if name == "differences" else HEIGHT
            figure, axes = plt.subplots(figsize=(WIDTH, height))
            if draw(axes):
                for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                    figure.savefig(folder / f"{name}.{suffix}", dpi=300, metadata=metadata)
                written.append(name)
            plt.close(figure)
    return written


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", text)


def _legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        longest = max(map(len, labels))
        columns = 3 if longest <= 18 else 2 if longest <= 32 else 1
        axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, fontsize=7.5)


def _differences(axes: Any, result: Comparison) -> bool:
    shown = [group for group in result.groups if group.nats is not None]
    for place, group in enumerate(reversed(shown)):
        difference = group.nats
        assert difference is not None
        if difference.low is not None and difference.high is not None:
            axes.plot(
                [difference.low, difference.high], [place, place], color=INK, linewidth=1.1, solid_capstyle="butt"
            )
        filled = INK if is_sure(difference, group.adjusted_p) else "white"
        axes.plot(difference.mean, place, marker="o", markersize=5, color=INK, markerfacecolor=filled, linestyle="")
    axes.axvline(0, color=FAINT, linewidth=0.8, linestyle=DASHES[2])
    axes.set_yticks(range(len(shown)), [group.name for group in reversed(shown)])
    axes.set_xlabel("Difference in validation loss to the baseline (nats), 95 % interval")
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.tick_params(axis="y", length=0)
    return bool(shown)


def _band(curves: list[Series], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """A grid within all curves, and the curves on it, [seeds, points]."""
    low = max(float(curve.axis(axis)[0]) for curve in curves)
    high = min(float(curve.axis(axis)[-1]) for curve in curves)
    grid = np.unique(np.concatenate([curve.axis(axis) for curve in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    return grid, np.array([np.interp(grid, curve.axis(axis), curve.value) for curve in curves])


def _curves(axes: Any, result: Comparison, axis: str, styles: _Styles) -> bool:
    from matplotlib.ticker import FuncFormatter

    if result.label is None:
        return False
    tops: list[float] = []
    for group in sorted(result.groups, key=lambda group: styles.strong[group.name]):
        recorded = [run.series.get(validation_metric(result.label)) for run in group.finished]
        curves = [curve for curve in recorded if curve is not None and curve.axis(axis)[-1] > 0]
        if not curves:
            continue
        grid, values = _band(curves, axis)
        if not len(grid):
            continue
        style, mean = styles.line(group.name), values.mean(0)
        named = group.name if styles.strong[group.name] else None
        axes.plot(grid, mean, label=named, linewidth=1.4 if named else 0.7, **style)
        if len(curves) > 1 and named:
            axes.fill_between(grid, values.min(0), values.max(0), color=style["color"], alpha=0.14, linewidth=0)
        # The first steep part would flatten everything else.
        late = mean[np.searchsorted(grid, 0.12 * grid[-1]) :]
        tops.extend(late[np.isfinite(late)].tolist())
    if not tops:
        return False
    axes.set_ylim(top=max(tops) * 1.01)
    axes.set_xlabel(AXIS_NAMES[axis][0].upper() + AXIS_NAMES[axis][1:])
    axes.set_ylabel(f"Loss on {result.label} (nats)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value) if value else "0"))
    axes.grid(axis="y")
    _legend(axes)
    return True


def _points(axes: Any, result: Comparison, figure: dict[str, Any], styles: _Styles) -> bool:
    points: dict[int, np.ndarray] = {}
    for number in {point["g"] for point in figure["points"]}:
        points[number] = np.array([(p["x"], p["y"]) for p in figure["points"] if p["g"] == number])
    lines = [line for line in figure.get("lines") or figure.get("fits") or [] if any(g in points for g in line["g"])]
    worn: dict[int, tuple[str, str]] = {}
    others = 0
    for line in lines:
        # As on the page: where groups form lines, the line carries the colour and the name.
        home = any(result.groups[g].baseline is None for g in line["g"])
        colour, marker = (INK, "o") if home else (PALETTE[others % len(PALETTE)], MARKERS[others % len(MARKERS)])
        others += not home
        worn.update(dict.fromkeys(line["g"], (colour, marker)))
        if "x" in line:
            axes.plot(line["x"], line["y"], color=colour, linewidth=1)
            if line["lo"]:
                axes.fill_between(line["x"], line["lo"], line["hi"], color=colour, alpha=0.14, linewidth=0)
        else:
            means = sorted(tuple(points[g].mean(0)) for g in line["g"] if g in points)
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=0.9)
        axes.plot([], [], color=colour, marker=marker, markersize=5, linewidth=1, label=line["name"])
    for number in sorted(points):
        name = result.groups[number].name
        point = styles.point(name)
        colour, marker = worn.get(number, (point["color"], point["marker"]))
        axes.scatter(points[number][:, 0], points[number][:, 1], s=7, color=colour, alpha=0.45, linewidths=0)
        label = name if styles.strong[name] and not lines else None
        axes.plot(*points[number].mean(0), linestyle="", markersize=6, label=label, color=colour, marker=marker)
    if figure.get("log"):
        _log_axis(axes)
    axes.set_xlabel(figure["x"])
    axes.set_ylabel(figure["y"])
    axes.grid(axis="y")
    _legend(axes)
    return bool(points)


def _log_axis(axes: Any) -> None:
    """A logarithmic x axis with few, plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """0.2, 5, 20M; powers of ten for what is smaller or larger."""
    if 1e-2 <= abs(value) < 1e3:
        return f"{value:g}"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if size <= abs(value) < 1e15:
            return f"{value / size:g}{unit}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    power = str(int(exponent)).replace("-", "\N{MINUS SIGN}")
    return f"${mantissa}\\times10^{{{power}}}$"


def _schedules(axes: Any, result: Comparison) -> bool:
    cells, schedules, ranges = schedule_cells(result)
    if not cells:
        return False
    grid = np.full((len(ranges), len(schedules)), np.nan)
    for (schedule, span), groups_here in cells.items():
        if len(groups_here) == 1 and groups_here[0].nats is not None:
            grid[ranges.index(span), schedules.index(schedule)] = groups_here[0].nats.mean
    most = float(np.nanmax(np.abs(grid))) if np.isfinite(grid).any() else 1.0
    from matplotlib.colors import LinearSegmentedColormap

    # Blue better, orange worse, light in the middle: both ends survive colour blindness.
    colours = LinearSegmentedColormap.from_list("better-worse", ["#6fb1d8", "#ffffff", "#eda36c"])
    axes.imshow(grid, cmap=colours, vmin=-most, vmax=most, aspect="auto")
    for row, column in np.argwhere(np.isfinite(grid)):
        axes.text(column, row, words.signed(float(grid[row, column])), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(schedules)), schedules)
    axes.set_yticks(range(len(ranges)), ranges)
    axes.set_xlabel("Taper schedule")
    axes.set_ylabel("First to last layer, times the base width")
    axes.set_title("Difference to the baseline (nats)", fontsize=8.5)
    return True


def _needles(axes: Any, group: GroupResult, key: tuple[str, str]) -> bool:
    cells = needle_scores(group).get(key)
    if not cells:
        return False
    depths, lengths = sorted({depth for depth, _ in cells}), sorted({length for _, length in cells})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), values in cells.items():
        grid[depths.index(depth), lengths.index(length)] = np.mean(values)
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=max(1.0, float(np.nanmax(grid))), aspect="auto")
    for row, column in np.argwhere(np.isfinite(grid)):
        dark = grid[row, column] > 0.6
        axes.text(
            column,
            row,
            f"{grid[row, column]:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else INK,
        )
    axes.set_xticks(range(len(lengths)), [f"{length:,.0f}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
    axes.set_xlabel("Tokens of text")
    axes.set_ylabel("Depth of the needle")
    axes.set_title(f"{group.name}: {', '.join(key)}", fontsize=8.5)
    return True


def _widths(axes: Any, result: Comparison, styles: _Styles) -> bool:
    drawn = False
    for group in result.groups:
        widths = group.features.widths
        if not widths:
            continue
        named = group.name if styles.strong[group.name] else None
        axes.step(
            range(len(widths)),
            widths,
            where="mid",
            label=named,
            linewidth=1.3 if named else 0.6,
            **styles.line(group.name),
        )
        drawn = True
    axes.set_xlabel("Layer")
    axes.set_ylabel("FFN inner width, summed over sub-MLPs")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    _legend(axes)
    return drawn


def _layers(axes: Any, result: Comparison, name: str, styles: _Styles) -> bool:
    drawn = False
    for group in result.groups:
        values = layer_means(group).get(name)
        if values:
            depth = np.linspace(0, 1, len(values)) if len(values) > 1 else [0.5]
            style = {**styles.line(group.name), **styles.point(group.name)}
            axes.plot(depth, values, label=group.name, linewidth=1.3, markersize=3, **style)
            drawn = True
    axes.set_xlabel("Relative depth")
    axes.set_ylabel(QUANTITIES[name].partition(":")[0])
    axes.grid(axis="y")
    _legend(axes)
    return drawn
