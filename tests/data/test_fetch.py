"""A fetched subset holds exactly the source's bytes in OLMo's order, whatever the server and the kills do."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.data.byte_ranges import MAX_GAP, MAX_REQUEST, plan_requests
from olmo_ext.data.fetch import FetchOptions, FetchReport, SubsetFetch
from olmo_ext.data.order import full_order
from olmo_ext.data.sources import Source, load_source
from olmo_ext.data.stores import Stores
from olmo_ext.data.subset import Subset
from olmo_ext.data.survey import SourceManifest, survey, survey_to
from tests.data.http_server import FileServer
from tests.data.synthetic import LENGTH, write_source
from tests.sections import typed

pytestmark = pytest.mark.once

BYTES = LENGTH * 4
COUNT, SHARD = 2500, 600


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def local(source: Path) -> SourceManifest:
    return survey(load_source(source), quiet=True)


@pytest.fixture(scope="module")
def expected(local: SourceManifest) -> bytes:
    """The first instances as numpy and plain file reads give them."""
    order = full_order(local.instances, seed=6198)[:COUNT]
    pieces = []
    for instance in order:
        entry, offset = local.locate(int(instance))
        pieces.append(Path(local.files[entry].path).read_bytes()[offset : offset + BYTES])
    return b"".join(pieces)


@pytest.fixture
def server(source: Path) -> Iterator[FileServer]:
    with FileServer(source.parent / "tokens") as running:
        yield running


def over_http(local: SourceManifest, source: Path, server: FileServer) -> tuple[SourceManifest, dict[str, str]]:
    """The survey of the same files on the server."""
    locations = {f"{source.parent}/tokens/": f"{server.url}/"}
    return survey(load_source(source, locations=locations), quiet=True, stores=quick()), locations


def quick(**changes: Any) -> Stores:
    return Stores(**{"retries": 4, "request_seconds": 2.0, "first_pause": 0.01, **changes})


def fetch(
    directory: Path,
    manifest: SourceManifest,
    *,
    instances: int = COUNT,
    stores: Stores | None = None,
    memory: int = 300 * BYTES,
    part: int = 1,
    parts: int = 1,
    **changes: Any,
) -> FetchReport:
    options = FetchOptions(quiet=True, memory=memory, concurrency=32, part=part, parts=parts)
    settings = {"seed": 6198, "shard_instances": SHARD, **changes}
    return SubsetFetch(
        directory, manifest, instances=instances, options=options, stores=stores or quick(), **settings
    ).run()


def content_of(directory: Path) -> bytes:
    subset = Subset(directory)
    return b"".join(
        (directory / shard.file).read_bytes()[: shard.instances * BYTES] for shard in subset.manifest.shards
    )


def test_the_subset_is_byte_for_byte_the_sources_first_instances(
    local: SourceManifest, source: Path, server: FileServer, expected: bytes, tmp_path: Path
) -> None:
    manifest, _ = over_http(local, source, server)
    server.body_bytes = server.connections = 0
    report = fetch(tmp_path / "subset", manifest, memory=3 * COUNT * BYTES)
    assert content_of(tmp_path / "subset") == expected
    assert report.complete and report.kept_bytes == COUNT * BYTES
    assert server.body_bytes == report.received_bytes <= 1.05 * report.kept_bytes
    assert report.requests < COUNT, "neighbours share a request"
    assert server.connections < 200, "connections are kept"
    shards = Subset(tmp_path / "subset").manifest.shards
    assert [shard.instances for shard in shards] == [600, 600, 600, 600, 100]
    for shard in shards:
        assert hashlib.sha256((tmp_path / "subset" / shard.file).read_bytes()).hexdigest() == shard.sha256


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_on_the_subset_is_training_on_olmos_own_data_set(
    local: SourceManifest, tmp_path: Path, world_size: int
) -> None:
    from olmo.config import InstanceFilterConfig
    from olmo.data import IterableDataset, MemMapDataset

    from olmo_ext.data.loader import build_train_loader

    fetch(tmp_path / "subset", local)
    chosen = {"repetition_max_period": 13, "repetition_min_period": 1, "repetition_max_count": 32}
    dataset = MemMapDataset(
        *[file.path for file in local.files],
        chunk_size=LENGTH,
        memmap_dtype=np.uint32,
        instance_filter_config=InstanceFilterConfig(**chosen),
    )
    batch = 20
    config = {
        "model": {"max_sequence_length": LENGTH, "vocab_size": 50_000},
        "data": {"subset": str(tmp_path / "subset"), "seed": None, "instance_filter": chosen},
        "global_train_batch_size": batch,
        "max_duration": 40,
    }
    for rank in range(world_size):
        theirs = IterableDataset(
            dataset,  # type: ignore[arg-type]
            batch,
            seed=6198,
            drop_last=True,
            world_size=world_size,
            rank=rank,
            fs_local_rank=0,
            num_threads=0,
        )
        ours = build_train_loader(typed(config), rank=rank, world_size=world_size, work_dir=tmp_path / "work")
        rows = zip(ours, _batches(theirs, batch // world_size), strict=False)
        steps = 0
        for our_batch, their_batch in itertools.islice(rows, 40):
            steps += 1
            for k, item in enumerate(their_batch):
                assert our_batch["input_ids"][k].tolist() == item["input_ids"].tolist()
                assert bool(our_batch["instance_mask"][k]) == item["instance_mask"]
        assert steps == 40


def _batches(items: Any, size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while True:
        yield [next(iterator) for _ in range(size)]


@pytest.mark.parametrize("fault", ["503", "reset", "short", "shift", "200", "garbage", "drip"])
def test_a_fault_that_passes_costs_a_retry_and_no_byte(
    local: SourceManifest, source: Path, server: FileServer, expected: bytes, tmp_path: Path, fault: str
) -> None:
    manifest, _ = over_http(local, source, server)
    begin, every = server.requests, 600 if fault == "drip" else 17
    server.fault = lambda path, number: fault if (number - begin) % every == 0 else None
    report = fetch(tmp_path / "subset", manifest, stores=quick(retries=6, request_seconds=0.8))
    assert content_of(tmp_path / "subset") == expected
    assert report.retried > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", "failed 5 times, last: .*503"),
        ("reset", "failed 5 times"),
        ("short", "failed 5 times"),
        ("shift", "failed 5 times"),
        ("200", "failed 5 times"),
        ("garbage", "failed 5 times, last: id 4294967295 at offset .* beyond the vocabulary of 50,000"),
        ("etag", 'ETag is "changed", was .* the source has changed'),
        ("size", "bytes, had .*: the source has changed"),
        ("404", "no such file"),
        ("403", "access is denied"),
    ],
)
def test_a_fault_that_stays_is_one_clear_error_and_what_was_right_is_kept(
    local: SourceManifest, source: Path, server: FileServer, expected: bytes, tmp_path: Path, fault: str, message: str
) -> None:
    manifest, _ = over_http(local, source, server)
    begin = server.requests
    server.fault = lambda path, number: fault if number - begin > 900 else None
    with pytest.raises(WorkError, match=rf"{server.url}/.*{message}"):
        fetch(tmp_path / "subset", manifest)
    with pytest.raises(InputError, match="not complete"):
        Subset(tmp_path / "subset")
    server.fault = lambda path, number: None
    again = fetch(tmp_path / "subset", manifest)
    assert content_of(tmp_path / "subset") == expected
    assert again.fetched < COUNT, "finished windows are not read again"


def test_a_source_that_changed_since_the_survey_is_refused(tmp_path: Path) -> None:
    with FileServer(tmp_path) as server:
        (tmp_path / "a.npy").write_bytes(np.arange(LENGTH * 5, dtype=np.uint32).tobytes())
        (tmp_path / "list.txt").write_text(f"{server.url}/a.npy\n")
        found = load_source(tmp_path / "list.txt")
        manifest = SourceManifest(**{**survey(found, quiet=True).__dict__, "sequence_length": LENGTH})
        server.contents.clear()
        (tmp_path / "a.npy").write_bytes(np.arange(1, LENGTH * 5 + 1, dtype=np.uint32).tobytes())
        with pytest.raises(WorkError, match="a.npy: ETag is .* the source has changed"):
            fetch(tmp_path / "subset", manifest, instances=3)


KILLED = """
import sys
from pathlib import Path
from olmo_ext.data.fetch import FetchOptions, SubsetFetch
from olmo_ext.data.stores import Stores
from olmo_ext.data.survey import SourceManifest
directory, manifest, count, shard, memory = sys.argv[1:]
options = FetchOptions(quiet=True, memory=int(memory), concurrency=8)
SubsetFetch(Path(directory), SourceManifest.read(manifest), instances=int(count), seed=6198,
            shard_instances=int(shard), options=options, stores=Stores(retries=3)).run()
