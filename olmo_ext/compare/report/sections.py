"""The sections of the page below the results, in reading order. Each returns nothing where the sweep has no such data."""

from __future__ import annotations

import math
import shlex
from html import escape

import numpy as np

from olmo_ext.compare import words
from olmo_ext.compare.collect import TRAIN_LOSS, Run, validation_metric
from olmo_ext.compare.comparison import Comparison, GroupResult
from olmo_ext.compare.report.drawings import WIDTH, share_bar, silhouette
from olmo_ext.compare.report.html import Html, behind, items, plot, section, table
from olmo_ext.compare.statistics import Difference, interpolate
from olmo_ext.compare.table import describe_unfinished
from olmo_ext.compare.views import AXES, AXIS_NAMES
from olmo_ext.quantities import format_count, format_seconds

CURVE_TABLE_POINTS = 8


def estimate(difference: Difference | None, digits: int = 4) -> str:
    """`−0.0397 [−0.0456, −0.0339]`."""
    if difference is None:
        return words.DASH
    return f"{words.signed(difference.mean, digits)} {words.interval(difference, digits)}"


def _choice(name: str, legend: str, options: list[tuple[str, str]]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" if number == 0 else ""}><span>{title}</span></label>'
        for number, (value, title) in enumerate(options)
    )
    return f'<fieldset class="choice"><legend>{legend}</legend>{inputs}</fieldset>'


def curves(result: Comparison) -> Html:
    """Loss over tokens, FLOPs and seconds."""
    if not any(run.series for run in result.sweep.runs):
        return Html()
    loss = [("v", "validation"), ("t", "training")] if result.label else [("t", "training")]
    controls = '<div class="controls">' + "".join(
        [
            _choice("curve-x", "over", [("t", "tokens"), ("f", "FLOPs"), ("s", "seconds")]),
            _choice("curve-y", "loss", loss),
            _choice("curve-show", "as", [("loss", "loss"), ("difference", "difference to the baseline")]),
            _choice("curve-smooth", "smoothing", [("1", "light"), ("2", "strong"), ("0", "none")]),
            '<label class="check"><input type="checkbox" id="curve-log"><span>log axis</span></label>',
        ]
    ) + "</div>"  # fmt: skip
    metric = validation_metric(result.label) if result.label else TRAIN_LOSS
    caption = (
        "<b>Loss during training.</b> Lines are means over the seeds that are shown, bands reach from the lowest to the "
        "highest seed; unfinished runs are dotted. Long curves are thinned to the extremes of each stretch. Smoothing "
        "acts on the training loss alone. Drag to zoom, double-click to return."
    )
    return section(
        "curves", "Loss during training",
        plot("curves", f"Curves of {metric} for every group; the numbers are in the table below", caption,
             behind(_curve_table(result, metric)), controls=controls, css="tall"), short="Curves")  # fmt: skip


def _curve_table(result: Comparison, metric: str) -> str:
    ends = [int(run.series[metric].tokens[-1]) for run in result.sweep.runs if metric in run.series]
    if not ends:
        return "<p>No values.</p>"
    points = np.rint(np.linspace(0, max(ends), CURVE_TABLE_POINTS + 1)[1:]).astype(int)
    rows = []
    for group in result.groups:
        runs = [run.series[metric] for run in group.runs if metric in run.series]
        row: list[object] = [group.name]
        for point in points:
            found = [interpolate(series.tokens, series.value, float(point)) for series in runs]
            values = [value for value in found if value is not None]
            row.append(words.number(sum(values) / len(values), 4) if values else words.DASH)
        rows.append(row)
    head = ["Group", *(f"{format_count(point)} tokens" for point in points)]
    return table(head, rows, caption=f"{metric}, mean over the seeds that have come so far")


