"""The training loader gives upstream's samples, for any number of ranks and workers, and after a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.sections import TrainConfig
from olmo_ext.data.loader import TrainLoader, build_train_loader
from olmo_ext.data.order import first_of_order
from tests.data.helpers import VOCABULARY, make_values

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Files = Callable[..., list[Path]]


def upstream_loader(values: TrainConfig, *, rank: int = 0, world_size: int = 1) -> DataLoader:
    """OLMo's own data set, iterable and collator."""
    from olmo.config import DataConfig, InstanceFilterConfig, PaddingDirection
    from olmo.data import DataCollator, IterableDataset, MemMapDataset

    data, model = values.data, values.model
    chosen = data.instance_filter
    dataset = MemMapDataset(
        *data.paths,
        chunk_size=model.max_sequence_length,
        memmap_dtype=DataConfig(memmap_dtype=data.memmap_dtype).effective_memmap_dtype,
        include_instance_metadata=False,
        pad_token_id=model.pad_token_id,
        eos_token_id=model.eos_token_id,
        generate_attention_mask=data.generate_attention_mask,
        generate_doc_lengths=data.generate_doc_lengths,
        label_mask_paths=data.label_mask_paths,
        instance_filter_config=InstanceFilterConfig(**dataclasses.asdict(chosen)) if chosen else None,
    )
    iterable = IterableDataset(
        dataset,  # type: ignore[arg-type]
        values.global_train_batch_size,
        seed=data.seed,
        drop_last=True,
        rank=rank,
        world_size=world_size,
        fs_local_rank=0,
        num_threads=0,
    )
    collator = DataCollator(pad_direction=PaddingDirection.right, pad_token_id=model.pad_token_id)
    batch = values.global_train_batch_size // world_size
    return DataLoader(iterable, batch_size=batch, drop_last=True, collate_fn=collator)


def loader_of(values: TrainConfig, tmp_path: Path, *, rank: int = 0, world_size: int = 1) -> TrainLoader:
    return build_train_loader(values, rank=rank, world_size=world_size, work_dir=tmp_path / "work")


def global_steps(values: TrainConfig, tmp_path: Path, world_size: int, **state: int) -> list[list[int]]:
    """Sorted sample ids of every step over all ranks."""
    ranks = []
    for rank in range(world_size):
        loader = loader_of(values, tmp_path, rank=rank, world_size=world_size)
        for name, value in state.items():
            setattr(loader.dataset, name, value)
        ranks.append([batch["index"].tolist() for batch in loader])
    return [sorted(sum(step, [])) for step in zip(*ranks, strict=True)]


FILTER = {"repetition_max_period": 13, "repetition_min_period": 1, "repetition_max_count": 32}


def test_batches_equal_upstreams_in_every_key_type_and_value(token_files: Files, tmp_path: Path) -> None:
    paths = token_files(2000, 6409, 1300)
    masks = []
    for path in paths:
        masks.append(path.with_suffix(".mask"))
        (np.fromfile(path, dtype=np.uint32) % 3 > 0).tofile(masks[-1])
    values = make_values(
        paths,
        length=64,
        max_duration="1ep",
        instance_filter=FILTER,
        generate_attention_mask=True,
        generate_doc_lengths=True,
        label_mask_paths=[str(mask) for mask in masks],
    )
    ours, theirs = list(loader_of(values, tmp_path)), list(upstream_loader(values))
    assert len(ours) == len(theirs) == (31 + 100 + 20) // 8
    for our_batch, their_batch in zip(ours, theirs, strict=True):
        assert our_batch.keys() == their_batch.keys()
        for key, value in their_batch.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(our_batch[key], value, rtol=0, atol=0)
            else:
                assert our_batch[key] == value
    decisions = torch.cat([batch["instance_mask"] for batch in ours])
    assert decisions.any() and not decisions.all(), "the data must try both decisions"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 3])
def test_every_rank_reads_what_upstream_gives_it(
    token_files: Files, tmp_path: Path, world_size: int, workers: int
) -> None:
    """101 instances: the rest of a batch is left out whatever the world size."""
    values = make_values(token_files(16 * 60 + 5, 16 * 41), max_duration="1ep", num_workers=workers)
    for rank in range(world_size):
        ours = [batch["index"].tolist() for batch in loader_of(values, tmp_path, rank=rank, world_size=world_size)]
        theirs = upstream_loader(values, rank=rank, world_size=world_size)
        assert ours == [batch["index"].tolist() for batch in theirs]
        assert len(ours) == 101 // 8


