"""Copy what `olmo-ext compare` reads of a sweep's finished runs into a folder small enough to commit or send.

python scripts/copy_metrics.py runs/my-sweep examples/my-sweep [--strip PREFIX]

Checkpoints, logs and W&B files stay behind; so do the name of the machine and the folder under which the run lay.
Called again it adds the runs that have finished since; a copy that has become another is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from olmo_ext.base.errors import InputError, OlmoExtError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.sweep_directory import SweepDirectory

FILES = ("config.yaml", "shape.json", "provenance.json", "metrics.jsonl", "state.json")
FOLDERS = {"evals": "*.jsonl", "diagnosis": "*.json"}


def without_place(text: str, name: str, prefix: str) -> str:
    """A file's text without the machine it was written on."""
    text = text.replace(f"{prefix.rstrip('/')}/", "")
    if name not in ("provenance.json", "state.json"):
        return text
    content = json.loads(text) | {"host": ""}
    if "command" in content:  # the program may lie in another folder than the runs
        content["command"] = [word if not word.startswith("/") else Path(word).name for word in content["command"]]
    return json.dumps(content, indent=1) + "\n"


def files_of(run: Path) -> list[Path]:
    """What is copied of a run, of what is there."""
    present = [run / name for name in FILES if (run / name).is_file()]
    return present + [path for folder, pattern in FOLDERS.items() for path in sorted((run / folder).glob(pattern))]


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.argument("sweep", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("target", type=click.Path(path_type=Path, file_okay=False))
@click.option("--strip", default=str(Path.cwd()), show_default="this folder", help="Leading folder of all paths.")
def main(sweep: Path, target: Path, strip: str) -> None:
    directory = SweepDirectory(sweep)
    if not directory.is_declared():
        raise InputError("no sweep.json", where=str(sweep), right="the folder of a sweep, as in runs/<sweep>")
    copies = {target / "sweep.json": directory.description_path.read_text()}
    for run in directory.runs():
        status = run.read_state().status if run.path.is_dir() else "not started"
        if status != "done":
            click.echo(f"left out: {run.name} ({status})")
            continue
        for path in files_of(run.path):
            copies[target / path.relative_to(sweep)] = without_place(path.read_text(), path.name, strip)
    for path, text in copies.items():
        if path.exists() and path.read_text() != text:
            raise InputError("holds something else than the run does now", where=str(path), right="another folder")
    for path, text in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    click.echo(f"{target}: {len(copies)} files, {sum(len(text.encode()) for text in copies.values()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    try:
        main()
    except OlmoExtError as error:
        print(f"copy_metrics: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