def shapes(result: Comparison) -> Html:
    """A drawing per group."""
    drawn = [group for group in result.groups if group.features.sub_widths and group.features.d_model]
    if not drawn:
        return Html()
    widest = max(
        max(max(map(max, g.features.sub_widths)), *g.features.attention_widths, g.features.d_model or 0) for g in drawn
    )
    cards, rows = [], []
    for group in drawn:
        shape = group.features
        subs = "" if shape.num_sub_mlps == 1 else f" · K = {shape.num_sub_mlps or 'varied'}"
        number = result.groups.index(group)
        cards.append(
            f'<figure class="shape" data-group="{number}"><figcaption><i class="swatch" data-group="{number}"></i>'
            f"<b>{escape(group.name)}</b><small>{shape.n_layers} layers · d<sub>model</sub> {shape.d_model:,}{subs}</small></figcaption>"
            f"{silhouette(shape, scale=(WIDTH - 2) / widest, name=group.name)}{share_bar(shape)}</figure>"
        )
        widths = [
            " + ".join(f"{w:,}" for w in layer)
            if len(set(layer)) > 1
            else (f"{len(layer)} × " if len(layer) > 1 else "") + f"{layer[0]:,}"
            for layer in shape.sub_widths
        ]
        rows.append([group.name, shape.n_layers, f"{shape.d_model:,}", _runs_of(widths),
                     _runs_of([f"{w:,}" for w in shape.attention_widths]), words.count(shape.attention), words.count(shape.ffn),
                     words.count(shape.total), words.count(shape.kv_cache_bytes_per_token)])  # fmt: skip
    head = [
        "Group",
        "Layers",
        "d_model",
        "FFN inner width, first to last layer",
        "Attention width",
        "Attention",
        "FFN",
        "Total",
        "KV bytes/token",
    ]
    legend = (
        '<p class="legend"><span><i class="key key-ffn"></i>inner width of each sub-MLP</span><span><i class="key key-att">'
        '</i>attention width (heads × head size)</span><span><i class="key key-stream"></i>residual stream, d<sub>model</sub>'
        "</span><span>first layer at the bottom; all drawings on one scale</span></p>"
    )
    return section(
        "shapes", "Where the parameters sit", legend, f'<div class="shapes">{"".join(cards)}</div>',
        behind(table(head, rows, caption="Widths per layer and parameters by group of weights", css="wrap")), short="Shapes")  # fmt: skip


def _runs_of(values: list[str]) -> str:
    """Repeated neighbours folded: `3072 (×12)`."""
    folded: list[tuple[str, int]] = []
    for value in values:
        if folded and folded[-1][0] == value:
            folded[-1] = (value, folded[-1][1] + 1)
        else:
            folded.append((value, 1))
    return ", ".join(value if many == 1 else f"{value} (× {many})" for value, many in folded)


def cost(result: Comparison) -> Html:
    """Loss against FLOPs and speed; the views at equal budget."""
    compared = [group for group in result.groups if group.views]
    if not any(group.losses for group in result.groups):
        return Html()
    rows = [
        [g.name, words.engineering(g.total_flops), "" if g.tokens_per_second is None else f"{g.tokens_per_second:,.0f}",
         words.number(g.loss, 4), words.count(g.features.kv_cache_bytes_per_token)]
        for g in result.groups if g.losses
    ]  # fmt: skip
    data = behind(
        table(["Group", "Training FLOPs", "Tokens/s", "Loss", "KV bytes/token"], rows, caption="Cost and loss")
    )
    pair = (
        '<div class="pair">'
        + plot("pareto-flops", "Validation loss against training FLOPs", "<b>Loss against training FLOPs.</b> Small dots are seeds, large ones their mean; the stepped line is the frontier.", "")
        + plot("pareto-speed", "Validation loss against tokens per second", "<b>Loss against speed</b> on this sweep's machine. Better is down and to the right.", "")
        + "</div>"
    )  # fmt: skip
    parts = [pair, data]
    if compared:
        parts.append(_views_table(compared))
    return section("cost", "At what cost", *parts, short="Cost")


