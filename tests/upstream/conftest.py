"""The same children and tiny runs as the tests of training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "training/conftest.py"
_SPEC = importlib.util.spec_from_file_location("training_fixtures", _PATH)
assert _SPEC and _SPEC.loader
_FIXTURES = importlib.util.module_from_spec(_SPEC)
sys.modules["training_fixtures"] = _FIXTURES
_SPEC.loader.exec_module(_FIXTURES)
for _name in ("heavy", "forked", "on_ranks", "tokens", "config", "metric_rows", "sample_ids", "same_checkpoint"):
    globals()[_name] = getattr(_FIXTURES, _name)
