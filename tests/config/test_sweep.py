"""A sweep file becomes runs with stable names, full configs and equal budgets, or one line that says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import load_run_config
from olmo_ext.config.sweep import SWEEP_WORDS, is_sweep_file, load_sweep, sweep_json, write_sweep_json

BASE = """
model: {d_model: 64, n_heads: 4, n_layers: 2, max_sequence_length: 64, vocab_size: 256, embedding_size: 256,
        ffn: {d_ff: 128}}
tokenizer: {identifier: none}
max_duration: 6
global_train_batch_size: 4
device_train_microbatch_size: 4
"""


@pytest.fixture
def sweep_file(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(BASE)

    def write(text: str, name: str = "sweep.yaml") -> Path:
        path = tmp_path / name
        path.write_text("base: base.yaml\n" + text)
        return path

    return write


def test_axes_are_crossed_and_every_run_is_the_config_one_would_write_by_hand(sweep_file) -> None:
    path = sweep_file(
        """
axes:
  shape:
    conventional: {model.ffn.type: conventional}
    hourglass: {model: {ffn: {type: hourglass, d_ff: 64, num_sub_mlps: 2}}}
  optimizer.learning_rate: [4e-4, 0.0008]
seeds: [1, 2]
baseline: conventional-learning_rate0.0004
"""
    )
    sweep = load_sweep(path)
    assert [run.name for run in sweep.runs] == [
        f"{shape}-learning_rate{rate}-s{seed}"
        for shape in ("conventional", "hourglass")
        for rate in ("0.0004", "0.0008")
        for seed in (1, 2)
    ]
    last = sweep.runs[-1]
    by_hand = load_run_config(
        path.parent / "base.yaml",
        [
            "model.ffn.type=hourglass",
            "model.ffn.d_ff=64",
            "model.ffn.num_sub_mlps=2",
            "optimizer.learning_rate=8e-4",
            "seed=2",
            f"run_name={last.name}",
        ],
    )
    assert last.config.plain() == by_hand.plain()
    assert last.values == {"shape": "hourglass", "optimizer.learning_rate": 0.0008}
    assert (last.group, last.seed) == ("hourglass-learning_rate0.0008", 2)


def test_names_do_not_depend_on_how_a_number_is_written(sweep_file) -> None:
    names = [
        [run.name for run in load_sweep(sweep_file(f"axes: {{optimizer.learning_rate: [{text}, 1e-3]}}")).runs]
        for text in ("4e-4", "0.0004", "0.00040")
    ]
    assert names[0] == names[1] == names[2] == ["learning_rate0.0004", "learning_rate0.001"]


def test_generated_names_hold_only_safe_characters_and_values_arrive_unchanged(sweep_file) -> None:
    path = sweep_file("""axes: {save_folder: ["a b", "x,y=1", "50%", "it's", "$(id)", "a_b"]}""")
    runs = load_sweep(path).runs
    assert [run.config.save_folder for run in runs] == ["a b", "x,y=1", "50%", "it's", "$(id)", "a_b"]
    assert all(set(run.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._+-") for run in runs)
    assert len({run.name for run in runs}) == 6


@pytest.mark.parametrize("name", ["a b", "x,y=1", "50%", "it's", "$(id)", "Größe"])
def test_a_listed_name_is_the_runs_name_as_written(sweep_file, name: str) -> None:
    path = sweep_file(f'runs: {{"{name}": {{seed: 3}}}}\n')
    run = load_sweep(path).runs[0]
    assert run.name == run.group == run.config.run_name == name
    assert run.values == {"seed": 3}


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "logs", "Logs", "sweep.json", "report.html", "-rf", ".hidden", "a\\nb", " a", "x" * 130]
)
def test_a_name_that_cannot_be_a_folder_is_refused(sweep_file, name: str) -> None:
    with pytest.raises(InputError, match="name"):
        load_sweep(sweep_file(f'runs: {{"{name}": {{seed: 3}}}}\n'))


def test_null_is_the_default_of_every_name(sweep_file) -> None:
    sweep = load_sweep(sweep_file("name: null\nbaseline: ~\nrun_name: null\nexpected:"))
    assert (sweep.name, sweep.baseline, [run.name for run in sweep.runs]) == ("sweep", "sweep", ["sweep"])


@pytest.mark.parametrize("name", ["[a, b]", "{a: b}", "7", "1e-3", "true"])
def test_a_name_that_is_no_text_is_refused_and_quotes_make_it_text(sweep_file, name: str) -> None:
    for text in (f"name: {name}", f"runs: [{{name: {name}, seed: 1}}]"):
        with pytest.raises(InputError, match="name: .* is no text"):
            load_sweep(sweep_file(text))
    assert load_sweep(sweep_file(f'name: "{name}"')).name == name
    with pytest.raises(InputError, match="runs.0.name: None is no text"):
        load_sweep(sweep_file("runs: [{name: null, seed: 1}]"))


def test_listed_runs_stand_beside_the_crossed_ones(sweep_file) -> None:
    path = sweep_file(
        """
