"""A scalar is read as YAML 1.2 says, and what is written reads back."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from olmo_ext.base.errors import InputError
from olmo_ext.base.yaml_tree import Origins, dump_yaml, parse_yaml, read_scalar

LOOK_ALIKES = st.sampled_from(
    (
        "1e3",
        "4e-4",
        "on",
        "off",
        "yes",
        "no",
        "y",
        "~",
        "null",
        "Null",
        "true",
        "False",
        "12:30:00",
        "2001-01-01",
        "007",
    )
    + (
        "1_000",
        "0x10",
        "0b1",
        ".5",
        "5.",
        "+1",
        "-0",
        ".inf",
        ".nan",
        "<<",
        "=",
        "",
        " ",
        "- a",
        "a: b",
        "# a",
        "1e999",
    )
)
TEXT = LOOK_ALIKES | st.from_regex(r"\A[-+.0-9eE_:xTn~]{0,8}\Z") | st.text(st.characters(exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | FLOATS | TEXT
KEYS = TEXT.filter(lambda key: key != "<<")
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("~", None), ("null", None), ("true", True), ("FALSE", False), ("7", 7), ("-12", -12), ("0", 0)]
    + [("4e-4", 4e-4), ("1e3", 1000.0), (".5", 0.5), ("5.", 5.0), ("1.5", 1.5), ("+1.5", 1.5), ("-0.0", 0.0)]
    + [
        (text, text)
        for text in (
            "yes",
            "no",
            "on",
            "off",
            "12:30:00",
            "1_000",
            "007",
            "+5",
            "-0",
            "0x10",
            "0o7",
            "2.5B",
            "2001-01-01",
        )
        + (".inf", ".nan", "<<", "=", "nUll", "e3", ".", "1e", "a b", "a: b # c", "-", "2001-01-01")
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(text: str, value: object) -> None:
    read = [read_scalar(text)]
    if text != "a: b # c" and text != "-":
        read += [parse_yaml(f"key: {text}", name="f")["key"], *parse_yaml(f"[{text or 'null'}]", name="f")]
    assert all(item == value and type(item) is type(value) for item in read)
    if text:
        assert parse_yaml(f"'{text}'", name="f") == text


@pytest.mark.parametrize(
    "text", ["9007199254740993.0", "0.1234567890123456789", "1e999", "1e-999", "1e99999999999999999999", "9" * 5000]
)
def test_a_number_that_no_float_holds_stays_the_text_that_was_written(text: str) -> None:
    assert read_scalar(text) == text


@given(TREES)
def test_what_is_written_reads_back_to_the_same_values(tree: object) -> None:
    for layout in ({}, {"width": 2**16}, {"default_flow_style": None, "width": 110}):
        text = dump_yaml(tree, **layout)
        # `repr` tells 1 from 1.0 and from true.
        assert repr(parse_yaml(text, name="f")) == repr(tree)
        assert repr(yaml.safe_load(text)) == repr(tree)


def test_every_key_knows_its_line() -> None:
    origins: Origins = {}
    parse_yaml("a: 1\nb:\n  - {c: 2}\n  - 3\n", name="x.yaml", origins=origins)
    assert origins == {"a": "x.yaml:1", "b": "x.yaml:3", "b.0": "x.yaml:3", "b.0.c": "x.yaml:3", "b.1": "x.yaml:4"}


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2", "a: !!python/name:os.system", "a: !!timestamp 2001-01-01", "a: !!int x", "a: !!null x", "a: !x y"]
    + ["a: !!set {b}", "<<: {a: 1}", "a: &a [*a]", "a: &a {}\n<<: *a"]
    + ["a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(9))],
)
def test_what_is_no_plain_yaml_is_refused_in_one_line_with_its_place(text: str) -> None:
    with pytest.raises(InputError, match=r"^x\.yaml(:\d+)?: ") as error:
        parse_yaml(text, name="x.yaml")
    assert "\n" not in str(error.value)