def _views_table(compared: list[GroupResult]) -> str:
    rows = []
    for group in compared:
        row: list[object] = [group.name]
        for axis in AXES:
            view = group.views[axis]
            if view.difference is None or view.at is None:
                row.append(view.note or words.DASH)
                continue
            at = (
                format_seconds(view.at)
                if axis == "seconds"
                else words.engineering(view.at)
                if axis == "flops"
                else words.count(view.at)
            )
            row.append(Html(f"{estimate(view.difference)}<small>at {at}</small>"))
        speed = group.speed_up
        if speed is None:
            row.append(words.DASH)
        else:
            bounds = "" if speed.low is None else f"[{speed.low:.3f}, {speed.high:.3f}] "
            reached = f"reached by {speed.reached} of {speed.seeds} seeds"
            row.append(Html(f"{speed.ratio:.3f} ×<small>{bounds}{reached}</small>"))
        rows.append(row)
    head = ["Group", *(f"Equal {AXIS_NAMES[axis]}" for axis in AXES), "Tokens to the baseline's loss"]
    note = (
        '<p class="aside">Each column compares at the largest budget that every paired run of both sides has reached, '
        "interpolated between evaluations (linear in the logarithm of the axis) and never beyond them. Where that is not "
        "the end of a run, the run is read in the middle of its learning-rate schedule, which counts against it. The last "
        "column is the baseline's tokens over the group's tokens for the same loss: above 1 the group is sooner; where it "
        "never reaches the baseline's loss, the baseline's tokens for the group's final loss over the group's.</p>"
    )
    return table(head, rows, caption="Difference in nats at equal budgets, paired by seed, 95 % intervals") + note


def _heat(value: float | None, low: float, high: float) -> str:
    if value is None or not math.isfinite(value) or high <= low:
        return ""
    return f"--v:{(value - low) / (high - low):.3f}"


def axes(result: Comparison, present: set[str]) -> Html:
    """U-shape, ratio, learning rate, schedule x range: those that this sweep varies."""
    parts: list[str] = []
    for name, title, x, of in (
        ("aspect", "Depth against width.", "d_model / layers", lambda g: g.features.aspect),
        ("ratio", "How narrow each sub-MLP is.", "d_ff / d_model", lambda g: g.features.ratio),
    ):
        if name in present:
            rows = [[g.name, g.features.family, words.number(of(g), 3), words.number(g.ppl, 3)] for g in result.groups]
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


