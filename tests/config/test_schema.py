"""The generated schema is ai2-olmo's, and one value has one type whatever way it came."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from olmo_ext.base import upstream_sections
from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.base.yaml_tree import parse_yaml, read_scalar
from olmo_ext.config.schema import CONVERTERS, SECTIONS, coerce, coerce_class, load_schema, parse_duration

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", CONVERTERS)
@pytest.mark.parametrize("value", [{"form": "lmm"}, [["lmm"]]], ids=["mapping", "nested list"])
def test_a_value_that_is_no_single_one_is_named(kind: str, value: object) -> None:
    with pytest.raises(InputError, match="lmm"):
        coerce(value, {"type": kind, "optional": True}, key="key", origins={})


def test_the_sections_of_upstream_are_those_of_the_installed_one() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate_upstream_sections.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.build_module()


def test_our_sections_change_no_type_of_upstreams() -> None:
    """Names and types are OLMo's, except where a section holds more, a time limit is read from `1:30:00`, or a registry
    stands for an enumeration."""
    widened = {
        "TrainConfig": {"model", "data", "evaluators", "scheduler", "wandb", "time_limit"},
        "EvaluatorConfig": {"data"},
        "SchedulerConfig": {"name"},
    }
    for name, cls in SECTIONS.items():
        theirs = getattr(upstream_sections, name, None)
        if theirs is not None:
            types = {field.name: field.type for field in dataclasses.fields(cls)}
            differing = {field.name for field in dataclasses.fields(theirs) if types[field.name] != field.type}
            assert differing == widened.get(name, set()), name


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("float", "4e-4", 4e-4),
        ("number", "2e3", 2000),
        ("number", "0.5", 0.5),
        ("int", "1e3", 1000),
        ("int", "10_000", 10_000),
        ("int", "2.5B", 2_500_000_000),
        ("duration", "1e3", 1000),
        ("duration", "2.5BT", "2500000000T"),
        ("duration", "2e12T", "2000000000000T"),
        ("duration", "2ep", "2ep"),
        ("seconds", "12:30:00", 45000.0),
        ("seconds", "1-00:00:00", 86400.0),
        ("fraction", "0.5%", 0.005),
        ("bool", "true", True),
    ],
)
def test_a_value_reads_the_same_from_file_quotes_and_command_line(kind: str, text: str, value: object) -> None:
    entry = {"type": kind, "optional": True}
    for written in (text, read_scalar(text), parse_yaml(f"key: {text}", name="f")["key"]):
        read = coerce(written, entry, key="key", origins={})
        assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("int", "1365.33"),
        ("int", "true"),
        ("int", "abc"),
        ("duration", "2.5B"),
        ("duration", "1.5ep"),
        ("duration", "10000t"),
        ("float", "nan"),
        ("float", "fast"),
        ("bool", "1"),
        ("bool", "yes"),
        ("seconds", "soon"),
        ("int", "null"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_key(kind: str, text: str) -> None:
    with pytest.raises(InputError, match="model.d_ff"):
        coerce(read_scalar(text), {"type": kind, "optional": False}, key="model.d_ff", origins={})


def test_an_unknown_key_names_the_nearest_known_one_and_its_line() -> None:
    origins: dict[str, str] = {}
    tree = parse_yaml("model:\n  d_model: 64\n  n_layer: 2\n", name="x.yaml", origins=origins)
    with pytest.raises(InputError, match=r"x\.yaml:3, model\.n_layer: unknown key 'n_layer'; did you mean 'n_layers'"):
        coerce_class(TrainConfig, tree, key="", origins=origins, options={})


@pytest.mark.parametrize("text", ["model: [", "a: 1\na: 2", "a: !!python/object:os.system x", "<<: {a: 1}", "- 1: {"])
def test_text_that_is_no_plain_yaml_is_one_line(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_yaml(text, name="x.yaml")
    assert "\n" not in str(error.value) and "x.yaml" in str(error.value)


@pytest.mark.parametrize("text", ["1e3", "0.50", "true", "True", "FALSE", "1.0"])
def test_text_that_reading_could_change_is_refused_until_it_stands_in_quotes(text: str) -> None:
    entry = {"type": "str", "optional": False}
    with pytest.raises(InputError, match="^run_name: .* is no text; write it in quotes") as error:
        coerce(read_scalar(text), entry, key="run_name", origins={})
    assert "\n" not in str(error.value)
    assert coerce(parse_yaml(f'"{text}"', name="f"), entry, key="run_name", origins={}) == text


@pytest.mark.parametrize("text", ["7", "-12", "0", "007", "+5", "1_000", "0x10", "12:30:00", "on", "2.5B"])
def test_text_that_reads_in_one_way_only_needs_no_quotes(text: str) -> None:
    assert coerce(read_scalar(text), {"type": "str", "optional": False}, key="run_name", origins={}) == text


def test_dropout_is_zero_and_the_entity_is_nobodys_unless_said() -> None:
    values = coerce_class(TrainConfig, {"wandb": {}}, key="", origins={}, options={})
    model, wandb = values.model, values.wandb
    assert (model.attention_dropout, model.residual_dropout, model.embedding_dropout) == (0.0, 0.0, 0.0)
    assert wandb is not None and wandb.entity is None and wandb.tags == []


def test_every_default_is_of_its_own_type() -> None:
    for name, fields in load_schema()["classes"].items():
        for key, entry in fields.items():
            if "default" in entry and entry["default"] is not None and not entry["type"].startswith("class:"):
                assert coerce(entry["default"], entry, key=f"{name}.{key}", origins={}) == entry["default"]


def test_durations_are_canonical() -> None:
    assert [parse_duration(text) for text in (7, "7", "7T", "7 ep")] == [7, 7, "7T", "7ep"]
