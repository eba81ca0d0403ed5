"""Small token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.helpers import VOCABULARY


@pytest.fixture
def token_files(tmp_path: Path) -> Callable[..., list[Path]]:
    """Files of given numbers of tokens, with repetitive stretches so that the filter has something to find."""

    def make(*num_tokens: int, dtype: str = "uint32", seed: int = 0, folder: str = "tokens") -> list[Path]:
        generator = np.random.default_rng(seed)
        directory = tmp_path / folder
        directory.mkdir(exist_ok=True)
        paths = []
        for number, count in enumerate(num_tokens):
            tokens = generator.integers(2, VOCABULARY, count).astype(dtype)
            for start in range(0, count, 700):
                tokens[start : start + 120] = 7
            tokens[:: max(count // 9, 1)] = 0
            path = directory / f"part-{number:02d}.npy"
            tokens.tofile(path)
            paths.append(path)
        return paths

    return make
