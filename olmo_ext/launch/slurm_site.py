"""The files of `slurm/`: the user's copies win over the package's, and `site.env` holds what differs between sites."""

from __future__ import annotations

import importlib.resources
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from olmo_ext.base.errors import InputError

USER_FOLDER = Path("slurm")
SITE_FILE = "site.env"
NODES_FILE = "nodes.yaml"
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHARED_FILES = ("job.sh", "command.sbatch")
OPTION_NAMES = ("account", "qos", "partition", "reservation", "constraint")
"""sbatch's options that have a line of their own, `SBATCH_<NAME>`."""

READ_NAMES = (*(f"SBATCH_{name.upper()}" for name in OPTION_NAMES), "SBATCH_OPTIONS", "GPU_TYPE")
"""What `launch` reads, each also as `NAME_<NODE TYPE>`."""


def packaged_names() -> list[str]:
    """The Slurm files of the package, without `nodes.yaml`."""
    return sorted(path.name for path in (importlib.resources.files("olmo_ext.resources") / "slurm").iterdir())


def packaged_file(name: str) -> Path:
    """The package's file of this name, which may not exist; the original of the user's `slurm/<name>`."""
    folder = importlib.resources.files("olmo_ext.resources")
    return Path(str(folder / name if name == NODES_FILE else folder / "slurm" / name))


def slurm_file(name: str, *, folder: Path | None = None) -> Path:
    """The user's `slurm/<name>`, else the package's.

    :raises InputError: if there is neither.
    """
    own = (USER_FOLDER if folder is None else folder) / name
    if own.is_file():
        return own
    if (packaged := packaged_file(name)).is_file():
        return packaged
    right = f"`olmo-ext slurm init`, copy {own.with_name('b200.sbatch')} to {own} and adapt it"
    raise InputError(f"no {own}", right=f"{right}, or name a node type that has one")


@dataclass(frozen=True, kw_only=True)
class Site:
    """What `launch` needs to know of `site.env`; the job itself sources the file."""

    path: Path | None
    values: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """Names that look as if `launch` took them: sbatch's own beside ours, or misspelt."""

    def get(self, name: str, node_type: str | None = None) -> str | None:
        """A setting; `NAME_<NODE TYPE>` wins over `NAME`, also where it is empty."""
        own = f"{name}_{re.sub(r'[^A-Za-z0-9]', '_', node_type or '').upper()}"
        return self.values.get(own, self.values.get(name)) or None

    def options(self, node_type: str | None) -> list[str]:
        """More options for sbatch, as they are to be given."""
        return shlex.split(self.get("SBATCH_OPTIONS", node_type) or "")


def _is_read(name: str) -> bool:
    return name in READ_NAMES or name.startswith(tuple(f"{known}_" for known in READ_NAMES))


def read_site(path: Path | None = None) -> Site:
    """Read `slurm/site.env`; a site without one needs none.

    Only plain `NAME=value` lines of the names that sbatch's command line depends on are read here, nothing is executed.

    :raises InputError: for a value of those that a shell would have to work out.
    """
    path = USER_FOLDER / SITE_FILE if path is None else path
    if not path.is_file():
        return Site(path=None)
    values, unused = {}, []
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"is no text ({error.reason})", where=str(path), right="NAME=value lines") from None
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", line)
        if not match:
            continue
        if not _is_read(match[1]):
            if match[1].startswith(("SBATCH_", "GPU_TYPE")):
                unused.append(match[1])
            continue
        try:
            words = shlex.split(match[2], comments=True)
        except ValueError as error:
            raise InputError(f"{match[1]}: {error}", where=f"{path}:{number}", right="one quoted value") from None
        if len(words) > 1 or "$" in match[2] or "`" in match[2]:
            raise InputError(
                f"{match[1]} is read without a shell", where=f"{path}:{number}", right="one quoted value, no $"
            )
        values[match[1]] = words[0] if words else ""
    return Site(path=path, values=values, unused=tuple(unused))


def job_environment() -> str:
    """Lines `NAME=value` by which a job that inherits no environment finds Slurm's tools and this Python."""
    folders = [os.path.dirname(path) for tool in ("srun", "scontrol", "squeue") if (path := shutil.which(tool))]
    path = ":".join(dict.fromkeys([*folders, *STANDARD_PATH.split(":")]))
    lines = {"PATH": path, "OLMO_EXT_PYTHON": sys.executable}
    if "SLURM_CONF" in os.environ:
        lines["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in lines.items())
