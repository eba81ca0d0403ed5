"""The code that a queued run will run with, copied when it is queued: an edit while the job waits changes nothing.

runs/<sweep>/.code/<digest>/olmo_ext/   the package as it is on the disk, uncommitted changes included
                            plugins     modules under `plugins:` that lie in the current folder or on PYTHONPATH
                            code.json   version, git revision, sha256 of the diff, digest of the files
                            diff.patch  what the revision lacks
runs/<sweep>/<run>/code -> ../.code/<digest>
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import olmo_ext
from olmo_ext.base.errors import InputError
from olmo_ext.base.files import folder_aside, link_atomically, put_in_place
from olmo_ext.training.provenance import code_revision

CODE_FOLDER = ".code"
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def _plugin_sources(plugins: Sequence[str]) -> Iterator[Path]:
    """Files and folders of the plugins in the current folder or on PYTHONPATH; installed packages stay where they are.

    :raises InputError: for a plugin that cannot be found.
    """
    # A job inherits no PYTHONPATH: what is found through it has to come along.
    ours = {Path(entry).resolve() for entry in (".", *os.environ.get("PYTHONPATH", "").split(":")) if entry}
    for name in dict.fromkeys(plugin.partition(".")[0] for plugin in plugins):
        try:
            specification = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            specification = None
        if specification is None or not specification.origin:
            raise InputError(f"plugin {name!r} cannot be found", where="plugins", right="install it, or run beside it")
        origin = Path(specification.origin).resolve()
        source = origin.parent if specification.submodule_search_locations else origin
        if source.parent in ours and "site-packages" not in source.parts:
            yield source


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _uncommitted() -> bytes:
    """`git diff HEAD` of the package, empty outside a checkout; files may be in any encoding."""
    folder = Path(olmo_ext.__file__).parent
    command = ["git", "-C", str(folder), "diff", "HEAD", "--", "."]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return answer.stdout if answer.returncode == 0 else b""


def freeze_code(sweep_directory: Path, plugins: Sequence[str] = ()) -> Path:
    """Copy the package and the local plugins; the same code is stored once.

    :param plugins: modules, as a config's `plugins:` names them.
    :raises InputError: for a plugin that cannot be found.
    :returns: the folder to put on PYTHONPATH.
    """
    store = sweep_directory / CODE_FOLDER
    with folder_aside(store / "copy") as aside:  # Its name is the digest of what it will hold.
        package = Path(olmo_ext.__file__).parent
        shutil.copytree(package, aside / package.name, ignore=IGNORED)
        for source in _plugin_sources(plugins):
            if source.is_dir():
                shutil.copytree(source, aside / source.name, ignore=IGNORED)
            else:
                shutil.copy2(source, aside / source.name)
        digest = _files_digest(aside)
        target = store / digest[:16]
        if not target.exists():
            if diff := _uncommitted():
                (aside / "diff.patch").write_bytes(diff)
            description = {"code": code_revision(), "files_sha256": digest}
            (aside / "code.json").write_text(json.dumps(description, indent=1) + "\n")
            try:
                put_in_place(aside, target)
            except OSError:
                if not target.exists():  # else another element of the array was faster
                    raise
    return target


def link_code(run_directory: Path, code: Path) -> None:
    """Point the run's `code` at a frozen copy, relative, so that the sweep's folder can move as a whole."""
    run_directory.mkdir(parents=True, exist_ok=True)
    link_atomically(run_directory / "code", os.path.relpath(code, run_directory))
