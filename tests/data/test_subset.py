"""Training on a subset, proving it, looking into it, and the commands around it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.cli import main
from olmo_ext.data.fetch import FetchOptions, SubsetFetch
from olmo_ext.data.fingerprint import compare_fingerprints, data_fingerprint
from olmo_ext.data.inspect import instances_of_step
from olmo_ext.data.loader import build_train_loader
from olmo_ext.data.order import full_order
from olmo_ext.data.sources import load_source
from olmo_ext.data.subset import Subset
from olmo_ext.data.survey import SourceManifest, survey
from olmo_ext.data.verify import Check, SubsetVerification
from tests.data.http_server import FileServer
from tests.data.synthetic import LENGTH, write_source
from tests.sections import typed

COUNT = 1000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def manifest(source: Path) -> SourceManifest:
    return survey(load_source(source), quiet=True)


@pytest.fixture(scope="module")
def fetched(manifest: SourceManifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("subset") / "data"
    get(directory, manifest, COUNT)
    return directory


@pytest.fixture
def subset(fetched: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(fetched, tmp_path / "subset"))


def get(directory: Path, manifest: SourceManifest, instances: int) -> None:
    job = SubsetFetch(
        directory, manifest, instances=instances, seed=6198, shard_instances=300, options=FetchOptions(quiet=True)
    )
    job.run()


def values_for(directory: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": {"max_sequence_length": LENGTH, "vocab_size": 50_000},
        "data": {"subset": str(directory), "seed": 6198},
        "global_train_batch_size": 10,
        "max_duration": 100,
    }
    return typed({**values, **changes})


def ids(values: TrainConfig, tmp_path: Path, **state: int) -> list[int]:
    loader = build_train_loader(values, rank=0, world_size=1, work_dir=tmp_path / "work")
    for name, value in state.items():
        setattr(loader.dataset, name, value)
    return [index for batch in loader for index in batch["index"].tolist()]


@pytest.mark.once
def test_the_subset_is_read_in_order_and_restarts_anywhere_without_files(subset: Path, tmp_path: Path) -> None:
    assert ids(values_for(subset), tmp_path) == list(range(COUNT))
    assert ids(values_for(subset), tmp_path, start_index=770) == list(range(770, COUNT))
    assert not (tmp_path / "work").exists(), "no order is made or kept"


def test_a_subset_too_short_for_the_run_is_refused_with_the_numbers(subset: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"holds 1,000 instances \(100 steps of 10\), the run needs 1,010 \(32,320 tok"
    ):
        ids(values_for(subset, max_duration=101), tmp_path)
    with pytest.raises(InputError, match="the run needs"):
        ids(values_for(subset, max_duration=f"{LENGTH * 1001}T"), tmp_path)


def test_epochs_over_a_subset_are_shuffles_of_it(subset: Path, tmp_path: Path) -> None:
    values = values_for(subset, max_duration="2ep")
    assert ids(values, tmp_path) == list(range(COUNT))
    assert ids(values, tmp_path, epoch=1) == full_order(COUNT, seed=6198, epoch=1).tolist()


def test_the_stored_filter_is_used_where_its_settings_are_asked_for(subset: Path, tmp_path: Path) -> None:
    stored = {"repetition_max_period": 13, "repetition_min_period": 1, "repetition_max_count": 32}
    for chosen in (stored, {**stored, "repetition_max_count": 3}, None):
        values = values_for(subset, data={"subset": str(subset), "seed": 6198, "instance_filter": chosen})
        instances = build_train_loader(values, rank=0, world_size=1, work_dir=tmp_path).dataset.dataset
        assert (instances.mask is not None) == (chosen == stored)
        assert ("instance_mask" in instances[0]) == (chosen is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"max_sequence_length": 16, "vocab_size": 50_000}},
            "have 32 tokens, model.max_sequence_length is 16",
        ),
        (
            {"model": {"max_sequence_length": 32, "vocab_size": 4096}},
            "vocabulary has 50,000 ids, model.vocab_size is 4,096",
        ),
        ({"data": {"seed": 1}}, "data.seed is 1, the subset holds the order of seed 6198"),
        ({"data": {"seed": 6198, "paths": ["x"]}}, "both given"),
    ],
)
def test_a_config_that_does_not_fit_the_subset_is_refused(subset: Path, changes: dict[str, Any], message: str) -> None:
    data = {"seed": 6198, **changes.get("data", {}), "subset": str(subset)}
    values = values_for(subset, **{**changes, "data": data})
    with pytest.raises(InputError, match=message):
        data_fingerprint(values)


def test_a_cut_or_missing_shard_is_named_before_training(subset: Path) -> None:
    os.truncate(subset / "shard-00002.bin", 300 * LENGTH * 4 - 4096)
    with pytest.raises(InputError, match=r"shard-00002.bin: \d+ bytes of \d+: the shard was cut"):
        data_fingerprint(values_for(subset))
    (subset / "shard-00002.bin").unlink()
    with pytest.raises(InputError, match="shard-00002.bin: shard cannot be read"):
        data_fingerprint(values_for(subset))
    with pytest.raises(InputError, match="not a subset"):
        data_fingerprint(values_for(subset.parent))


def test_a_moved_or_extended_subset_is_the_same_data_another_is_not(
    subset: Path, manifest: SourceManifest, tmp_path: Path
) -> None:
    before = data_fingerprint(values_for(subset))
    moved = Path(shutil.move(subset, tmp_path / "moved"))
    assert compare_fingerprints(before, data_fingerprint(values_for(moved))) == []
    get(moved, manifest, COUNT + 500)
    longer = data_fingerprint(values_for(moved))
    assert compare_fingerprints(before, longer) == [] and longer["fingerprint"] == before["fingerprint"]
    assert (before["instances"], longer["instances"]) == (COUNT, COUNT + 500)
    assert before["source"] == f"{manifest.name}, seed 6198, epoch 0"
    reordered = SourceManifest(**{**manifest.__dict__, "files": manifest.files[::-1]})
    get(tmp_path / "other", reordered, COUNT)
    other = data_fingerprint(values_for(tmp_path / "other"))
    assert compare_fingerprints(before, other) == ["the subset was taken from another source or order"]
    assert compare_fingerprints(before, {**before, "shards": [[300, "f" * 64], *before["shards"][1:]]})[0].startswith(
        "shard 0 has other content"
    )


def failed(directory: Path, **options: Any) -> list[str]:
    checks = SubsetVerification(directory).run(**{"sample": 50, "upstream": False, **options})
    return [check.name for check in checks if check.passed is False]


def test_verify_proves_a_subset_against_source_and_olmos_own_data_set(subset: Path) -> None:
    checks = SubsetVerification(subset).run(sample=50)
    assert [check.name for check in checks] == ["manifest", "shards", "filter", "order", "source", "upstream"]
    assert all(check.passed for check in checks), checks
    assert "OLMo's own order" in checks[-1].detail


def test_verify_finds_every_kind_of_damage(subset: Path) -> None:
    def flip(name: str, at: int) -> None:
        with open(subset / name, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))

    assert failed(subset) == []
    flip("shard-00001.bin", 5000)
    assert failed(subset, sample=0) == ["shards"]
    assert failed(subset, sample=COUNT) == ["shards", "source"]
    flip("shard-00001.bin", 5000)
    flip("shard-00000.mask", 12)
    assert failed(subset) == ["filter"]
    flip("shard-00000.mask", 12)
    flip("index.npy", 400)
    assert "order" in failed(subset, sample=0)
    flip("index.npy", 400)
    assert failed(subset) == []


def test_what_cannot_be_read_fails_its_own_checks_only(
    subset: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(subset / "shard-00000.bin", "r+b") as file:
        file.write(b"\xff" * 4)  # an id beyond the vocabulary
    (subset / "index.npy").unlink()
    nowhere = f"{source.parent}/tokens/={tmp_path}/nowhere/"
    code, out, _ = run(capsys, "verify", str(subset), "--json", "--checksums", "--upstream", "--map", nowhere)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 1 and list(checks) == ["manifest", "shards", "filter", "order", "source", "upstream", "checksums"]
    assert [name for name, check in checks.items() if check["passed"] is False] == (
        ["shards", "filter", "order", "source", "upstream"]
    )
    assert "offset 0: id 4294967295 is beyond" in checks["filter"]["detail"]
    assert "index.npy: cannot be read" in checks["order"]["detail"]


def test_checksums_that_a_server_stated_are_used(source: Path, tmp_path: Path) -> None:
    """Surveyed on a server whose ETags are MD5s, then read from a copy on this machine."""
    tokens, copy = source.parent / "tokens", tmp_path / "copy"
    shutil.copytree(tokens, copy)
    with FileServer(tokens) as server:
        found = survey(load_source(source, locations={f"{tokens}/": f"{server.url}/"}), quiet=True)
        get(tmp_path / "subset", found, 50)
    here = SubsetVerification(tmp_path / "subset", locations={f"{tokens}/": f"{copy}/"})
    assert here.source_checksums() == Check(name="checksums", passed=True, detail="MD5 of 287 files is the server's")
    assert here.run(sample=20, upstream=True)[-1].passed
    with open(copy / "wiki/part-1-00000.npy", "r+b") as file:
        file.write(b"\1")
    assert not here.source_checksums().passed
    assert SubsetVerification(tmp_path / "subset").source_checksums().passed is None


def test_verify_calls_an_order_that_is_not_olmos_wrong(subset: Path) -> None:
    """The claim does not rest on our own order alone: with that one wrong, OLMo's data set still tells."""
    verification = SubsetVerification(subset)
    manifest = verification.subset.manifest
    object.__setattr__(manifest, "order_seed", 6199)
    check = verification.against_upstream(5, 0, None)
    assert check == Check(name="upstream", passed=False, detail="OLMo's data set has another order")