def _schedules(result: Comparison) -> str:
    cells: dict[tuple[str, str], list[GroupResult]] = {}
    for group in result.groups:
        shape = group.features
        if shape.taper and shape.taper_range and group.nats is not None and shape.taper not in ("groups", "widths"):
            cells.setdefault((shape.taper, shape.taper_range), []).append(group)
    schedules, ranges = list(dict.fromkeys(k for k, _ in cells)), list(dict.fromkeys(r for _, r in cells))
    if len(schedules) < 2 or len(ranges) < 2:
        return ""
    # Unlike groups in one cell (another K, another rate) would be averaged silently: they are listed instead.
    values = [group.nats.mean for found in cells.values() for group in found if group.nats]
    most = max(map(abs, values)) or 1.0
    rows = []
    for span in ranges:
        row = [f'<th scope="row">{escape(span)}</th>']
        for schedule in schedules:
            found = cells.get((schedule, span), [])
            inner = "".join(
                f'<span data-group="{result.groups.index(g)}">{words.signed(g.nats.mean, 4)}<small>{words.number(g.ppl, 2)} PPL'
                f"{'' if len(found) == 1 else ' · ' + escape(g.name)}</small></span>"
                for g in found if g.nats
            )  # fmt: skip
            mean = found[0].nats.mean if len(found) == 1 and found[0].nats else None
            tone = "" if mean is None else f'{"good" if mean < 0 else "bad"}" style="--v:{abs(mean) / most:.3f}'
            row.append(f'<td class="heat {tone}">{inner or words.DASH}</td>')
        rows.append(f"<tr>{''.join(row)}</tr>")
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in schedules)
    return (
        '<figure><div class="scroll" role="region" tabindex="0" aria-label="Schedule by range"><table class="heatmap"><caption>'
        "Difference to the baseline in nats by taper schedule and range (first to last layer)</caption>"
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div><figcaption><b>Schedule by range.</b> "
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
            cells.append(Html(f"<{best}>{loss}</{best}>" + (f"<small>{estimate(equal)}</small>" if equal else "")))
        edge = " (at the edge of the range)" if row.at_edge else ""
        cells += [Html(f"{row.best:g}<small>{edge}</small>"), estimate(row.best_difference)]
        rows.append(cells)
    head = ["Shape", *(f"LR {rate:g}" for rate in rates), "Best LR", "Best against best, nats"]
    data = table(
        head,
        rows,
        caption="Final loss by learning rate; below it the difference to the baseline's shape at the same rate",
    )
    caption = "<b>Learning rate.</b> Final loss of each shape over its learning rates: compare the lowest points, and points above each other."
    return section("learning-rate", "Each shape at its own learning rate",
                   plot("learning-rate", "Loss over learning rate", caption, ""), data, short="Learning rate")  # fmt: skip


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
    said += [f"{family}: no fit, {why}." for family, why in result.scaling.skipped.items()]
    caption = "<b>Loss over size.</b> Fits per family with a 95 % band from resampled losses, within the sizes seen."
    return section("scaling", "How it scales", plot("scaling", "Loss over non-embedding parameters with fits", caption, ""), data, items(said), short="Scaling")  # fmt: skip


def paper(result: Comparison) -> Html:
    """The paper's figures beside ours."""
    if not result.paper:
        return Html()
    tones = {"reproduced": "good", "contradicted": "warn"}
    rows = [
        [row.group, row.source, row.metric, f"{row.paper_value:g}", words.number(row.our_value, 3),
         words.signed(row.paper_difference), estimate(row.our_difference),
         Html(f'<span class="mark {tones.get(row.verdict, "")}">{escape(row.verdict or "baseline")}</span><small>{escape(row.why)}</small>')]
        for row in result.paper
    ]  # fmt: skip
    head = ["Group", "Source", "Figure", "Paper", "Ours", "Paper, Δ nats", "Ours, Δ nats", "Result"]
    note = (
        '<p class="aside">Reproduced: our interval contains the paper\'s difference and excludes zero. Contradicted: it '
        "excludes the paper's. Otherwise undecided. Not comparable unless training data, tokens and evaluation set match.</p>"
    )
    return section(
        "paper",
        "The paper's figures beside ours",
        table(head, rows, caption="Paper and ours", numeric_from=3, css="wrap"),
        note,
        short="Paper",
    )


def downstream(result: Comparison) -> Html:
    """Tasks with standard errors, other validation sets."""
    parts: list[str] = []
    others = [label for label in result.labels if label != result.label]
    if others and any(group.other_sets for group in result.groups):
        rows = []
        for group in result.groups:
            row: list[object] = [group.name]
            for label in others:
                if label in group.other_sets:
                    mean, difference = group.other_sets[label]
                    row.append(Html(f"{words.number(mean, 4)}<small>{estimate(difference)}</small>"))
                else:
                    found = [v for run in group.finished if (v := run.last(validation_metric(label))) is not None]
                    row.append(words.number(sum(found) / len(found), 4) if found else words.DASH)
            rows.append(row)
        parts.append(
            table(["Group", *others], rows, caption="Other validation sets: loss, difference to the baseline in nats")
        )
    if result.downstream:
        tasks = list(dict.fromkeys((s.task, s.metric, s.version, s.source) for s in result.downstream))
        rows = []
        for key in tasks:
            scores = {s.group: s for s in result.downstream if (s.task, s.metric, s.version, s.source) == key}
            task, metric, version, source = key
            counts = {s.items for s in scores.values()}
            asked = counts.pop() if len(counts) == 1 else None
            about = [
                metric,
                f"version {version}" if version else "",
                f"{asked:,} items" if asked else "",
                "during training" if source == "training" else "",
            ]
            row = [Html(f"{escape(task)}<small>{escape(' · '.join(part for part in about if part))}</small>")]
            for group in result.groups:
                score = scores.get(group.name)
                if score is None:
                    row.append(Html(words.DASH))
                    continue
                error = "" if score.standard_error is None else f" ± {score.standard_error:.4f}"
                change = "" if score.difference is None else f"<small>{estimate(score.difference)}</small>"
                row.append(Html(f"{words.number(score.value, 4)}{error}{change}"))
            rows.append(row)
        parts.append(table(["Task", *(g.name for g in result.groups)], rows, caption="Tasks: mean over seeds ± standard error over items; below it the difference to the baseline, paired by seed"))  # fmt: skip
    return section("downstream", "Beyond the validation loss", *parts, short="Tasks") if parts else Html()


def comparability(result: Comparison) -> Html:
    """What was checked, what differs, what is missing."""
    parts: list[str] = []
    blocked = [f"{g.name}: {reason}." for g in result.groups for reason in g.blocking]
    if blocked:
        parts.append("<h3>Not compared</h3>" + items(blocked))
    unfinished = [
        Html(f'<span class="mark warn">{escape(run.state.status)}</span> {escape(describe_unfinished(run))}')
        for run in result.unfinished
    ]
    if unfinished:
        parts.append("<h3>Runs that have not finished</h3>" + items(unfinished))
    remarks: dict[str, list[str]] = {}
    for group in result.groups:
        for remark in group.remarks:
            remarks.setdefault(remark, []).append(group.name)
    if remarks:
        entries = [
            f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''}: {remark}"
            for remark, names in remarks.items()
        ]
        parts.append("<h3>What differs besides the shape, group against baseline</h3>" + items(entries))
    problems = [f"{run.name}: {problem}" for run in result.sweep.runs for problem in run.problems]
    if problems:
        parts.append("<h3>Files</h3>" + items(problems))
    checked = (
        "Checked for every pair: fingerprint of the training data, tokenizer, fingerprint of the validation set, tokens seen, "
        "order of the data, every key of the config outside the model, device, code and package versions."
    )
    if not blocked and not remarks:
        checked += " Nothing differs."
    parts.append(f"<p>{checked}</p>")
    parts.append("<h3>How to read the numbers</h3>" + items(result.notes))
    return section("comparability", "What was compared, and what was not", *parts, short="Comparability")


