"""The equal-budget search: exact against brute force, the papers' shapes from their constraints."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import differing_keys, load_run_config
from olmo_ext.config.sweep import load_sweep
from olmo_ext.shapes.counts import count
from olmo_ext.shapes.taper import Taper
from olmo_ext.solve.infeasible import obstacles
from olmo_ext.solve.problem import Problem, shape_of
from olmo_ext.solve.search import search
from olmo_ext.solve.solve_command import Written, mega, solve

M = 1_000_000


def problem(**stated) -> Problem:
    return Problem(**{"quantity": "non_embedding", "target": 113_250_000, **stated})


def shapes(result):
    return [(s.layers, s.d_model, s.num_sub_mlps, s.d_ff) for s in result.solutions]


def printed(millions: float, digits: int) -> tuple[float, float]:
    half = 0.5 * 10**-digits
    return (millions - half) * M, (millions + half) * M


@pytest.mark.parametrize("quantity", ["non_embedding", "total", "training_flops_per_token"])
@pytest.mark.parametrize("taper", [None, Taper(schedule="cosine", start=1.5, end=0.5, multiple_of=8)])
@pytest.mark.parametrize("attention", ["softmax", "gated", "titans"])
def test_the_search_finds_exactly_what_trying_every_shape_finds(quantity, taper, attention):
    target = {"non_embedding": 500_000, "total": 600_000, "training_flops_per_token": 4_000_000}[quantity]
    asked = problem(
        quantity=quantity,
        target=target,
        tolerance=0.02,
        layers=(2, 3, 5),
        d_model=(48, 64, 96),
        num_sub_mlps=(1, 3),
        head_dim=(16,),
        multiple_of=8,
        ffn_type="hourglass",
        attention_type=attention,
        attention_options={
            "softmax": {},
            "gated": {"gate": "headwise", "gate_scale": 1.0, "gate_init": "normal"},
            "titans": {"chunk_size": 8, "persistent_tokens": 12},
        }[attention],
        embedding_size=512,
        max_sequence_length=64,
        taper=taper,
    )
    found = search(asked, limit=10_000)
    widths = range(8, 4000, 8)
    expected = {}
    one = found.solutions[0]
    for layers, d_model, subs, d_ff in itertools.product(asked.layers, asked.d_model, asked.num_sub_mlps, widths):
        candidate = type(one)(
            layers=layers, d_model=d_model, num_sub_mlps=subs, d_ff=d_ff, heads=d_model // 16, head_dim=16,
            attention=0, ffn=0, actual=0, deviation=0,
        )  # fmt: skip
        try:
            actual = getattr(count(shape_of(asked, candidate)), quantity)
        except ValueError:
            continue
        if abs(actual - target) <= 0.02 * target + 1e-6:
            expected[layers, d_model, subs, d_ff] = actual
    assert len(expected) > 5
    assert {(s.layers, s.d_model, s.num_sub_mlps, s.d_ff): s.actual for s in found.solutions} == expected
    assert found.num_feasible == len(expected)
    deviations = [abs(s.deviation) for s in found.solutions]
    assert (
        deviations == sorted(deviations) or max(a - b for a, b in zip(deviations, deviations[1:], strict=False)) < 1e-7
    )


def test_45m_attention_68m_ffn_with_four_sub_mlps_in_six_layers():
    found = search(
        problem(
            layers=(6,), num_sub_mlps=(4,), d_model=tuple(range(1024, 2049, 8)), multiple_of=2, ffn_type="hourglass",
            attention=printed(45, 0), ffn=printed(68, 0), heads=(12, 16),
        ),
        limit=500,
    )  # fmt: skip
    assert {s.d_model for s in found.solutions} == {1368, 1376}
    assert (6, 1376, 4, 688) in shapes(found) and (6, 1368, 4, 694) in shapes(found)
    assert all(44.5 * M <= s.attention <= 45.5 * M and 67.5 * M <= s.ffn <= 68.5 * M for s in found.solutions)


def test_66m_attention_47m_ffn_with_two_sub_mlps():
    found = search(
        problem(
            tolerance=0.007, layers=tuple(range(4, 13)), num_sub_mlps=(2,), d_model=tuple(range(1024, 2049, 32)),
            multiple_of=1, ffn_type="hourglass", attention=printed(66, 0), ffn=printed(47, 0),
        ),
        limit=5000,
    )  # fmt: skip
    for expected in ((10, 1280, 2, 612), (8, 1440, 2, 680), (7, 1536, 2, 729), (6, 1664, 2, 785)):
        assert expected in shapes(found)


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "attention", "ffn", "d_model", "d_ff"),
    [
        (12, 16, 96, 184.0, 724.6, 2496, 2016),
        (18, 24, 128, 817.5, 2350.3, 3696, 2944),
        (22, 32, 128, 1799.4, 5988.5, 4992, 4544),
    ],
)
def test_v2s_released_shapes_are_the_only_ones_with_their_counts(
    layers, heads, head_dim, attention, ffn, d_model, d_ff
):
    found = search(
        problem(
            target=round((attention + ffn) * M), layers=(layers,), num_sub_mlps=(4,), ffn_type="hourglass",
            d_model=tuple(range(1024, 8193, 16)), heads=(heads,), head_dim=(head_dim,),
            attention=printed(attention, 1), ffn=printed(ffn, 1),
        )
    )  # fmt: skip
    assert shapes(found) == [(layers, d_model, 4, d_ff)]


def test_swiglu_at_the_size_of_a_two_matrix_ffn_of_four_widths_is_eight_thirds():
    gelu = count(
        load_run_config(
            {
                "model": {
                    "d_model": 1024, "n_layers": 32, "n_heads": 16, "activation_type": "gelu", "ffn": {"d_ff": 4096},
                    "rope": True, "include_bias": False,
                }
            }
        ).shape
    )  # fmt: skip
    found = search(problem(target=gelu.non_embedding, layers=(32,), d_model=(1024,), multiple_of=1))
    assert found.solutions[0].d_ff == round(8 / 3 * 1024) == 2731
    aligned = search(problem(target=gelu.non_embedding, layers=(32,), d_model=(1024,), multiple_of=16))
    assert 2736 in [s.d_ff for s in aligned.solutions]


def test_infeasible_names_each_constraint_in_the_way_and_the_nearest_value_that_works():
    asked = problem(layers=(6,), num_sub_mlps=(4,), d_model=(1024,), attention=printed(45, 0), ffn_type="hourglass")
    assert not search(asked).solutions
    found = {item.name: item for item in obstacles(asked)}
    assert set(found) == {"attention", "d_model"}
    assert found["attention"].nearest == 6 * 4 * 1024**2
    assert found["d_model"].nearest == 1376  # 24 d^2 reaches 44.5M at 1362: the next multiple of 16 is 1376
    assert search(problem(**{**vars_of(asked), "d_model": (1376,)})).solutions


def vars_of(asked: Problem) -> dict:
    names = ("layers", "num_sub_mlps", "attention", "ffn_type")
    return {name: getattr(asked, name) for name in names}


def test_infeasible_by_tolerance_gives_the_smallest_deviation_there_is():
    asked = problem(layers=(12,), d_model=(768,), multiple_of=512, tolerance=0.0)
    found = {item.name: item for item in obstacles(asked)}
    best = min(abs(12 * (4 * 768**2 + 3 * 768 * d_ff) / 113_250_000 - 1) for d_ff in range(512, 8192, 512))
    assert found["tolerance"].nearest == pytest.approx(best)


def invoke(*arguments: str):
    return CliRunner().invoke(solve, arguments, catch_exceptions=True)


def test_infeasible_is_one_line_with_exit_code_2():
    result = invoke(
        "--non-embedding", "113.25M", "--layers", "6", "--sub-mlps", "4", "--attention", "45M", "--d-model", "1024"
    )
    assert isinstance(result.exception, InputError) and result.exception.exit_code == 2
    message = str(result.exception)
    assert "--attention or --d-model alone is in the way" in message and "--d-model 1,376" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no budget given"),
        (["--non-embedding", "1M", "--total", "2M"], "--non-embedding and --total given"),
        (["--non-embedding", "abc"], "--non-embedding"),
        (["--non-embedding", "1M", "--layers", "4..2"], "--layers"),
        (["--non-embedding", "1M", "--head-dim", "43"], "--head-dim"),
        (["--non-embedding", "1M", "--ratio", "0.8..0.4"], "--ratio"),
        (["--non-embedding", "1M", "--attention-share", "0"], "--attention-share: '0' is no share"),
        (["--non-embedding", "1M", "--attention-share", "30%..130%"], "--attention-share"),
        (["--non-embedding", "1M", "--taper", "cosin:1.5:0.5"], "--taper"),
        (["--non-embedding", "1M", "--attention-type", "sofmax"], "did you mean 'softmax'"),
        (["--non-embedding", "1M", "--attention-option", "gates=x"], "--attention-option"),
        (["--non-embedding", "1M", "--ffn-type", "hope", "--ffn-option", "period=4"], "--ffn-option: 'period=4'"),
        (["--non-embedding", "1M", "--ffn-option", "rank=4"], "no option of 'conventional'; known: none"),
    ],
)
def test_bad_options_are_named(arguments, words):
    result = invoke(*arguments)
    assert isinstance(result.exception, InputError)
    assert words in str(result.exception)


BASE = """
model:
  {rope: true, include_bias: false, weight_tying: false, attention_layer_norm: true,
   vocab_size: 512, embedding_size: 512, max_sequence_length: 64}
