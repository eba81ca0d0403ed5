"""One name has one class, and a wrong name is told the right one."""

from __future__ import annotations

import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.registry import Registry


class Round:
    name = "round"


class Square:
    name = "square"


@pytest.fixture
def shapes() -> Registry:
    registry: Registry = Registry("shape", "model.shape")
    registry.add(Square)
    registry.add(Round)
    return registry


def test_names_are_sorted_and_entries_stand_in_the_order_of_registration(shapes: Registry) -> None:
    assert list(shapes) == ["round", "square"] and "square" in shapes
    assert [type(entry) for entry in shapes.entries()] == [Square, Round]


def test_a_name_that_another_class_has_is_refused(shapes: Registry) -> None:
    other = type("Round", (), {"name": "round", "__module__": "another.module"})
    with pytest.raises(InputError, match="shape 'round' is registered twice, by .*test_registry and another.module"):
        shapes.add(other)
    assert type(shapes.get("round")) is Round


def test_a_module_that_is_imported_again_replaces_its_own(shapes: Registry) -> None:
    again = type("Round", (), {"name": "round", "__module__": Round.__module__})
    shapes.add(again)
    assert type(shapes.get("round")) is again


def test_an_unknown_name_is_told_the_nearest_and_all(shapes: Registry) -> None:
    with pytest.raises(InputError, match="model.shape: unknown shape 'sqare'; did you mean 'square'."):
        shapes.get("sqare")
    with pytest.raises(InputError, match="file.yaml: unknown shape 'x'; known: round, square; .*`plugins:`"):
        shapes.get("x", where="file.yaml")