def provenance(result: Comparison) -> Html:
    """Every run: what it was made with, how to make it again."""
    cards = []
    for run in (run for group in result.groups for run in group.runs):
        cards.append(
            f'<details class="provenance"><summary><span class="name">{escape(run.name)}</span> <small>{escape(_state(run))}</small>'
            f"</summary>{_provenance(run)}</details>"
        )
    intro = (
        "<p>Everything on this page was read from the runs' folders. A run is made again from its resolved config.</p>"
    )
    return section("provenance", "Provenance, and how to make each run again", intro, *cards, short="Provenance")


def _state(run: Run) -> str:
    step = run.progress()[0] or run.state.step
    attempts = f", {words.plural(run.state.attempt, 'attempt')}" if run.state.attempt else ""
    return f"{run.state.status}, step {step:,}{attempts}"


def command_of(run: Run) -> str:
    """The command a run was started with; provenance.json holds text or an argument list."""
    command = run.provenance.get("command")
    if isinstance(command, (list, tuple)):
        program, *arguments = [str(part) for part in command] or [""]
        return shlex.join([program.rpartition("/")[2], *arguments])
    return str(command or "")


def _provenance(run: Run) -> str:
    source, code, data = run.provenance, run.provenance.get("code") or {}, run.data
    folder = shlex.quote(f"runs/again/{run.name}")
    again = f"olmo-ext train {shlex.quote(str(run.path / 'config.yaml'))} --run-directory {folder}"
    packages = ", ".join(f"{name} {version}" for name, version in (source.get("packages") or {}).items())
    diff = f" with uncommitted changes ({str(code['diff_sha256'])[:12]})" if code.get("diff_sha256") else ""
    facts = [
        ("Again", Html(f"<code>{escape(again)}</code>")),
        ("Started as", Html(f"<code>{escape(command_of(run))}</code>")),
        ("Folder", Html(f"<code>{escape(str(run.path))}</code>")),
        ("Code", f"olmo-ext {code.get('version', '?')}, revision {code.get('revision') or 'unknown'}{diff}"),
        ("Packages", f"{packages}; Python {source.get('python', '?')}"),
        ("Machine", f"{source.get('host', '?')}, {source.get('device', '?')}, {words.plural(source.get('world_size') or 1, 'process')}".replace("processs", "processes")),
        ("Training data", f"{data.get('fingerprint') or 'not recorded'}, order seed {data.get('order_seed')}"),
        ("Tokenizer", str(data.get("tokenizer") or "not recorded")),
        ("Validation", "; ".join(f"{label} {value}" for label, value in (data.get("evaluation") or {}).items()) or "not recorded"),
    ]  # fmt: skip
    rows = "".join(
        f"<dt>{name}</dt><dd>{value if isinstance(value, Html) else escape(value)}</dd>" for name, value in facts
    )
    return f"<dl>{rows}</dl>"