@pytest.mark.once
def test_steps_are_the_same_for_any_world_size_in_the_second_epoch_after_a_restart(
    token_files: Files, tmp_path: Path
) -> None:
    """96 samples, batch 32, stopped at step 4: the second epoch goes on at its second step."""
    values = make_values(token_files(16 * 96), global_train_batch_size=32, max_duration=6)
    straight = []
    loader = loader_of(values, tmp_path)
    for epoch in range(2):
        loader.dataset.reshuffle(epoch)
        straight += [sorted(batch["index"].tolist()) for batch in loader]
    assert len(straight) == 6 and straight[0] != straight[3]
    for world_size in (1, 2, 4):
        assert global_steps(values, tmp_path, world_size, epoch=1, start_index=32) == straight[4:]


@pytest.mark.once
def test_persistent_workers_follow_the_epoch_and_forget_the_restart(token_files: Files, tmp_path: Path) -> None:
    """Upstream's workers keep the start index that they were started with."""
    values = make_values(token_files(16 * 40), num_workers=2, persistent_workers=True, max_duration=10)
    loader = loader_of(values, tmp_path)
    loader.dataset.start_index = 24
    first = [batch["index"].tolist() for batch in loader]
    loader.dataset.start_index = 0
    loader.dataset.reshuffle(1)
    second = [batch["index"].tolist() for batch in loader]
    assert sum(first, []) == first_of_order(40, 40, seed=6198)[24:].tolist()
    assert sum(second, []) == first_of_order(40, 40, seed=6198, epoch=1).tolist()


def test_olmos_trainer_accepts_the_data_set(token_files: Files, tmp_path: Path) -> None:
    from olmo.data import IterableDataset

    dataset = loader_of(make_values(token_files(16 * 101)), tmp_path).dataset
    assert isinstance(dataset, IterableDataset)
    assert dataset.total_size == 96 and dataset.start_index == 0 and dataset.epoch == 0


@pytest.mark.once
def test_a_large_order_is_made_once_and_found_by_a_restart(
    token_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olmo_ext.data.loader as module

    values = make_values(token_files(16 * 101), max_duration="1ep")
    expected = global_steps(values, tmp_path, 1)
    calls = []
    original = module.first_of_order
    monkeypatch.setattr(module, "KEEP_ORDER_FROM", 10)
    monkeypatch.setattr(module, "first_of_order", lambda *a, **k: calls.append(a) or original(*a, **k))
    assert global_steps(values, tmp_path, 1) == expected
    assert global_steps(values, tmp_path, 2) == expected
    assert global_steps(values, tmp_path, 1, start_index=16) == expected[2:]
    assert len(calls) == 1


def test_a_run_longer_than_its_order_was_made_for_gets_a_longer_one(
    token_files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import olmo_ext.data.loader as module

    monkeypatch.setattr(module, "KEEP_ORDER_FROM", 10)
    paths = token_files(16 * 101)
    short, long = make_values(paths, max_duration=2), make_values(paths, max_duration=5)
    loader = iter(loader_of(short, tmp_path))
    first = [sorted(next(loader)["index"].tolist()) for _ in range(2)]
    with pytest.raises(WorkError, match="more than the 16 instances"):
        next(loader)
    loader = iter(loader_of(long, tmp_path))
    assert [sorted(next(loader)["index"].tolist()) for _ in range(5)][:2] == first


def test_a_batch_larger_than_the_data_names_the_numbers(token_files: Files, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 5 instances, less than one batch of 8"):
        loader_of(make_values(token_files(16 * 5)), tmp_path)


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(token_files: Files, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="8 does not divide over 3 ranks"):
        loader_of(make_values(token_files(16 * 50)), tmp_path, world_size=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_deleted_or_cut_while_training_is_named_with_its_offset(
    token_files: Files, tmp_path: Path, workers: int
) -> None:
    for damage in (Path.unlink, lambda path: path.write_bytes(b"")):
        (path,) = token_files(16 * 800)
        loader = loader_of(make_values([path], max_duration="1ep", num_workers=workers), tmp_path)
        batches = iter(loader)
        next(batches)
        damage(path)
        with pytest.raises(WorkError, match=rf"{path}, offset \d+: .*") as caught:
            list(batches)
        assert "\n" not in str(caught.value), "one line, no traceback of a worker"


def test_ids_beyond_the_vocabulary_that_no_sample_saw_stop_the_training(token_files: Files, tmp_path: Path) -> None:
    (path,) = token_files(400_000)
    tokens = np.memmap(path, dtype=np.uint32, mode="r+")
    tokens[7000] = VOCABULARY
    tokens.flush()
    loader = loader_of(make_values([path], max_duration="1ep"), tmp_path)
    with pytest.raises(WorkError, match=rf"offset 28000: id {VOCABULARY} is beyond"):
        list(loader)
