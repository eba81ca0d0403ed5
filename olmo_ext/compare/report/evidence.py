"""What stands beside the comparison: a paper's figures, tasks, what was not compared, how each run was made."""

from __future__ import annotations

import shlex
from html import escape

from olmo_ext.base.secrecy import without_credentials
from olmo_ext.compare import words
from olmo_ext.compare.collect import Run, validation_metric
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.paper import PaperRow
from olmo_ext.compare.report.html import Html, items, section, table
from olmo_ext.compare.table import describe_unfinished


def paper(result: Comparison) -> Html:
    """The paper's figures beside ours."""
    if not result.paper:
        return Html()
    tones = {"reproduced": "good", "contradicted": "warn"}

    def result_of(row: PaperRow) -> Html:
        mark = f'<span class="mark {tones.get(row.verdict, "")}">{escape(row.verdict or "baseline")}</span>'
        return Html(f"{mark}<small>{escape(row.why)}</small>")

    rows = [
        [row.group, row.source, row.metric, f"{row.paper_value:g}", words.number(row.our_value, 3),
         words.signed(row.paper_difference), words.estimate(row.our_difference),
         result_of(row)]
        for row in result.paper
    ]  # fmt: skip
    head = ["Group", "Source", "Figure", "Paper", "Ours", "Paper, Δ nats", "Ours, Δ nats", "Result"]
    note = (
        '<p class="aside">Reproduced: our interval contains the paper\'s difference and excludes zero. Contradicted: '
        "it "
        "excludes the paper's. Otherwise undecided. Not comparable unless training data, tokens and evaluation set "
        "match.</p>"
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
                    row.append(Html(f"{words.number(mean, 4)}<small>{words.estimate(difference)}</small>"))
                else:
                    values = [v for run in group.finished if (v := run.last(validation_metric(label))) is not None]
                    row.append(words.number(sum(values) / len(values), 4) if values else words.DASH)
            rows.append(row)
        parts.append(
            table(["Group", *others], rows, caption="Other validation sets: loss, difference to the baseline in nats")
        )
    if result.downstream:
        tasks = list(dict.fromkeys(score.key for score in result.downstream))
        rows = []
        for key in tasks:
            scores = {s.group: s for s in result.downstream if s.key == key}
            task, metric, version, source, step = key
            counts = {s.items for s in scores.values()}
            asked = counts.pop() if len(counts) == 1 else None
            about = [
                metric,
                f"version {version[:24]}" if version else "",
                f"{asked:,} items" if asked else "",
                "during training" if source == "training" else "",
                "" if step is None else f"at step {step:,}",
            ]
            row = [Html(f"{escape(task)}<small>{escape(' · '.join(part for part in about if part))}</small>")]
            for group in result.groups:
                score = scores.get(group.name)
                if score is None:
                    row.append(Html(words.DASH))
                    continue
                error = "" if score.standard_error is None else f" ± {score.standard_error:.4f}"
                change = "" if score.difference is None else f"<small>{words.estimate(score.difference)}</small>"
                row.append(Html(f"{words.number(score.value, 4)}{error}{change}"))
            rows.append(row)
        caption = (
            "Tasks: mean over seeds ± standard error over items; below it the difference to the baseline, paired by "
            "seed"
        )
        parts.append(table(["Task", *(group.name for group in result.groups)], rows, caption=caption))
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
        parts.append("<h3>Files and values</h3>" + items(problems))
    checked = (
        "Checked for every pair: fingerprint of the training data, tokenizer, fingerprint of the validation set, "
        "tokens seen, order of the data, every key of the config but those of the model, the data's files, logging and "
        "the machine, device, code and package versions."
    )
    if not blocked and not remarks and any(group.nats is not None for group in result.groups):
        checked += " Nothing differs."
    parts.append(f"<p>{checked}</p>")
    parts.append("<h3>How to read the numbers</h3>" + items(result.notes))
    return section("comparability", "What was compared, and what was not", *parts, short="Comparability")


def provenance(result: Comparison) -> Html:
    """Every run: what it was made with, how to make it again."""
    cards = []
    for run in (run for group in result.groups for run in group.runs):
        cards.append(
            f'<details class="provenance"><summary><span class="name">{escape(run.name)}</span> '
            f"<small>{escape(_state(run))}</small>"
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
    """The command a run was started with, passwords in addresses left out; provenance.json holds text or a list."""
    command = run.provenance.get("command")
    if isinstance(command, (list, tuple)):
        program, *arguments = [str(part) for part in command] or [""]
        command = shlex.join([program.rpartition("/")[2], *arguments])
    return without_credentials(str(command or ""))


def _provenance(run: Run) -> str:
    source, code, data = run.provenance, run.provenance.get("code") or {}, run.data
    folder = shlex.quote(f"runs/again/{run.name}")
    again = f"olmo-ext train {shlex.quote(str(run.path / 'config.yaml'))} --run-directory {folder}"
    packages = ", ".join(f"{name} {version}" for name, version in (source.get("packages") or {}).items())
    diff = f" with uncommitted changes ({str(code['diff_sha256'])[:12]})" if code.get("diff_sha256") else ""
    world = source.get("world_size") or 1
    validation = "; ".join(f"{label} {value}" for label, value in (data.get("evaluation") or {}).items())
    machine = (source.get("host", "?"), source.get("device", "?"), words.plural(world, "rank"))
    facts = [
        ("Again", Html(f"<code>{escape(again)}</code>")),
        ("Started as", Html(f"<code>{escape(command_of(run))}</code>")),
        ("Folder", Html(f"<code>{escape(str(run.path))}</code>")),
        ("Code", f"olmo-ext {code.get('version', '?')}, revision {code.get('revision') or 'unknown'}{diff}"),
        ("Packages", f"{packages}; Python {source.get('python', '?')}"),
        ("Machine", ", ".join(filter(None, machine))),
        ("Training data", f"{data.get('fingerprint') or 'not recorded'}, order seed {data.get('order_seed')}"),
        ("Tokenizer", str(data.get("tokenizer") or "not recorded")),
        ("Validation", validation or "not recorded"),
    ]  # fmt: skip
    rows = "".join(
        f"<dt>{name}</dt><dd>{value if isinstance(value, Html) else escape(value)}</dd>" for name, value in facts
    )
    return f"<dl>{rows}</dl>"
