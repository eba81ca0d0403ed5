"""`olmo-ext slurm init`: the user's copies of the package's Slurm files, their last line, and what becomes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from olmo_ext.base.nodes import load_hardware
from olmo_ext.launch.slurm_init import slurm, stamped
from olmo_ext.launch.slurm_site import packaged_file, packaged_names, read_site
from tests.launch.conftest import invoke

OLDER = stamped(b"#!/bin/bash\n# of an older version\n")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> str:
    done = CliRunner().invoke(slurm, ["init", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_init_writes_every_file_of_the_package_and_a_second_time_nothing(project: Path) -> None:
    init()
    written = contents(project / "slurm")
    assert {*written} == {"b200.sbatch", "rtx6000ada.sbatch", "command.sbatch", "job.sh", "site.env.example"}
    for name, copy in written.items():
        assert copy.splitlines()[:-1] == packaged_file(name).read_bytes().splitlines()
    assert init() == "" and contents(project / "slurm") == written


def test_the_last_line_is_a_comment_to_whoever_reads_a_copy(project: Path) -> None:
    packaged = load_hardware()
    init("--nodes")
    for name in (name for name in packaged_names() if name != "site.env.example"):
        subprocess.run(["bash", "-n", f"slurm/{name}"], check=True)
    assert read_site(Path("slurm/site.env.example")).values == {}
    assert load_hardware() == packaged and (project / "slurm" / "nodes.yaml").is_file()


def test_a_file_that_the_user_changed_is_kept_and_named_with_the_way_to_the_new_one(project: Path) -> None:
    (project / "there").mkdir()
    init("there")
    own = project / "there" / "slurm" / "b200.sbatch"
    for text in (own.read_bytes().replace(b"24:00:00", b"12:00:00"), own.read_bytes() + b"echo\n", b"mine\n", b""):
        own.write_bytes(text)
        assert init("there") == (
            "there/slurm/b200.sbatch: differs from the package's and is kept;"
            " for the package's: rm there/slurm/b200.sbatch; olmo-ext slurm init there\n"
        )
        assert own.read_bytes() == text
    own.unlink()
    init("there")
    assert own.read_bytes() == stamped(packaged_file("b200.sbatch").read_bytes())


@pytest.mark.parametrize("name", ["job.sh", "nodes.yaml"])
def test_a_copy_of_an_older_version_that_nobody_changed_is_renewed(project: Path, name: str) -> None:
    (project / "slurm").mkdir()
    (project / "slurm" / name).write_bytes(OLDER)
    assert f"slurm/{name}: written\n" in init()
    assert (project / "slurm" / name).read_bytes() == stamped(packaged_file(name).read_bytes())


def test_launch_says_which_unchanged_copies_of_an_older_version_it_uses(fake_slurm: Path, project: Path) -> None:
    init()
    assert "older" not in invoke("--dry-run")
    (project / "slurm" / "job.sh").write_bytes(OLDER)
    (project / "slurm" / "command.sbatch").write_bytes(OLDER + b"# changed\n")
    (line,) = [line for line in invoke("--dry-run").splitlines() if "older" in line]
    assert line.startswith("note: slurm/job.sh: ") and "olmo-ext slurm init" in line
