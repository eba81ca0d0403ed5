"""Assemble the page: verdict, results, sections, data, script. One file; a policy in its head forbids every request."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.compare import words
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report import axes, evidence, sections
from olmo_ext.compare.report.payload import payload
from olmo_ext.compare.report.results import results_table

# `unsafe-inline` is this file's own script and style; nothing else may be loaded or contacted.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def plotly_script() -> str:
    """The plotly package's own bundle, read as a file: importing plotly takes longer than building the page."""
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise InputError("plotly is not installed", right="pip install olmo-ext brings it")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text()


def _asset(name: str) -> str:
    return importlib.resources.files("olmo_ext.compare.report").joinpath(name).read_text()


def write_report(result: Comparison, path: Path) -> int:
    """Write the page; its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = render(result).encode()
    write_atomically(path, content)
    return len(content)


def render(result: Comparison) -> str:
    """The page as text."""
    data = payload(result)
    present = {figure["id"] for figure in data["figures"]}
    body = [
        sections.curves(result),
        sections.shapes(result),
        sections.cost(result),
        axes.axes(result, present),
        axes.learning_rates(result),
        axes.scaling(result),
        evidence.paper(result),
        evidence.downstream(result),
        _extra(result),
        evidence.comparability(result),
        evidence.provenance(result),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        'content="light dark">'
        f"<title>{escape(result.sweep.name)} · comparison</title><style>{_asset('report.css')}</style></head><body>"
        '<a class="skip" href="#results-section">To the results</a>'
        f"{_contents(body)}<main>{_head(result)}"
        f'<section id="results-section" aria-labelledby="results-title"><h2 id="results-title">Results</h2>'
        f"{_unequal(result)}{results_table(result)}</section>{''.join(body)}</main>"
        '<noscript><p class="noscript">The plots need JavaScript; every number is in the tables.</p></noscript>'
        f'<script type="application/json" id="data">{_embedded(data)}</script>'
        f"<script>{_inline(plotly_script())}</script><script>{_inline(_asset('report.js'))}</script></body></html>\n"
    )


def _embedded(data: dict[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # A run may be called anything, `</script>` too.
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _inline(script: str) -> str:
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _extra(result: Comparison) -> str:
    from olmo_ext.compare.report.heatmaps import diagnosis, needles

    return diagnosis(result) + needles(result)


def _head(result: Comparison) -> str:
    done = sum(1 for run in result.sweep.runs if run.finished)
    facts = [
        f"{words.plural(len(result.groups), 'group')}, {done} of {words.plural(len(result.sweep.runs), 'run')} "
        "finished",
        f"validation set <b>{escape(result.label)}</b>" if result.label else "no validation loss",
        f"baseline <b>{escape(result.sweep.baseline)}</b>",
        datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0"),
    ]
    return (
        f'<header><p class="kicker">Comparison of model shapes</p><h1>{escape(result.sweep.name)}</h1>'
        f'<p class="verdict">{escape(result.verdict)}</p>'
        f'<p class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</p></header>'
    )


def _unequal(result: Comparison) -> str:
    hint = [note for note in result.notes if note.startswith(("Budgets differ", "The sweep asked"))]
    return f'<p class="aside">{escape(" ".join(hint))}</p>' if hint else ""


def _contents(body: list[Any]) -> str:
    links = ['<a href="#results-section">Results</a>']
    for part in body:
        for piece in str(part).split('<section id="')[1:]:
            identifier = piece.split('"', 1)[0]
            links.append(f'<a href="#{identifier}">{piece.split("data-short=", 1)[1].split(chr(34))[1]}</a>')
    return (
        f'<nav aria-label="Sections"><div class="links">{"".join(links)}</div>'
        '<button type="button" id="theme">Theme: system</button></nav>'
    )
