"""report.html: one file, no network, the same in a browser as in its tables, usable without a mouse."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.base.quantities import format_count
from olmo_ext.compare.collect import read_sweep
from olmo_ext.compare.comparison import compare_sweep
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.report.heatmaps import layer_means, needle_scores
from olmo_ext.compare.report.page import render, write_report
from olmo_ext.compare.report.payload import emphasised
from olmo_ext.compare.report.thinning import extremes, means

from .browser import CHROMIUM, Browser
from .synthetic import make_shape, make_sweep

HOSTILE = "</script><img src=x onerror=alert(1)>&'\""
SHORT: dict[str, Any] = {"steps": 60, "evaluations": 6, "extra_metrics": 0}


def _taper(start: int, end: int) -> list[list[int]]:
    return [[round(start + (end - start) * layer / 7)] for layer in range(8)]


def _build(path: Path) -> Comparison:
    needle = [
        {"task": "niah_single_1", "task_version": "1", "metric": "string_match", "value": 1 - depth / 2, "stderr": 0.1,
         "items": 20, "step": 60, "length": length, "depth": depth}
        for length in (512, 1024) for depth in (0.0, 1.0)
    ]  # fmt: skip
    diagnosis = {"layers": [{"layer": i, "rho_mlp": 0.1 * i, "rho_block": 0.05 * i} for i in range(8)]}
    groups: dict[str, dict[str, Any]] = {
        "conventional": {
            **SHORT, "final": [3.0, 3.02, 2.99], "evals": needle, "diagnosis": diagnosis,
            "shape": make_shape(d_model=128, n_layers=8),
        },
        "hourglass": {
            **SHORT, "final": [2.9, 2.9201, 2.90], "downstream": {"sciq_acc": 0.5}, "speed": 15000.0,
            "shape": make_shape(d_model=128, n_layers=8, d_ff=[[128] * 4] * 8, ffn_type="hourglass"),
        },
    }  # fmt: skip
    for schedule in ("cosine", "linear"):
        for start, end in ((1.5, 0.5), (1.25, 0.75)):
            groups[f"{schedule}-{start:g}-{end:g}"] = {
                **SHORT,
                "final": [2.99, 3.01, 2.985],
                "shape": make_shape(d_model=128, n_layers=8, d_ff=_taper(int(start * 512), int(end * 512))),
                "config": {"model.ffn.taper": {"schedule": schedule, "start": start, "end": end}},
            }
    for layers, width in ((12, 104), (6, 148), (4, 180)):
        groups[f"aspect-{layers}"] = {**SHORT, "final": 3.05, "shape": make_shape(d_model=width, n_layers=layers)}
    make_sweep(path, groups, baseline="conventional", budget_checked=False, skip=("hourglass-s3",))
    return compare_sweep(read_sweep(path))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return _build(tmp_path_factory.mktemp("runs") / "sweep")


@pytest.fixture(scope="module")
def page(result: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(result, path)
    return path


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def _elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = _Elements()
    parser.feed(text)
    return parser.tags


def test_nothing_is_loaded_from_anywhere_and_the_policy_forbids_it(page: Path) -> None:
    elements = _elements(page.read_text())
    for tag, attributes in elements:
        assert not {"src", "srcset", "data", "action"} & attributes.keys(), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), attributes
        assert tag not in ("link", "iframe", "object", "embed")
    policy = next(a["content"] for tag, a in elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    assert "connect-src" not in policy and "http:" not in policy and "https:" not in policy


def test_plotly_is_inlined_once_and_never_sends_to_its_cloud(page: Path) -> None:
    text = page.read_text()
    assert text.count("plotly.js v") == 1
    assert "showSendToCloud: false" in text and 'plotlyServerURL: ""' in text


def test_every_plot_has_a_label_and_the_page_a_table_of_its_numbers(result: Comparison) -> None:
    text = render(result).split("<script", 1)[0]
    elements = _elements(text)
    plots = [attributes for tag, attributes in elements if tag == "div" and "plot" in (attributes.get("class") or "")]
    assert {a["id"] for a in plots} >= {"plot-curves", "plot-pareto-flops", "plot-pareto-speed", "plot-aspect"}
    assert all(a.get("aria-label") and a.get("role") == "img" for a in plots)
    for tag, attributes in elements:
        if tag == "svg":
            assert attributes.get("aria-label")
        if tag == "input" and attributes.get("type") == "checkbox" and attributes.get("id") != "curve-log":
            assert attributes.get("aria-label")
    assert text.count("<table") == text.count("<caption>")
    for group in result.groups:
        assert text.count(group.name) >= 6, "results, curves, shapes, cost and views each name it in a table"
    for section in ("needles", "diagnosis", "axes", "comparability", "provenance"):
        assert f'<section id="{section}"' in text


def test_types_are_named_with_their_options_and_decoding_with_its_state(tmp_path: Path) -> None:
    periods, mag = {"update_periods": [1, 4], "composition": "sequential"}, {"form": "mag", "window": 64}
    two = [[128, 128]] * 4
    groups = {
        # As runs were described before options and state were: the config alone tells.
        "old": {"shape": make_shape(d_ff=two, ffn_type="hope", mixer_type="titans"),
                "config": {"model.ffn": {"type": "hope", "num_sub_mlps": 2, "update_periods": [4, 1]},
                           "model.attention": {"type": "titans", "n_heads": None, **mag, "chunk_size": 16}}},
        "new": {"shape": make_shape(d_ff=two, ffn_type="hope", mixer_type="titans", state_bytes=334_848,
                                    options={"ffn": periods, "attention": mag})},
        "plain": {"shape": make_shape(state_bytes=0, options={})},
        "theirs": {"shape": make_shape(ffn_type="<b>lost</b>", options={"ffn": {"rank": 4}})},
    }  # fmt: skip
    path = tmp_path / "sweep"
    make_sweep(path, {name: {**SHORT, "final": 3.0, **given} for name, given in groups.items()}, baseline="plain")
    result = compare_sweep(read_sweep(path))
    # Another mixer is another family: a fit over sizes does not pool the two.
    assert [result.group(name).features.family for name in ("old", "new")] == [
        "hope (update_periods [4, 1]), K=2, titans (form mag, chunk_size 16, window 64) attention",
        "hope (update_periods [1, 4]), K=2, titans (form mag, window 64) attention",
    ]
    text = render(result).split("<script", 1)[0]
    shapes, cost = (text.split(f'<section id="{name}"')[1].split("</section>")[0] for name in ("shapes", "cost"))
    for words in (
        "hope, update_periods [4, 1] · titans, form mag, chunk_size 16, window 64",
        "hope, update_periods [1, 4] · titans, form mag, window 64",
        "conventional · softmax",
        "&lt;b&gt;lost&lt;/b&gt;, rank 4 · softmax",
    ):
        assert f"<small>{words}</small>" in shapes
    assert "hope, update_periods [1, 4] (× 4)" in shapes and "titans, form mag, window 64 (× 4)" in shapes
    rows = {name: cells for name, *cells in _rows(cost.split("Cost and loss</span>")[1].split("</table>")[0])}
    assert rows.pop("Group")[-2:] == ["KV bytes/token", "State bytes/sequence"]
    states = {name: cells[-1] for name, cells in rows.items()}
    assert states == {"old": "–", "new": format_count(334_848), "plain": "0", "theirs": "–"}


def _rows(table: str) -> list[list[str]]:
    """The cells of a table, without markup."""
    rows = re.findall(r"<tr>.*?</tr>", table, re.S)
    return [[re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.S)] for row in rows]


def test_the_verdict_is_two_sentences_at_the_top_and_a_third_for_short_runs(result: Comparison) -> None:
    text = render(result)
    verdict = re.search(r'<p class="verdict">(.*?)</p>', text)
    assert verdict is not None
    assert text.index(verdict[0]) < text.index("<table")
    sentences = re.split(r"(?<=[a-z)0-9])\. (?=[A-Z])", verdict[1])
    assert sentences[0].startswith("hourglass is better than the baseline conventional")
    assert len(sentences) == 3 and sentences[2].startswith("The runs are too short")


def test_unfinished_runs_reproduction_and_data_order_are_on_the_page(result: Comparison) -> None:
    text = render(result)
    assert "hourglass-s3, step 0" in text and "2 of 3" in text
    assert "olmo-ext train conventional-s1.yaml --seed=1" in text
    assert "config.yaml --run-directory runs/again/conventional-s1" in text
    assert "do not cover data-order variance" in text


def test_names_from_files_cannot_become_markup(tmp_path: Path) -> None:
    path = make_sweep(
        tmp_path / "s", {"a": {**SHORT, "final": 3.0}, "b": {**SHORT, "final": 2.9}}, baseline="a", seeds=[1]
    )
    content = (path / "sweep.json").read_text().replace('"group": "b"', f'"group": {json.dumps(HOSTILE)}')
    (path / "sweep.json").write_text(content)
    text = render(compare_sweep(read_sweep(path)))
    assert "<img" not in text
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert embedded is not None
    assert json.loads(embedded[1])["groups"][1]["n"] == HOSTILE


def test_passwords_in_addresses_do_not_reach_the_page(tmp_path: Path) -> None:
    address = "https://me:{}@host/model"
    groups: dict[str, dict[str, Any]] = {
        name: {**SHORT, "final": 3.0, "config": {"load_path": address.format(f"hidden-{name}")}} for name in "ab"
    }
    path = make_sweep(tmp_path / "s", groups, baseline="a", seeds=[1])
    for name in "ab":
        file = path / f"{name}-s1" / "provenance.json"
        command = ["olmo-ext", "train", f"--load_path={address.format(f'hidden-{name}')}"]
        file.write_text(json.dumps({**json.loads(file.read_text()), "command": command}))
    text = render(compare_sweep(read_sweep(path)))
    assert "--load_path=https://host/model" in text and "load_path: https://host/model" in text
    assert "hidden-a" not in text and "hidden-b" not in text


def test_a_page_of_which_nothing_was_compared_does_not_say_that_nothing_differs(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {name: {**SHORT, "final": 3.0} for name in "ab"}
    path = make_sweep(tmp_path / "s", groups, baseline="a", seeds=[1])
    assert "Nothing differs." in render(compare_sweep(read_sweep(path)))
    (path / "b-s1" / "state.json").unlink()
    assert "Nothing differs." not in render(compare_sweep(read_sweep(path)))


def test_layers_are_means_over_checkpoints_of_one_step_and_an_early_one_is_named(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "s", {"a": {**SHORT, "final": 3.0}}, baseline="a", seeds=[1, 2, 3])
    for seed, step, rho in ((1, 30, 0.1), (2, 30, 0.3), (3, 10, 0.9)):
        (path / f"a-s{seed}" / "diagnosis").mkdir()
        content = {"step": step, "layers": [{"rho_mlp": rho}] * 2}
        (path / f"a-s{seed}" / "diagnosis" / f"step{step}.json").write_text(json.dumps(content))
    result = compare_sweep(read_sweep(path))
    assert layer_means(result.group("a")) == {"rho_mlp": [pytest.approx(0.2)] * 2}
    assert "a, step 30" in render(result)
    (path / "a-s3" / "diagnosis" / "step60.json").write_text(json.dumps({"step": 60, "layers": [{"rho_mlp": 0.5}] * 2}))
    result = compare_sweep(read_sweep(path))
    assert layer_means(result.group("a")) == {"rho_mlp": [0.5, 0.5]} and "a, step" not in render(result)


def test_speeds_of_different_devices_do_not_stand_on_one_axis(tmp_path: Path) -> None:
    groups: dict[str, dict[str, Any]] = {name: {**SHORT, "final": 3.0} for name in "ab"}
    path = make_sweep(tmp_path / "s", groups, baseline="a", seeds=[1])
    drawn = '"id":"pareto-speed"'
    assert drawn in render(compare_sweep(read_sweep(path)))
    file = path / "b-s1" / "provenance.json"
    file.write_text(file.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    text = render(compare_sweep(read_sweep(path)))
    assert drawn not in text and "loss against speed is not drawn" in text


def test_needles_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    rows = [
        {"task": "niah_single_1", "metric": "string_match", "value": value, "step": step, "length": 512, "depth": 0.5}
        for step, value in ((30, 0.0), (60, 0.8))
    ]
    path = make_sweep(tmp_path / "s", {"a": {**SHORT, "final": 3.0, "evals": rows}}, baseline="a", seeds=[1, 2])
    scores = needle_scores(compare_sweep(read_sweep(path)).group("a"))
    assert scores == {("niah_single_1", "string_match"): {(0.5, 512.0): [0.8, 0.8]}}


def test_thinning_keeps_ends_and_extremes_and_means_stay_within(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tokens, value = np.arange(1, 5001) * 1000, generator.normal(3, 0.1, 5000)
    value[1234], value[4321] = 9.0, -2.0
    kept = extremes(tokens, value, 133)
    assert len(kept) <= 2 * 133 + 2 and {0, 1234, 4321, 4999} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    x, y = means(tokens, [tokens, value], 133)
    assert len(x) <= 133 and np.all(np.diff(x) > 0) and y.min() > -2 and y.max() < 9
    assert extremes(tokens[:50], value[:50], 133).tolist() == list(range(50))


def test_the_page_of_fifty_runs_stays_below_six_megabytes_however_long_they_are(tmp_path: Path) -> None:
    sizes = []
    for steps in (600, 1800):
        shape = make_shape(d_model=128, n_layers=8)
        groups = {
            f"g{number:02d}": {"final": [3.0, 3.01], "steps": steps, "evaluations": 50, "shape": shape}
            for number in range(25)
        }
        result = compare_sweep(read_sweep(make_sweep(tmp_path / str(steps), groups, baseline="g00", seeds=(1, 2))))
        sizes.append(write_report(result, tmp_path / f"{steps}.html"))
    # plotly is most of it; the rest is thinned curves.
    assert sizes[1] < 6e6 and sizes[1] < 1.02 * sizes[0], sizes


def test_a_large_sweep_names_few_groups_the_baseline_and_the_best_among_them(tmp_path: Path) -> None:
    groups = {f"g{number:02d}": {**SHORT, "final": 3 + 0.01 * number} for number in range(20)}
    result = compare_sweep(read_sweep(make_sweep(tmp_path / "s", groups, baseline="g10", seeds=[1])))
    named = emphasised(result.groups)
    assert len(named) == 9 and {"g10", "g00", "g01", "g19"} <= named


def test_a_sweep_with_nothing_finished_still_gives_a_page(tmp_path: Path) -> None:
    path = make_sweep(tmp_path / "s", {"a": {"final": 3.0}}, baseline="a", seeds=[1], skip=("a-s1",))
    assert "No run has finished yet" in render(compare_sweep(read_sweep(path)))


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with Browser() as opened:
        opened.size(1600)
        opened.open(page)
        opened.draw_everything()
        yield opened


def _drawn(browser: Browser, plot: str) -> list[str]:
    names = browser.evaluate(f"document.getElementById('plot-{plot}').data.map((trace) => trace.name)")
    return sorted(name for name in set(names) if name and "seeds" not in name)


@needs_browser
def test_the_browser_shows_every_plot_without_an_error_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    shown = browser.evaluate(
        "[...document.querySelectorAll('.plot')].filter((p) => p.querySelector('.main-svg')).length"
    )
    assert shown >= 4
    assert browser.errors == []
    assert {url.split("#")[0] for url in browser.requests} <= {page.resolve().as_uri(), "about:blank"}


@needs_browser
def test_hiding_a_group_or_a_run_changes_the_plots_and_showing_it_brings_it_back(browser: Browser) -> None:
    before, points = _drawn(browser, "curves"), _drawn(browser, "pareto-flops")
    assert "hourglass" in before and "hourglass" in points
    browser.evaluate("document.querySelector('input[data-group=\"1\"]').click()")
    assert "hourglass" not in _drawn(browser, "curves") and "hourglass" not in _drawn(browser, "pareto-flops")
    assert "off" in browser.evaluate("document.querySelector('.shape[data-group=\"1\"]').className")
    browser.evaluate("document.querySelector('input[data-group=\"1\"]').click()")
    assert _drawn(browser, "curves") == before and _drawn(browser, "pareto-flops") == points
    mean = "document.getElementById('plot-curves').data.find((t) => t.name === 'hourglass').y.at(-1)"
    assert browser.evaluate(mean) == pytest.approx(2.91005)
    browser.evaluate("document.querySelector('input[data-run=\"hourglass-s2\"]').click()")
    assert browser.evaluate(mean) == pytest.approx(2.9)
    assert browser.evaluate("document.querySelector('input[data-group=\"1\"]').indeterminate") is True
    browser.evaluate("document.querySelector('input[data-run=\"hourglass-s2\"]').click()")


@needs_browser
def test_axes_smoothing_and_difference_redraw_the_curves(browser: Browser) -> None:
    trace = "document.getElementById('plot-curves').data.find((t) => t.name === 'hourglass')"

    def choose(name: str, value: str) -> None:
        browser.evaluate(f'document.querySelector(\'input[name="{name}"][value="{value}"]\').click()')

    tokens = browser.evaluate(f"{trace}.x.at(-1)")
    choose("curve-x", "s")
    assert browser.evaluate(f"{trace}.x.at(-1)") == pytest.approx(tokens / 15000, rel=0.01)
    choose("curve-x", "f")
    assert browser.evaluate(f"{trace}.x.at(-1)") > 1e12
    choose("curve-x", "t")
    choose("curve-show", "difference")
    assert browser.evaluate(f"{trace}.y.at(-1)") == pytest.approx((2.9 + 2.9201 - 3.0 - 3.02) / 2, abs=1e-3)
    choose("curve-show", "loss")
    choose("curve-y", "t")

    def roughness() -> float:
        return browser.evaluate(
            f"(() => {{ const y = {trace}.y; return y.slice(1).reduce((a, v, i) => a + Math.abs(v - y[i]), 0); }})()"
        )

    light = roughness()
    choose("curve-smooth", "2")
    assert roughness() < light
    choose("curve-smooth", "0")
    assert "hourglass-s1" in _drawn(browser, "curves")
    choose("curve-smooth", "1")
    choose("curve-y", "v")
    assert browser.errors == []


@needs_browser
def test_the_table_sorts_by_its_headings_with_unknown_values_last(browser: Browser) -> None:
    names = "[...document.querySelectorAll('#results tbody th .name')].map((e) => e.textContent)"
    original = browser.evaluate(names)
    difference = "document.querySelectorAll('#results .sort')[3]"
    browser.evaluate(f"{difference}.click()")
    ascending = browser.evaluate(names)
    assert ascending[0] == "hourglass" and ascending[-1] == "conventional" and set(ascending) == set(original)
    browser.evaluate(f"{difference}.click()")
    assert browser.evaluate(names)[0].startswith("aspect") and browser.evaluate(names)[-1] == "conventional"
    assert browser.evaluate(f"{difference}.closest('th').getAttribute('aria-sort')") == "descending"


@needs_browser
def test_the_keyboard_reaches_boxes_and_headings(browser: Browser) -> None:
    browser.evaluate("document.querySelector('#results input[data-group=\"0\"]').focus()")
    space = {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "}
    tab = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **space)
    assert "conventional" not in _drawn(browser, "curves")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **space)
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **tab)
    assert browser.evaluate("document.activeElement.className") == "fold"


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1600])
def test_the_page_fits_its_width_in_light_and_dark(
    browser: Browser, page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.size(width, dark=dark)
    browser.open(page)
    browser.draw_everything()
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing makes the page scroll sideways"
    too_wide = "(plot) => plot.querySelector('.main-svg')?.clientWidth > plot.clientWidth"
    assert browser.evaluate(f"[...document.querySelectorAll('.plot')].filter({too_wide}).length") == 0
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", colour)[0]) < 60) is dark
    browser.screenshot(tmp_path / "page.png")
    assert struct.unpack(">I", (tmp_path / "page.png").read_bytes()[16:20])[0] == width
    assert browser.errors == []