axes: {optimizer.learning_rate: [1e-3, 2e-3]}
runs:
  wide: {model: {ffn: {d_ff: 256}}, model.n_layers: 1}
unequal_budgets: true
baseline: wide
"""
    )
    sweep = load_sweep(path)
    assert [run.name for run in sweep.runs] == ["learning_rate0.001", "learning_rate0.002", "wide"]
    assert sweep.baseline == "wide"
    assert sweep.runs[2].values == {"model.ffn.d_ff": 256, "model.n_layers": 1}


def test_a_member_may_extend_files_of_its_own_and_the_sweeps_own_keys_hold_for_all(sweep_file, tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("extends: base.yaml\nmodel: {ffn: {d_ff: 192}}\nmax_duration: 99")
    path = sweep_file(
        """
max_duration: 7
runs: {plain: {}, wide: {extends: wide.yaml, optimizer.learning_rate: 0.5}}
unequal_budgets: true
"""
    )
    plain, wide = load_sweep(path).runs
    assert [run.config.model.ffn.d_ff for run in (plain, wide)] == [128, 192]
    assert [run.config.max_duration for run in (plain, wide)] == [7, 7]
    assert wide.config.optimizer.learning_rate == 0.5


def test_seeds_change_the_weights_and_not_the_data_unless_the_sweep_says_so(sweep_file) -> None:
    orders = [run.config.data.seed for run in load_sweep(sweep_file("seeds: [1, 2]")).runs]
    assert orders[0] == orders[1]
    told = load_sweep(sweep_file("seeds: [1, 2]\nseeds_change_data: true")).runs
    assert [run.config.data.seed for run in told] == [1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("runs: {a: {}, b: {}}", "same config"),
        ("axes: {optimizer.learning_rate: [1e-3, 0.001]}", "called"),
        ("runs: [{name: a, seed: 1}, {name: A, seed: 2}]", "called"),
        ("seeds: [1, 1]", "twice"),
        ("axes: {seed: [1, 2]}", "use `seeds`"),
        ("axis: {seed: [1, 2]}", "did you mean 'axes'"),
        ("axes: {model.ffn.dff: [1, 2]}", "did you mean 'd_ff'"),
        ("runs: {a: {seed: 1}}\nbaseline: b", "baseline 'b' is no run"),
        ("runs: {a: {model.ffn.d_ff: 128}, b: {model.ffn.d_ff: 132}}", "budgets differ.*more"),
        ("runs: {a: {seed: 1}, b: {max_duration: 7}}", "training lengths differ"),
        ("runs: {a: {seed: 1}, b: {global_train_batch_size: 8}}", "training lengths differ"),
        ("runs: {a: {budget: {total: 131K, tolerance: 90%}}, b: {seed: 1}}", "budgets differ.*declares"),
        ("runs: {a: {budget: {non_embedding: 1M}}}", "run a"),
        ("extends: base.yaml", "mean the same"),
        ("seeds: 3", "a list of whole numbers"),
        ("axes: {optimizer.learning_rate: []}", "no values"),
        ("axes: {x: {a: {seed: 1}}, y: {b: {seed: 2}}}", "set by two axes"),
    ],
)
def test_what_makes_no_fair_sweep_is_refused_in_one_line_with_its_place(sweep_file, text: str, says: str) -> None:
    path = sweep_file(text)
    with pytest.raises(InputError, match=says) as caught:
        load_sweep(path)
    assert str(path) in str(caught.value)


def test_a_mistyped_word_of_a_sweep_is_named_by_every_command_that_reads_the_file(sweep_file) -> None:
    for wrong, meant in (
        ("axis", "axes"),
        ("run", "runs"),
        ("baselin", "baseline"),
        ("unequal_budget", "unequal_budgets"),
    ):
        path = sweep_file("").parent / "other.yaml"
        path.write_text(f"extends: base.yaml\n{wrong}: x\n")
        for load in (load_sweep, load_run_config):
            with pytest.raises(InputError) as caught:
                load(path)
            assert str(caught.value) == f"{path}:2, {wrong}: unknown key {wrong!r}; did you mean {meant!r}?"


@pytest.mark.parametrize("word", SWEEP_WORDS)
def test_a_sweep_given_as_a_config_is_told_to_be_one(sweep_file, word: str) -> None:
    path = sweep_file("").parent / "other.yaml"
    path.write_text(f"extends: base.yaml\n{word}: x\n")
    assert is_sweep_file(path)
    with pytest.raises(InputError, match="it makes a sweep"):
        load_run_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "axes: {seed_like: {a: {}, b: {}}, optimizer.learning_rate: [@5000]}\nseeds: [1, 2]",
        "axes: {a.x: [@500], b.x: [@500], c.x: [@500], d.x: [@500]}",
        "runs:\n" + "".join(f"  r{i}: {{}}\n" for i in range(10_001)),
    ],
)
def test_a_sweep_beyond_all_use_is_refused_before_any_config_is_loaded(sweep_file, monkeypatch, text: str) -> None:
    monkeypatch.setattr("olmo_ext.config.sweep.load_run_config", None)
    values = re.sub(r"@(\d+)", lambda match: ", ".join(map(str, range(int(match[1])))), text)
    with pytest.raises(InputError, match=r"0,001 runs|20,000 runs|62,500,000,000 runs: .*at most 10,000"):
        load_sweep(sweep_file(values))


def test_unequal_budgets_run_when_the_sweep_says_so(sweep_file) -> None:
    sweep = load_sweep(sweep_file("runs: {a: {seed: 1}, b: {model.ffn.d_ff: 256}}\nunequal_budgets: true"))
    assert sweep_json(sweep)["budget_checked"] is False


def test_command_line_wins_over_the_file_but_not_over_what_the_runs_differ_in(sweep_file) -> None:
    path = sweep_file("axes: {optimizer.learning_rate: [1e-3, 2e-3]}\nmax_duration: 5")
    assert {run.config.max_duration for run in load_sweep(path, ["max_duration=2e0"]).runs} == {2}
    with pytest.raises(InputError, match="differ in"):
        load_sweep(path, ["--optimizer.learning_rate=1"])


def test_a_plain_config_is_a_sweep_of_one_run(sweep_file) -> None:
    base = sweep_file("").parent / "base.yaml"
    assert not is_sweep_file(base)
    sweep = load_sweep(base)
    assert [run.name for run in sweep.runs] == ["base"] and sweep.baseline == "base"


def test_sweep_json_reads_back_as_it_was_meant(sweep_file, tmp_path: Path) -> None:
    sweep = load_sweep(sweep_file("runs: {it's: {optimizer.learning_rate: 4e-4}}\nseeds: [1]\nname: a b"))
    write_sweep_json(sweep, tmp_path / "runs" / sweep.name)
    assert json.loads((tmp_path / "runs" / "a b" / "sweep.json").read_text()) == {
        "name": "a b",
        "baseline": "it's",
        "budget_checked": True,
        "runs": [
            {"name": "it's-s1", "group": "it's", "seed": 1, "values": {"optimizer.learning_rate": 0.0004}},
        ],
    }


def test_the_papers_figures_go_where_compare_looks_for_them(sweep_file, tmp_path: Path) -> None:
    text = "runs:\n  a: {}\nexpected: figures.yaml\n"
    with pytest.raises(InputError, match="no file"):
        load_sweep(sweep_file(text))
    (tmp_path / "figures.yaml").write_text("figures: []\n")
    write_sweep_json(load_sweep(sweep_file(text)), tmp_path / "runs")
    assert (tmp_path / "runs" / "expected.yaml").read_text() == "figures: []\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("optimizer:\n  lr: 3\n", "sweep.yaml:3, optimizer.lr"),
        ("runs:\n  a: {}\n  b:\n    model.n_layers: two\n", "sweep.yaml:5, model.n_layers"),
        ("runs:\n  a: {}\n  b:\n    model:\n      n_layers: two\n", "sweep.yaml:6, model.n_layers"),
        ("axes:\n  model.n_layers: [2, two]\n", "sweep.yaml:3, model.n_layers"),
    ],
)
def test_a_mistake_is_named_by_the_line_of_the_sweep_that_holds_it(text: str, place: str, sweep_file) -> None:
    with pytest.raises(InputError) as caught:
        load_sweep(sweep_file(text))
    assert str(caught.value.where).endswith(place)


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_sweep(sweep_file) -> None:
    with pytest.raises(InputError) as caught:
        load_sweep(sweep_file("model: {n_layers: 4}\n"), ["model.n_layers=two"])
    assert str(caught.value.where).endswith("command line, model.n_layers")
