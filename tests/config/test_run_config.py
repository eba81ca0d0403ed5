"""A config resolves to one typed, checked run whatever way it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import differing_keys, load_run_config, parse_override

SMALL = """
model: {d_model: 64, n_heads: 4, n_layers: 2, vocab_size: 256, embedding_size: 256, rope: true, include_bias: false,
        weight_tying: false, max_sequence_length: 32, ffn: {d_ff: 128}}
optimizer: {name: adamw, learning_rate: 4e-4}
max_duration: 1e3
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def test_a_resolved_config_loads_alone_to_the_same_values(small: Path, tmp_path: Path) -> None:
    config = load_run_config(small, ["model.n_layers=3", "run_name=it's 50% $(id)"])
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_run_config(again).plain() == config.plain()
    assert config.run_name == "it's 50% $(id)"


def test_the_file_and_the_command_line_give_the_same_typed_value(small: Path, tmp_path: Path) -> None:
    for key, text in (
        ("optimizer.learning_rate", "3e-4"),
        ("max_duration", "2.5BT"),
        ("scheduler.t_warmup", "2e3"),
        ("time_limit", "12:30:00"),
        ("model.ffn.d_ff", "256"),
    ):
        section: dict = {}
        node = section
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = "PLACE"
        child = tmp_path / "child.yaml"
        child.write_text("extends: small.yaml\n" + yaml.safe_dump(section).replace("PLACE", text))
        for override in (f"{key}={text}", f"--{key}={text}"):
            assert load_run_config(child).plain() == {
                **load_run_config(small, [override]).plain(),
                "run_name": "child",
            }


@pytest.mark.parametrize("index", ["5", "²", "x", "-1"])
def test_an_element_that_a_list_does_not_have_is_named(index: str, small: Path) -> None:
    with pytest.raises(InputError, match="no element .* in a list of 2; 0 to 1"):
        load_run_config(small, ["optimizer.betas=[0.9, 0.95]", f"optimizer.betas.{index}=0.8"])


def test_extends_merges_deeply_and_later_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    (tmp_path / "b.yaml").write_text("model: {n_layers: 5}\nseed: 1\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nseed: 2\n")
    values = load_run_config(tmp_path / "c.yaml")
    assert (values.model.n_layers, values.model.d_model, values.seed) == (5, 64, 2)


def test_extending_oneself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(InputError, match="comes back"):
        load_run_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("model.n_layer=3", "did you mean 'n_layers'"),
        ("modle.n_layers=3", "did you mean 'model'"),
        ("model.ffn.d_ff=1365.33", r"command line, model\.ffn\.d_ff.*whole number"),
        ("model.ffn.type=hourglas", "did you mean 'hourglass'"),
        ("model.attention.gatee=headwise", "unknown key 'gatee'"),
        ("model.attention.gatee=null", "unknown key 'gatee'"),
        ("model.attention.gate=headwise", "belongs to type gated; set an inherited one to null"),
        ("model.ffn=3", "is no section"),
        ("noequals", "write key=value"),
        ("max_duration=2.5B", "2.5BT is tokens"),
        ("evaluators.3.label=x", "is not a list"),
        ("plugins=[no_such_module_anywhere]", "cannot be imported"),
        ("run_name=${oc.env:WANDB_API_KEY}", "WANDB_API_KEY would be written"),
        ("run_name=${no.such.key}", "cannot be resolved"),
        ("run_name=", "^command line, run_name: is empty; a name, or null"),
        ("run_name=' '", "^command line, run_name: is empty"),
        ("model.attention={type: titans, form: {a: 1}}", r"attention\.form: \{'a': 1\} is not a single value"),
        ("load_path=https://me:hidden@host/x", r"^command line, load_path: https://host/x was given with a user"),
        ("data.paths=[s3://a/b, https://me:hidden@host/x]", "https://host/x was given with a user or password"),
    ],
)
def test_a_bad_override_is_one_line_that_names_the_key(small: Path, override: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        load_run_config(small, [override])
    assert "\n" not in str(error.value) and "hidden" not in str(error.value)


def test_a_name_that_is_not_given_is_the_files(small: Path) -> None:
    for rest in ("", "run_name:\n", "run_name: null\n"):
        small.write_text(SMALL + rest)
        assert load_run_config(small).run_name == "small"
    assert load_run_config(small, ["run_name=null"]).run_name == "small"
    small.write_text(SMALL + 'run_name: ""\n')
    with pytest.raises(InputError, match=r"small\.yaml:\d+, run_name: is empty"):
        load_run_config(small)


def test_null_drops_an_inherited_option_of_another_type_and_is_the_default_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SMALL)
    (tmp_path / "gated.yaml").write_text("extends: a.yaml\nmodel: {attention: {type: gated, gate: headwise}}\n")
    other = load_run_config(tmp_path / "gated.yaml", ["model.attention={type: softmax, gate: null}"])
    assert other.shape.layers[0].attention == load_run_config(tmp_path / "a.yaml").shape.layers[0].attention
    own = load_run_config(tmp_path / "gated.yaml", ["model.attention.gate=null"])
    assert own.model.attention.options["gate"] == "elementwise"


def test_an_override_may_hold_any_character() -> None:
    for text in ("a b", "x,y=1", "50%", "it's", "$(id)", "a: b # c", "-", "[1, 2]"):
        key, value = parse_override(f"run_name={text}")
        assert key == "run_name" and (value == text or value == [1, 2])


def test_interpolation_reaches_other_keys(small: Path) -> None:
    values = load_run_config(small, ["save_folder=out/${run_name}"])
    assert values.save_folder == "out/small"


def test_identity_ignores_what_may_change_on_restart_and_names_what_may_not(small: Path) -> None:
    base = load_run_config(small)
    for harmless in (
        "device_train_microbatch_size=2",
        "distributed_strategy=fsdp",
        "compile={}",
        "console_log_interval=7",
        "data.num_workers=3",
        "node=b200",
    ):
        assert load_run_config(small, [harmless]).identity() == base.identity()
    for change in (
        "model.ffn.d_ff=96",
        "seed=1",
        "global_train_batch_size=8",
        "optimizer.learning_rate=1",
        "data.seed=3",
    ):
        other = load_run_config(small, [change])
        assert differing_keys(other.identity(), base.identity()) != []
        assert any(line.startswith(change.split("=")[0]) for line in differing_keys(other.identity(), base.identity()))


def test_the_order_of_the_data_does_not_follow_the_seed(small: Path) -> None:
    assert load_run_config(small, ["seed=3"]).data.seed == 6198


def test_a_budget_that_the_shape_misses_is_an_error_saying_by_how_much(small: Path) -> None:
    exact = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    load_run_config(small, [f"budget.non_embedding={exact}"])
    with pytest.raises(InputError, match="%"):
        load_run_config(small, [f"budget.non_embedding={int(exact * 1.02)}"])


def test_a_config_in_which_every_taper_had_a_steepness_still_loads() -> None:
    """`steepness: null` stood beside every schedule before it became an option of the sigmoid's."""
    path = Path(__file__).parents[2] / "examples" / "shapes" / "tapered-s1" / "config.yaml"
    assert "steepness: null" in path.read_text()
    assert load_run_config(path).model.ffn.taper.options == {}
    sigmoid = load_run_config(path, ["model.ffn.taper.schedule=sigmoid"]).model.ffn.taper
    assert sigmoid.options == {"steepness": 10.0}
