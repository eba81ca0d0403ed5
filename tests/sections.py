"""Configs for tests of functions that take a run's sections, without the checks of a whole run."""

from __future__ import annotations

from typing import Any

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.schema import coerce_class


def typed(values: dict[str, Any]) -> TrainConfig:
    """The config of these keys, everything else at its default."""
    return coerce_class(TrainConfig, values, key="", origins={}, options={})
