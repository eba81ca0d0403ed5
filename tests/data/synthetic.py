"""A source of the official one's form: seven groups, ragged sizes, doubled files, several hundred files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

LENGTH = 32
VOCABULARY = 50_000
GROUPS = {
    "algebra": "algebra/part-{00..15}-00000.npy",
    "arxiv": "arxiv/part-{00..19}-00000.npy",
    "math": "math/part-{00..12}-00000.npy",
    "papers": "papers/part-{00..25}-00000.npy",
    "code": "code/part-{000..049}-00000.npy",
    "web": "web/part-{000..031}-{00000..00004}.npy",
    "wiki": "wiki/part-{0..1}-00000.npy",
}


def write_source(folder: Path, *, prefix: str | None = None, scale: int = 1, length: int = LENGTH) -> Path:
    """Write the files below `folder`/tokens and their description; returns the description.

    :param prefix: what the paths begin with; default the folder itself.
    :param scale: multiplies the sizes.
    """
    root = folder / "tokens"
    generator = np.random.default_rng(5)
    description = {
        "name": "synthetic",
        "dtype": "uint32",
        "sequence_length": length,
        "vocabulary_size": VOCABULARY,
        "prefix": prefix if prefix is not None else f"{root}/",
        "groups": [{"name": name, "files": files} for name, files in GROUPS.items()],
    }
    description["groups"][5]["twice"] = "*/part-017-*"
    path = folder / "synthetic.yaml"
    path.write_text(yaml.safe_dump(description, sort_keys=False))
    from olmo_ext.data.sources import load_source

    shared = len(description["prefix"])
    for name in dict.fromkeys(load_source(path).paths):
        tokens = generator.integers(0, VOCABULARY, int(generator.integers(length, 60 * length)) * scale, np.uint32)
        tokens[: length * 2 : 2] = 7
        file = root / name[shared:]
        file.parent.mkdir(parents=True, exist_ok=True)
        tokens.tofile(file)
    return path