optimizer: {name: adamw, learning_rate: 1e-3}
max_duration: 10
"""
SMALL = ("--non-embedding", "1M", "--layers", "2..6", "--d-model", "64..256:32", "--embedding-size", "512")
SMALL += ("--sequence-length", "64")


def test_yaml_and_sweep_that_are_written_load_and_keep_the_budget(tmp_path):
    from olmo_ext.config.sweep import load_sweep

    base = tmp_path / "base.yaml"
    base.write_text(BASE)
    run, sweep = tmp_path / "out/run.yaml", tmp_path / "out/sweep.yaml"
    extra = (
        "--sub-mlps",
        "2",
        "--taper",
        "cosine:1.5:0.5",
        "--attention-type",
        "gated",
        "--head-dim",
        "32",
        "--top",
        "4",
    )
    result = invoke(*SMALL, *extra, "--base", str(base), "--yaml", str(run), "--sweep", str(sweep))
    assert result.exit_code == 0, result.output
    config = load_run_config(run)
    assert abs(config.budget_report.deviation) <= 0.005
    assert config.shape.layers[0].ffn.num_sub_mlps == 2 and config.shape.layers[0].attention.type == "gated"
    assert config.shape.layers[0].ffn.d_ff > config.shape.layers[-1].ffn.d_ff
    loaded = load_sweep(sweep)
    assert len(loaded.groups) == 4 and len(loaded.runs) == 12
    assert loaded.runs[0].config.shape == config.shape
    again = invoke(*SMALL, *extra, "--base", str(base), "--yaml", str(run))
    assert "exists" in str(again.exception)
    baseless = invoke(*SMALL, "--base", str(tmp_path / "none.yaml"), "--yaml", str(tmp_path / "other.yaml"))
    assert "--base" in str(baseless.exception) and not (tmp_path / "other.yaml").exists()


def test_json_has_every_count_of_the_shape_and_a_config_that_makes_it():
    result = invoke(*SMALL, "--json", "--top", "3")
    rows = json.loads(result.output)["solutions"]
    assert len(rows) == 3
    for row in rows:
        base = yaml.safe_load(BASE)
        base["model"].update(row["config"]["model"])
        config = load_run_config({**base, "budget": row["config"]["budget"]})
        assert config.counts.parameters() == row["parameters"]
        assert config.counts.training_flops_per_token == row["flops_per_token"]["training"]


TITANS = ("--attention-type", "titans", "--attention-option")
HOPE = ("--sub-mlps", "2", "--ffn-type", "hope", "--ffn-option")


@pytest.mark.parametrize(
    ("section", "named", "key", "value"),
    [
        *(("attention", TITANS, "form", form) for form in ("mag", "foo")),
        *(("attention", TITANS, *pair) for pair in (("window", "-5"), ("chunk_size", "-4"), ("value_norm", "maybe"))),
        ("attention", TITANS, "memory_depth", "deep"),
        *(("ffn", HOPE, "update_periods", periods) for periods in ("[0]", "[1, two]", "1,4")),
        ("ffn", HOPE, "composition", "both"),
    ],
)
def test_an_option_that_no_shape_satisfies_is_refused_as_in_a_config(section, named, key, value):
    solved = invoke(*SMALL, *named, f"{key}={value}")
    kind = named[1] if section == "attention" else named[3]
    tree = yaml.safe_load(BASE)
    tree["model"] |= {"d_model": 128, "n_layers": 2, "n_heads": 4, section: {"type": kind}}
    if section == "ffn":
        tree["model"][section]["num_sub_mlps"] = 2
    with pytest.raises(InputError) as planned:
        load_run_config(tree, [f"model.{section}.{key}={value}"])
    assert isinstance(solved.exception, InputError) and solved.exception.exit_code == 2
    assert f"--{section}-option" in str(solved.exception)
    assert planned.value.what in str(solved.exception) and solved.exception.what == planned.value.what


def test_an_option_that_some_shapes_satisfy_is_a_constraint():
    without = invoke(*SMALL, "--ffn-type", "hope", "--ffn-option", "update_periods=[1,4]")
    assert "--sub-mlps alone is in the way; nearest feasible: --sub-mlps 2" in str(without.exception)
    several = invoke(
        *SMALL, "--ffn-type", "hope", "--ffn-option", "update_periods=[1,4]", "--sub-mlps", "1..4", "--json"
    )
    assert {row["num_sub_mlps"] for row in json.loads(several.output)["solutions"]} == {2}
    single = invoke(*SMALL, "--ffn-type", "conventional", "--sub-mlps", "2")
    assert "nearest feasible: --sub-mlps 1" in str(single.exception)
    heads = invoke(*SMALL, *TITANS, "memory_heads=7", "--json")
    assert {row["d_model"] % 7 for row in json.loads(heads.output)["solutions"]} == {0}
    shared = invoke(*SMALL, "--attention-type", "titans", "--kv-heads", "2")
    assert "(attention: n_kv_heads 2 belongs to the forms with attention, mag and mal)" in str(shared.exception)


def test_a_width_that_an_ffn_type_refuses_is_no_shape(monkeypatch):
    from olmo_ext.shapes.registry import FFN_TYPES
    from olmo_ext.shapes.types.conventional import MLPType

    class Thirds(MLPType):
        name = "test-thirds"

        def check(self, spec, d_model):
            return None if all(width % 3 == 0 for width in spec.d_ff) else "d_ff is no multiple of 3"

    monkeypatch.setitem(FFN_TYPES._types, Thirds.name, Thirds())
    plain = problem(target=M, tolerance=0.05, layers=(3, 4), d_model=(64, 96), multiple_of=8)
    for taper in (None, Taper(schedule="cosine", start=1.5, end=0.5, multiple_of=8)):
        free, found = (
            search(replace(plain, taper=taper, ffn_type=kind), limit=1000) for kind in ("hourglass", "test-thirds")
        )
        kept = [
            item
            for item in free.solutions
            if all(
                width % 3 == 0
                for layer in shape_of(replace(plain, taper=taper), item).layers
                for width in layer.ffn.d_ff
            )
        ]
        assert list(found.solutions) == kept and found.num_feasible == len(kept) < free.num_feasible
        assert kept or taper


def test_options_that_are_written_are_typed_and_load(tmp_path):
    base, run = tmp_path / "base.yaml", tmp_path / "run.yaml"
    base.write_text(BASE)
    options = ("form=mag", "window=16", "value_norm=false", "memory_ratio=1", "chunk_size=8")
    named = [word for option in options for word in ("--attention-option", option)]
    named += ["--attention-type", "titans", *HOPE, "update_periods=[1, 4]"]
    result = invoke(*SMALL, *named, "--base", str(base), "--yaml", str(run))
    assert result.exit_code == 0, result.exception
    layer = load_run_config(run).shape.layers[0]
    assert layer.ffn.options == {"update_periods": [1, 4], "composition": "sequential"}
    wanted = {"form": "mag", "window": 16, "value_norm": False, "memory_ratio": 1.0, "chunk_size": 8}
    assert {key: layer.attention.options[key] for key in wanted} == wanted


def like(path, **model):
    tree = yaml.safe_load(BASE)
    tree["model"] |= {"d_model": 128, "n_layers": 4, "n_heads": 4, **model}
    path.write_text(yaml.safe_dump(tree))
    return ("--like", str(path), "--layers", "3..5", "--d-model", "128", "--tolerance", "5%", "--json")


def solved(*arguments: str) -> dict:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)["solutions"][0]["config"]["model"]


def test_like_takes_what_its_layers_share_unless_it_is_named(tmp_path):
    hope = {"type": "hope", "d_ff": 256, "num_sub_mlps": 2, "update_periods": [1, 4]}
    mag = {"type": "titans", "form": "mag", "window": 16, "chunk_size": 8}
    given = like(tmp_path / "one.yaml", ffn=hope, attention=mag, activation_type="gelu")
    taken = solved(*given)
    assert taken["activation_type"] == "gelu"
    assert {key: taken["ffn"][key] for key in ("type", "num_sub_mlps", "update_periods")} == {
        "type": "hope", "num_sub_mlps": 2, "update_periods": [1, 4],
    }  # fmt: skip
    assert {key: taken["attention"][key] for key in mag} == mag
    one = solved(*given, "--attention-type", "titans", "--attention-option", "window=32", "--ffn-option",
                 "update_periods=[4,1]", "--activation", "swiglu")  # fmt: skip
    assert one["attention"]["window"] == 32 and one["attention"]["chunk_size"] == 8
    assert one["ffn"]["update_periods"] == [4, 1] and one["activation_type"] == "swiglu"
    other = solved(*given, "--attention-type", "softmax", "--ffn-type", "conventional")
    assert other["attention"] == {"type": "softmax"} and other["ffn"].keys() == {"type", "d_ff"}
    mixed = like(tmp_path / "two.yaml", ffn={"d_ff": 512}, attention={**mag, "type": ["titans", "softmax"] * 2})
    assert solved(*mixed)["attention"] == {"type": "softmax"}
    assert solved(*mixed, "--sub-mlps", "2")["ffn"]["type"] == "hourglass"


def test_millions_keep_three_digits():
    assert [mega(flops) for flops in (4.0512e6, 40.512e6, 405.12e6, 4.0512e9, 123_456)] == [
        "4.05", "40.5", "405", "4,051", "0.123",
    ]  # fmt: skip
    assert re.search(r" \d\.\d\d$", invoke(*SMALL, "--top", "1").output.splitlines()[1])


def test_a_budget_can_be_that_of_a_config(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(BASE + "run_name: one\n")
    text = BASE.replace("{rope: true", "{rope: true, d_model: 128, n_layers: 4, n_heads: 4, ffn: {d_ff: 512}")
    path.write_text(text)
    result = invoke("--like", str(path), "--layers", "4", "--d-model", "128", "--json", "--embedding-size", "512")
    assert json.loads(result.output)["solutions"][0]["d_ff"] == 512


def test_what_is_written_like_a_config_extends_it_keeps_the_rest_and_names_every_change(tmp_path):
    original = Path("configs/tapered/440m-wider-early.yaml")
    run, sweep = tmp_path / "one.yaml", tmp_path / "sweep.yaml"
    shape = ("--layers", "24", "--d-model", "1024..1536", "--taper", "cosine:1.5:0.5", "--multiple-of", "64")
    result = invoke("--like", str(original), *shape, "--yaml", str(run), "--sweep", str(sweep), "--top", "2")
    assert result.exit_code == 0, result.exception
    theirs, ours = load_run_config(original).plain(), load_run_config(run).plain()
    changed = set(re.findall(r"^# Changes ([\w.]+):", run.read_text(), re.M))
    assert changed == {change.split(":")[0] for change in differing_keys(ours, theirs)} - {"run_name"}
    kept = ("optimizer", "scheduler", "max_duration", "evaluators", "tokenizer", "data", "global_train_batch_size")
    assert {key: ours[key] for key in kept} == {key: theirs[key] for key in kept}
    assert ours["model"]["weight_tying"] is theirs["model"]["weight_tying"] is True
    assert ours["model"]["ffn"]["taper"]["groups"] is None and "model.ffn.taper.groups" in changed
    assert len(load_sweep(sweep).runs) == 6


def test_a_shape_of_another_type_than_the_config_leaves_none_of_its_options(tmp_path):
    hope = {"type": "hope", "d_ff": 256, "num_sub_mlps": 2, "update_periods": [1, 4]}
    given = like(tmp_path / "one.yaml", ffn=hope, attention={"type": "titans", "form": "mag", "window": 16})
    plain = ("--ffn-type", "conventional", "--attention-type", "softmax", "--untied", "--sub-mlps", "1")
    assert invoke(*given[:-1], *plain, "--yaml", str(tmp_path / "two.yaml")).exit_code == 0
    config = load_run_config(tmp_path / "two.yaml")
    assert {layer.ffn.type for layer in config.shape.layers} == {"conventional"}
    assert {layer.attention.type for layer in config.shape.layers} == {"softmax"}
    assert yaml.safe_load((tmp_path / "two.yaml").read_text())["model"]["weight_tying"] is False


@pytest.mark.parametrize("key", ["include_bias", "embedding_layer_norm"])
def test_a_total_that_would_be_reckoned_otherwise_than_the_configs_is_refused(key, tmp_path):
    path = tmp_path / "one.yaml"
    body = "{rope: true, d_model: 128, n_layers: 4, n_heads: 4, ffn: {d_ff: 512}, "
    text = BASE.replace("{rope: true, ", body)
    text = text.replace("include_bias: false", "include_bias: false, embedding_layer_norm: false")
    text = text.replace(f"{key}: false", f"{key}: true")
    path.write_text(text + "budget: {total: 1M, tolerance: 1}\n")
    result = invoke("--like", str(path), "--layers", "4", "--d-model", "128")
    assert f"model.{key}: a budget of all parameters" in str(result.exception)
    path.write_text(text)
    assert invoke("--like", str(path), "--layers", "4", "--d-model", "128").exit_code == 0


def test_parameters_beside_matrices_of_a_type_of_ones_own_count_in_a_total(monkeypatch):
    from olmo_ext.shapes.registry import FFN_TYPES
    from olmo_ext.shapes.types.conventional import MLPType

    class Scaled(MLPType):
        name = "test-scaled"

        def vector_parameters(self, d_model, d_ff, spec):
            return 7 * d_ff + d_model

    monkeypatch.setitem(FFN_TYPES._types, Scaled.name, Scaled())
    asked = problem(quantity="total", target=M, tolerance=0.05, layers=(3, 4), d_model=(64, 128), num_sub_mlps=(1, 2))
    asked = replace(asked, ffn_type="test-scaled", embedding_size=512)
    found = search(asked).solutions
    assert len(found) > 5 and all(item.actual == count(shape_of(asked, item)).total for item in found)


def test_a_type_of_ones_own_is_searched_by_its_own_matrices(monkeypatch):
    from olmo_ext.shapes.registry import FFN_TYPES, FFNType

    class Bottleneck(FFNType):
        name = "test-bottleneck"
        single = True

        def matrices(self, d_model, d_ff, spec):
            return [(d_ff, d_model), (d_ff, d_ff // d_ff * 32), (d_model, d_ff)]

        def build(self, d_model, d_ff, spec, config):
            raise NotImplementedError

    monkeypatch.setitem(FFN_TYPES._types, Bottleneck.name, Bottleneck())
    found = search(problem(target=M, tolerance=0.01, layers=(4,), d_model=(128,), ffn_type="test-bottleneck"))
    best = found.solutions[0]
    assert best.ffn == 4 * (2 * 128 + 32) * best.d_ff


def test_what_is_written_names_the_modules_that_register_its_types(tmp_path):
    (tmp_path / "of_the_base.py").write_text("")
    (tmp_path / "base.yaml").write_text("plugins: [of_the_base]\n" + BASE)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "fixtures"), "PYTHONSAFEPATH": "1"}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "olmo_ext", *arguments]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)

    own = ("--plugin", "low_rank_ffn", "--ffn-type", "low_rank", "--top", "2")
    for asked, file, sweep in (
        (own, "a.yaml", "a-sweep.yaml"),
        (("--like", "a.yaml", "--top", "2"), "b.yaml", "b-sweep.yaml"),
    ):
        budget = SMALL if asked is own else ("--layers", "2..6", "--d-model", "64..256:32")
        result = command("solve", *budget, *asked, "--base", "base.yaml", "--yaml", file, "--sweep", sweep)
        assert result.returncode == 0, result.stderr
        for written in (file, sweep):
            assert yaml.safe_load((tmp_path / written).read_text())["plugins"] == ["of_the_base", "low_rank_ffn"]
            planned = command("plan", written)
            assert planned.returncode == 0, planned.stderr
    plain = command("solve", *SMALL, "--base", "base.yaml", "--yaml", "plain.yaml")
    assert plain.returncode == 0 and "plugins" not in yaml.safe_load((tmp_path / "plain.yaml").read_text())


def test_texts_name_their_base_relative_to_where_they_lie(tmp_path):
    asked = problem(target=M, layers=(4,), d_model=(128,), multiple_of=1)
    found = search(asked, limit=2)
    text = Written(base=tmp_path / "base/x.yaml").run(asked, found.solutions[0], folder=tmp_path / "runs")
    assert yaml.safe_load(text)["extends"] == "../base/x.yaml"
    tree = yaml.safe_load(Written(base=tmp_path / "b.yaml").sweep(asked, found.solutions, folder=tmp_path))
    assert tree["base"] == "b.yaml" and len(tree["runs"]) == 2 and tree["baseline"] in tree["runs"]


def test_a_width_far_from_the_budgets_ideal_and_still_within_its_tolerance_is_found():
    asked = problem(target=M, tolerance=0.5, layers=(4,), d_model=(128,), multiple_of=1, d_ff=(600, 620))
    found = search(asked, limit=100)
    assert {item.d_ff for item in found.solutions} == set(range(600, 621))