"""


def test_killed_20_times_and_resumed_it_is_the_same_subset(
    local: SourceManifest, source: Path, server: FileServer, expected: bytes, tmp_path: Path
) -> None:
    manifest, _ = over_http(local, source, server)
    (tmp_path / "manifest.json").write_text(manifest.dump())
    window = 20
    command = [sys.executable, "-c", KILLED, str(tmp_path / "subset"), str(tmp_path / "manifest.json")]
    command += [str(COUNT), "100", str(3 * window * BYTES)]
    server.body_bytes, server.delay = 0, 0.01
    chance = random.Random(3)
    kills = 0
    while kills < 20:
        begin = server.requests
        process = subprocess.Popen(command)
        while process.poll() is None and server.requests == begin:
            time.sleep(0.005)
        try:
            process.wait(timeout=chance.uniform(0.0, 0.25))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        pytest.fail(f"finished after {kills} kills: slow the server down")
    server.delay = 0
    assert subprocess.run(command).returncode == 0
    assert content_of(tmp_path / "subset") == expected
    assert server.body_bytes <= 1.05 * COUNT * BYTES + (kills + 1) * 3 * window * BYTES
    leftovers = [
        path.name for path in (tmp_path / "subset").iterdir() if "part" in path.name or "progress" in path.name
    ]
    assert leftovers == []


@pytest.mark.parametrize("moment", ["before the renames", "between the renames", "before the count", "after the count"])
def test_a_kill_while_a_shard_is_finished_reads_nothing_again(
    local: SourceManifest, expected: bytes, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olmo_ext.data.shards as module

    class Killed(BaseException):
        pass

    replace, write, renames = module.os.replace, module.write_atomically, []

    def dying_replace(old: Path, new: Path) -> None:
        if str(old).endswith(".part"):
            renames.append(new)
            if len(renames) == {"before the renames": 1, "between the renames": 2}.get(moment):
                raise Killed
        replace(old, new)

    def dying_write(path: Path, content: str) -> None:
        if moment == "before the count" and path.name == "shard-00000.json":
            raise Killed
        write(path, content)
        if moment == "after the count" and path.name == "shard-00000.json":
            raise Killed

    monkeypatch.setattr(module.os, "replace", dying_replace)
    monkeypatch.setattr(module, "write_atomically", dying_write)
    with pytest.raises(Killed):
        fetch(tmp_path / "subset", local)
    monkeypatch.undo()
    again = fetch(tmp_path / "subset", local)
    assert again.fetched <= COUNT - SHARD
    assert content_of(tmp_path / "subset") == expected
    assert not list((tmp_path / "subset").glob("*.progress"))


def test_a_call_killed_before_its_plan_leaves_the_next_neither_its_order_nor_its_source(
    local: SourceManifest, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olmo_ext.data.fetch as module

    class Killed(BaseException):
        pass

    write = module.write_atomically

    def dying_write(path: Path, content: str) -> None:
        if path.name == "plan.json":
            raise Killed
        write(path, content)

    other = SourceManifest(**{**local.__dict__, "files": local.files[::-1]})
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_atomically", dying_write)
        with pytest.raises(Killed):
            fetch(tmp_path / "subset", other, seed=1)
    assert (tmp_path / "subset/index.npy").exists(), "the other order lies there"
    fetch(tmp_path / "subset", local)
    assert content_of(tmp_path / "subset") == expected
    assert SourceManifest.read(tmp_path / "subset/source.json").fingerprint == local.fingerprint


@pytest.mark.parametrize("ending", ["bin", "mask"])
def test_a_shard_damaged_before_it_is_extended_is_read_again(
    local: SourceManifest, expected: bytes, tmp_path: Path, ending: str
) -> None:
    fetch(tmp_path / "subset", local, instances=1000)
    damaged = tmp_path / f"subset/shard-00001.{ending}"
    damaged.write_bytes(b"\7" + damaged.read_bytes()[1:])
    assert fetch(tmp_path / "subset", local).fetched == COUNT - SHARD, "the whole second shard too"
    assert content_of(tmp_path / "subset") == expected
    assert 7 not in damaged.read_bytes() or ending == "bin"


def test_an_index_that_goes_on_otherwise_does_not_extend_a_folder(local: SourceManifest, tmp_path: Path) -> None:
    order = full_order(local.instances, seed=6198)
    other = np.append(order[:1200], order[1200:][::-1])

    def job(values: np.ndarray, instances: int) -> SubsetFetch:
        found = SubsetFetch(
            tmp_path / "subset", local, instances=instances, seed=6198, options=FetchOptions(quiet=True)
        )
        found.use_index(values)
        return found

    job(other, 1500).run()
    for instances in (1500, 2000):
        with pytest.raises(InputError, match=r"index.npy: place 1200 is instance \d+, in the order asked for \d+"):
            job(order, instances).run()
    assert job(other, 2000).run().fetched == 500
    (tmp_path / "subset/index.npy").write_bytes(b"cut")
    with pytest.raises(InputError, match="index.npy: cannot be read"):
        Subset(tmp_path / "subset").index()
    assert job(other, 2000).run().fetched == 0
    assert Subset(tmp_path / "subset").index().tolist() == other[:2000].tolist()


def test_addresses_are_read_as_they_are_written_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a b.npy").write_bytes(b"12345678")
    with FileServer(tmp_path) as server:
        server.contents["/a%20b.npy"] = (b"12345678", '"tag"')
        for location in (f"{server.url}/a%20b.npy", f"{server.url}/a b.npy", f"{tmp_path}/a b.npy"):
            assert asyncio.run(quick().head(location))["size"] == 8
        for location in (f"{server.url}/get?file=1", "s3://bucket/a#b.npy", "ftp://host/a.npy"):
            with pytest.raises(InputError, match=re.escape(location)):
                asyncio.run(quick().head(location))


def test_a_password_comes_from_netrc_for_its_own_host_alone_and_never_from_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.npy").write_bytes(b"12345678")
    (tmp_path / "netrc").write_text("default login any password other\nmachine 127.0.0.1 login me password hidden\n")
    with FileServer(tmp_path) as server:
        for named, sent in (("missing", None), ("netrc", "Basic bWU6aGlkZGVu")):
            monkeypatch.setenv("NETRC", str(tmp_path / named))
            server.authorizations.clear()
            asyncio.run(quick().head(f"{server.url}/a.npy"))
            assert server.authorizations == {sent}
        server.authorizations.clear()
        asyncio.run(quick().head(f"{server.url.replace('127.0.0.1', 'localhost')}/a.npy"))
        assert server.authorizations == {None}
        with pytest.raises(InputError, match="given with a user or password") as error:
            asyncio.run(quick().head(f"{server.url.replace('://', '://me:hidden@')}/a.npy"))
    assert "hidden" not in str(error.value)


def test_parts_together_make_the_same_subset(local: SourceManifest, expected: bytes, tmp_path: Path) -> None:
    for part in (3, 1):
        assert not fetch(tmp_path / "subset", local, part=part, parts=3).complete
    with pytest.raises(InputError, match="the subset is not complete"):
        Subset(tmp_path / "subset")
    assert fetch(tmp_path / "subset", local, part=2, parts=3).complete
    assert content_of(tmp_path / "subset") == expected
    whole = tmp_path / "whole"
    fetch(whole, local)
    assert (whole / "subset.json").read_text() == (tmp_path / "subset/subset.json").read_text()


def test_extending_fetches_the_new_part_only_and_keeps_the_shorter_usable(
    local: SourceManifest, expected: bytes, tmp_path: Path
) -> None:
    directory = tmp_path / "subset"
    fetch(directory, local, instances=1000)
    before = Subset(directory)
    reader = before.reader()
    first = reader.read(999)
    shorter = content_of(directory)
    with pytest.raises(InputError, match=f"another shard_instances .{SHARD}, asked for: 7"):
        fetch(directory, local, instances=COUNT, shard_instances=7)
    # Not named again, the size of a shard is the folder's own.
    report = fetch(directory, local, instances=COUNT, shard_instances=None)
    assert report.fetched == COUNT - 1000
    after = Subset(directory)
    assert after.manifest.shard_instances == SHARD
    assert content_of(directory) == expected and expected.startswith(shorter)
    assert after.manifest.fingerprint == before.manifest.fingerprint
    np.testing.assert_array_equal(reader.read(999), first)  # opened before: its shard was replaced
    np.testing.assert_array_equal(reader.read(650), after.reader().read(650))
    with pytest.raises(InputError, match="more than 1,000"):
        fetch(directory, local, instances=1000)
    assert fetch(directory, local).fetched == 0


def test_another_order_or_source_does_not_mix_into_a_folder(local: SourceManifest, tmp_path: Path) -> None:
    fetch(tmp_path / "subset", local, instances=10)
    with pytest.raises(InputError, match="another seed"):
        fetch(tmp_path / "subset", local, instances=20, seed=1)
    other = SourceManifest(**{**local.__dict__, "files": local.files[::-1]})
    with pytest.raises(InputError, match="another source"):
        fetch(tmp_path / "subset", other, instances=20)
    with pytest.raises(InputError, match="instances of .* in the source 'synthetic'; 1 to"):
        fetch(tmp_path / "new", local, instances=local.instances + 1)


def test_requests_cover_every_row_and_waste_little() -> None:
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(0, 3000, 50))
    first_entries = [k if k != 7 else 6 for k in range(50)]
    for count, size in ((1, 16384), (800, 16384), (800, 128), (int(ends[-1]), 16384)):
        wanted = generator.permutation(int(ends[-1]))[:count]
        requests = plan_requests(wanted, ends=ends, first_entries=first_entries, instance_bytes=size)
        rows = [row for request in requests for row in request.rows]
        assert sorted(rows) == list(range(count))
        for request in requests:
            assert request.end - request.start <= MAX_REQUEST
            for row, offset in zip(request.rows, request.offsets, strict=True):
                entry = int(np.searchsorted(ends, wanted[row], side="right"))
                begin = (int(wanted[row]) - (int(ends[entry - 1]) if entry else 0)) * size
                assert first_entries[entry] == request.entry and request.start + offset == begin
                assert request.start <= begin and begin + size <= request.end
        assert sum(request.end - request.start for request in requests) <= 1.05 * count * size
    far = plan_requests(np.array([0, 10_000, 20_000]), ends=np.array([30_000]), first_entries=[0], instance_bytes=16384)
    assert [request.end - request.start for request in far] == [16384] * 3 and MAX_GAP < 10_000 * 16384


def test_a_survey_resumes_and_names_what_is_missing_or_changed(
    local: SourceManifest, source: Path, server: FileServer, tmp_path: Path
) -> None:
    locations = {f"{source.parent}/tokens/": f"{server.url}/"}
    found = load_source(source, locations=locations)
    output = tmp_path / "manifest.json"
    asked: set[str] = set()

    def fault(path: str, number: int) -> str | None:
        """503 to each file once. By the request's number, now and then one would have it at every retry."""
        first = path not in asked
        asked.add(path)
        return "404" if "wiki" in path else "503" if first else None

    server.fault = fault
    with pytest.raises(WorkError, match="2 of 287 files did not answer: missing: .*wiki/part-0"):
        survey_to(found, output, stores=quick())
    assert not output.exists()
    server.requests, server.fault = 0, lambda path, number: None
    manifest = survey_to(found, output)
    assert server.requests == 2, "only the two that did not answer are asked again"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert manifest.fingerprint == local.fingerprint == SourceManifest.read(output).fingerprint
    assert manifest.instances == sum(Path(file.path).stat().st_size // BYTES for file in local.files)
    body, _ = server.contents["/wiki/part-0-00000.npy"]
    server.contents["/wiki/part-0-00000.npy"] = (body + b"1234", '"new"')
    with pytest.raises(WorkError, match=r"changed: .*wiki/part-0-00000.npy had \d+ bytes, has \d+; --replace"):
        survey_to(found, output, stores=quick())
    assert SourceManifest.read(output).fingerprint == manifest.fingerprint
    replaced = survey_to(found, output, replace=True, stores=quick())
    assert replaced.fingerprint != manifest.fingerprint
    shorter = load_source(source, locations=locations).__dict__ | {"sequence_length": LENGTH // 2}
    with pytest.raises(WorkError, match="changed: sequence_length was 32, is 16; --replace"):
        survey_to(Source(**shorter), output, stores=quick())
    assert SourceManifest.read(output).fingerprint == replaced.fingerprint


def test_a_manifest_that_was_edited_is_refused(local: SourceManifest, tmp_path: Path) -> None:
    content = json.loads(local.dump())
    content["files"][3]["bytes"] += BYTES
    (tmp_path / "edited.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="fingerprint does not belong"):
        SourceManifest.read(tmp_path / "edited.json")


def test_a_copy_under_another_prefix_is_the_same_source(local: SourceManifest) -> None:
    moved = [type(file)(path=f"s3://b{file.path}", bytes=file.bytes) for file in local.files]
    assert SourceManifest(**{**local.__dict__, "files": moved}).fingerprint == local.fingerprint
