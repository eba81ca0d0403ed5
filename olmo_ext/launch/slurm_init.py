"""`olmo-ext slurm init`: the user's copies of the package's Slurm files, and which of them nobody has changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import click

from olmo_ext.base.errors import EXIT_DONE
from olmo_ext.base.files import write_atomically
from olmo_ext.launch.slurm_site import NODES_FILE, USER_FOLDER, packaged_file, packaged_names

STAMP = b"# Written by `olmo-ext slurm init`; hash of the lines above: "


def stamped(content: bytes) -> bytes:
    """A file's content with a last line that holds its hash: a comment in bash and in YAML."""
    return content + STAMP + hashlib.sha256(content).hexdigest()[:16].encode() + b"\n"


def state_of(name: str, *, folder: Path = USER_FOLDER) -> str:
    """What has become of a copy: `current`, `older` (as another version of this package wrote it), or `changed`.

    A file that the package does not have, such as the script of a node type of the user's own, counts as changed.
    """
    copy, package = (folder / name).read_bytes(), packaged_file(name)
    if package.is_file() and copy in (package.read_bytes(), stamped(package.read_bytes())):
        return "current"
    above, stamp, _ = copy.rpartition(STAMP)
    return "older" if stamp and copy == stamped(above) else "changed"


def older_copies(names: Iterable[str]) -> list[Path]:
    """Those of the user's files that another version of this package wrote and nobody has changed since."""
    own = [name for name in names if (USER_FOLDER / name).is_file()]
    return [USER_FOLDER / name for name in own if state_of(name) == "older"]


@click.group()
def slurm() -> None:
    """The Slurm scripts in your own folder."""


@slurm.command()
@click.argument("directory", default=".", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--nodes", is_flag=True, help="Also nodes.yaml, to change what the package knows of the node types.")
def init(directory: Path, nodes: bool) -> int:
    """Write the package's Slurm scripts into DIRECTORY/slurm; sbatch is then called in DIRECTORY.

    A file that you have changed is left alone and named. A copy that nobody changed is renewed.
    """
    folder = directory / USER_FOLDER
    folder.mkdir(exist_ok=True)
    for name in [*packaged_names(), NODES_FILE]:
        path, content = folder / name, stamped(packaged_file(name).read_bytes())
        if not path.exists():
            if name == NODES_FILE and not nodes:
                continue
        elif path.read_bytes() == content:
            continue
        elif state_of(name, folder=folder) == "changed":
            command = f"olmo-ext slurm init{' --nodes' if name == NODES_FILE else ''} {directory}".removesuffix(" .")
            click.echo(f"{path}: differs from the package's and is kept; for the package's: rm {path}; {command}")
            continue
        write_atomically(path, content)
        click.echo(f"{path}: written")
    return EXIT_DONE