def test_inspect_names_file_and_offset_of_what_a_step_saw(subset: Path, manifest: SourceManifest) -> None:
    order = full_order(manifest.instances, seed=6198)
    seen = instances_of_step(subset, step=3, batch_size=10)
    assert [one.source_instance for one in seen] == order[20:30].tolist()
    for one in seen:
        tokens = np.fromfile(one.path, dtype=np.uint32, count=LENGTH, offset=one.offset)
        np.testing.assert_array_equal(tokens, one.tokens)
    with pytest.raises(InputError, match="step 101.*; 1 to 100: 1,000 instances by 10"):
        instances_of_step(subset, step=101, batch_size=10)
    with pytest.raises(InputError, match="1,000 instances are less than one step of 2048; a smaller --batch-size"):
        instances_of_step(subset, step=1, batch_size=2048)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_commands_from_survey_to_inspect(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    surveyed, index, directory = tmp_path / "manifest.json", tmp_path / "index.npy", tmp_path / "subset"
    code, out, _ = run(capsys, "survey", str(source), "-o", str(surveyed), "--json")
    assert code == 0 and json.loads(out)["files"] == 16 + 20 + 13 + 26 + 50 + 165 + 2
    total = json.loads(out)["instances"]
    code, out, _ = run(capsys, "order", str(surveyed), "--tokens", "3200", "-o", str(index), "--json")
    assert code == 0 and np.load(index).tolist() == full_order(total, seed=6198)[:100].tolist()
    code, _, err = run(capsys, "order", str(surveyed), "--tokens", "3200", "-o", str(index), "--seed", "1")
    assert code == 2 and "index.npy: holds something else than this order" in err
    code, _, _ = run(capsys, "order", str(surveyed), "--tokens", "6400", "-o", str(index))
    assert code == 0 and np.load(index).tolist() == full_order(total, seed=6198)[:200].tolist()
    code, out, _ = run(capsys, "fetch", str(source), "--tokens", "3201", "-o", str(directory), "--json")
    assert code == 0 and json.loads(out)["instances"] == 101 and json.loads(out)["complete"]
    code, out, _ = run(capsys, "verify", str(directory), "--no-upstream")
    assert code == 0 and out.count(" ok ") == 5
    code, out, _ = run(capsys, "inspect", str(directory), "--step", "2", "--batch-size", "50", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["place"] for line in lines] == list(range(50, 58))
    code, out, _ = run(
        capsys, "inspect", str(directory), "--step", "1", "--tokenizer", "tokenizers/allenai_dolma2.json"
    )
    assert code == 2
    code, out, _ = run(
        capsys, "inspect", str(directory), "--step=1", "--batch-size=9", "--tokenizer=tokenizers/allenai_dolma2.json"
    )
    assert code == 0 and out.count(", offset ") == 8


def test_a_published_index_is_used_after_its_length_is_checked(
    source: Path, manifest: SourceManifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = full_order(manifest.instances, seed=6198)
    order[: manifest.instances // 8 * 8].tofile(tmp_path / "global_indices.npy")
    common = [str(source), "--instances", "40", "--indices"]
    code, _, _ = run(capsys, "fetch", *common, str(tmp_path / "global_indices.npy"), "-o", str(tmp_path / "official"))
    assert code == 0
    official = Subset(tmp_path / "official")
    assert official.manifest.order_name is None and official.index().tolist() == order[:40].tolist()
    np.save(tmp_path / "own.npy", order[::-1])
    code, _, _ = run(capsys, "fetch", *common, str(tmp_path / "own.npy"), "-o", str(tmp_path / "own"))
    assert code == 0
    own = Subset(tmp_path / "own")
    assert own.index().tolist() == order[::-1][:40].tolist()
    assert own.manifest.order_name and own.manifest.fingerprint != official.manifest.fingerprint
    code, out, _ = run(capsys, "verify", str(tmp_path / "own"))
    assert code == 0 and out.count("the order was given as an index") == 2
    for bad, message in (
        (order[:-4000], "the source has"),
        (np.zeros_like(order), "an instance comes twice"),
        (order + np.uint32(manifest.instances), "at place"),
    ):
        bad.tofile(tmp_path / "bad.npy")
        code, _, err = run(capsys, "fetch", *common, str(tmp_path / "bad.npy"), "-o", str(tmp_path / "bad"))
        assert code == 2 and message in err


def test_a_survey_of_another_source_than_the_one_named_is_refused(
    subset: Path, source: Path, manifest: SourceManifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("/x/a.npy\n")
    (tmp_path / "surveyed.json").write_text(manifest.dump())
    for where in (["-o", str(subset)], ["-o", str(tmp_path / "new"), "--manifest", str(tmp_path / "surveyed.json")]):
        code, _, err = run(capsys, "fetch", str(tmp_path / "mine.txt"), "--instances", "1100", *where)
        assert code == 2 and "is of another source ('synthetic', 292 files) than 'mine'" in err
    code, _, _ = run(
        capsys, "fetch", "-o", str(subset), "--instances", "1100", "--shard-instances", "300", "--concurrency", "8"
    )
    assert code == 0, "a folder knows its source where none is named"
    code, _, _ = run(capsys, "fetch", str(source), "-o", str(subset), "--instances", "1101", "--shard-instances", "300")
    assert code == 0


def test_bad_input_is_one_line_and_exit_code_2(
    subset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blob").write_bytes(b"\x84\x00\xff")
    blob, common = str(tmp_path / "blob"), ["fetch", "olmo2-1b-stage1", "-o", str(tmp_path / "x")]
    for arguments in (
        ["survey", "nope"],
        ["survey", blob, "-o", str(tmp_path / "m.json")],
        ["survey", "olmo2-1b-stage1", "--concurrency", "0"],
        ["order", blob, "--tokens", "1M", "-o", "x.npy"],
        ["order", blob, "--tokens", "1M", "-o", "x.npy", "--epoch", "-1"],
        [*common, "--tokens", "-5"],
        [*common, "--instances", "0"],
        [*common, "--tokens", "1M", "--instances", "5"],
        [*common, "--tokens", "1M", "--part", "0/2"],
        [*common, "--tokens", "1M", "--part", "3/2"],
        [*common, "--tokens", "1M", "--memory", "0"],
        [*common, "--tokens", "1M", "--retries", "0"],
        [*common, "--tokens", "1M", "--request-seconds", "0"],
        [*common, "--tokens", "1M", "--shard-instances", "0"],
        [*common, "--tokens", "1M", "--manifest", blob],
        ["order", str(tmp_path / "nope.json"), "--tokens", "1M", "-o", "x.npy"],
        ["fetch", "olmo2-1b-stage1", "-o", str(tmp_path / "x"), "--part", "0-1", "--tokens", "1M"],
        ["verify", str(tmp_path)],
        ["inspect", str(subset), "--step", "0", "--batch-size", "10"],
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and len(err.strip().splitlines()) == 1, (arguments, err)


def test_data_commands_need_no_torch() -> None:
    code = (
        "import sys, olmo_ext.data.data_command, olmo_ext.data.fetch, olmo_ext.data.survey, olmo_ext.data.verify,"
        " olmo_ext.data.fingerprint, olmo_ext.data.order, olmo_ext.data.inspect\n"
        "heavy = {'torch', 'olmo', 'numba', 'obstore', 'pandas', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
