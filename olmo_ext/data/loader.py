"""The training loader: OLMo's order for any number of ranks and workers, from token files or from a subset.

`OrderedDataset` is an upstream `IterableDataset` for OLMo's Trainer (`start_index`, `epoch`, `reshuffle`,
`total_size`). What differs:

- The total is cut to whole global batches. Upstream cuts to a multiple of the world size (or repeats samples), so
  that 101 samples are 101, 100, 100 or 96 on 1, 2, 4 or 8 ranks; the whole batches are the same in both.
- The order is made once and kept in `work_dir`; a start finds it there. For a run much shorter than a large data
  set only the part that the run needs is made. Small orders are made again, in milliseconds, and write nothing.
- `start_index` and `epoch` live in shared memory, so that persistent workers follow them.
- Files are checked before step 1 and every instance is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo.data.iterable_dataset import IterableDataset
from torch.utils.data import DataLoader

from olmo_ext.base.errors import InputError, OlmoExtError, WorkError
from olmo_ext.base.files import file_aside
from olmo_ext.base.locks import locked
from olmo_ext.base.sections import TrainConfig
from olmo_ext.config.run_length import check_one_batch, run_length
from olmo_ext.data.fingerprint import (
    compare_fingerprints,
    data_fingerprint,
    evaluation_fingerprints,
    inspect_training_files,
    open_subset,
    order_seed,
)
from olmo_ext.data.order import first_of_order
from olmo_ext.data.repetition import RepetitionFilter
from olmo_ext.data.tokens import TokenReader, inspect_files

__all__ = [
    "OrderedDataset",
    "TokenInstances",
    "build_train_loader",
    "compare_fingerprints",
    "data_fingerprint",
    "evaluation_fingerprints",
]

KEEP_ORDER_FROM = 1 << 21
"""An order of fewer instances is made at every start (about 20 ms a million)."""


class TokenInstances(torch.utils.data.Dataset[dict[str, Any]]):
    """Instances by number, as upstream's `MemMapDataset` gives them, without the cost of an item.

    :param mask: whether the filter keeps each instance, where that is stored; else `repetition_filter` decides.
    """

    def __init__(
        self,
        reader: TokenReader,
        *,
        repetition_filter: RepetitionFilter | None = None,
        mask: np.ndarray | None = None,
        label_masks: TokenReader | None = None,
        attention_mask_for: int | None = None,
        document_lengths_by: int | None = None,
    ) -> None:
        self.reader = reader
        self.repetition_filter = repetition_filter
        self.mask = mask
        self.label_masks = label_masks
        self.attention_mask_for = attention_mask_for
        self.document_lengths_by = document_lengths_by

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.reader.read(index)
        item: dict[str, Any] = {"input_ids": torch.from_numpy(tokens.astype(np.int64))}
        if self.mask is not None:
            item["instance_mask"] = bool(self.mask[index])
        elif self.repetition_filter is not None:
            item["instance_mask"] = self.repetition_filter.keeps(tokens)
        if self.label_masks is not None:
            item["label_mask"] = torch.from_numpy(self.label_masks.read(index).astype(bool))
        if self.attention_mask_for is not None:
            item["attention_mask"] = (item["input_ids"] != self.attention_mask_for).long()
        if self.document_lengths_by is not None:
            from olmo.data.util import get_document_lengths

            item["doc_lens"] = get_document_lengths(item["input_ids"], self.document_lengths_by)
        return item


class OrderedDataset(IterableDataset):
    """Upstream's `IterableDataset` over `TokenInstances`; see the module for what differs.

    :param in_order: the instances already stand in the order of epoch 0 (a subset).
    :param needed: instances that the run will ask for in an epoch; an order may be made for these alone.
    """

    dataset: TokenInstances  # type: ignore[assignment]

    def __init__(
        self,
        dataset: TokenInstances,
        *,
        global_batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        work_dir: Path,
        in_order: bool,
        needed: int,
    ) -> None:
        self._state = torch.zeros(2, dtype=torch.int64).share_memory_()
        super().__init__(
            dataset,  # type: ignore[arg-type]
            global_batch_size,
            seed=seed,
            drop_last=True,
            world_size=world_size,
            rank=rank,
            fs_local_rank=rank,
            num_threads=0,
        )
        self.in_order = in_order
        self.order_directory = Path(work_dir)
        self.total_size = len(dataset) // global_batch_size * global_batch_size
        self.needed = min(needed, self.total_size)

    # Upstream sets these as plain attributes; workers that persist would keep what they were started with.
    @property
    def epoch(self) -> int:
        return int(self._state[0])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._state[0] = value

    @property
    def start_index(self) -> int:
        return int(self._state[1])

    @start_index.setter
    def start_index(self, value: int) -> None:
        self._state[1] = value

    def reshuffle(self, epoch: int) -> None:
        """Begin another epoch; its order is made when it is first asked for."""
        self.epoch = epoch

    def get_global_indices(self) -> np.ndarray:
        """The order of the present epoch, cut to whole batches (or to what the run needs of it)."""
        count, total = self.needed, len(self.dataset)
        if self.in_order and self.epoch == 0:
            return np.arange(count, dtype=np.uint32)
        if total < KEEP_ORDER_FROM:
            return first_of_order(total, count, seed=self.seed, epoch=self.epoch)
        path = self._order_path()
        if not path.exists():
            self.prepare()
        return np.load(path, mmap_mode="r")

    def _order_path(self) -> Path:
        name = f"order-n{len(self.dataset)}-first{self.needed}-seed{self.seed + self.epoch}.npy"
        return self.order_directory / name

    def prepare(self) -> None:
        """Make and keep the order of the present epoch where that takes long; one process does it for all."""
        if len(self.dataset) < KEEP_ORDER_FROM or (self.in_order and self.epoch == 0) or self._order_path().exists():
            return
        path = self._order_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # Without locks everyone makes the order, the same for all.
            if path.exists():
                return
            indices = first_of_order(len(self.dataset), self.needed, seed=self.seed, epoch=self.epoch)
            with file_aside(path) as file:
                np.save(file, indices)

    def _rank_indices(self) -> np.ndarray:
        """What this rank and worker reads, in order: whole device batches go round the workers."""
        indices = self.get_global_indices()
        if self.max_examples is not None:
            indices = indices[: self.max_examples]
        indices = indices[self.start_index :][self.rank :: self.world_size]
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return indices
        # The total is whole global batches, so a rank has whole device batches.
        whole = len(indices) // self.device_batch_size * self.device_batch_size
        batches = indices[:whole].reshape(-1, self.device_batch_size)
        return batches[worker.id :: worker.num_workers].reshape(-1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Read the shared state now, not at the first item: it may change in between.
        return self._items(self._rank_indices(), complete=self.needed == self.total_size)

    def _items(self, indices: np.ndarray, *, complete: bool) -> Iterator[dict[str, Any]]:
        ahead = self.device_batch_size
        try:
            for index in indices[:ahead]:
                self.dataset.reader.will_need(int(index))
            for k, index in enumerate(indices):
                if k + ahead < len(indices):
                    self.dataset.reader.will_need(int(indices[k + ahead]))
                yield {**self.dataset[int(index)], "index": int(index)}
            if not complete:
                raise WorkError(f"more than the {self.needed} instances that the run's duration asks for")
        except OlmoExtError as error:
            yield {"error": (type(error), error.args)}


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch with the keys, shapes and types of upstream's collator; instances have one length, so no padding.

    An error takes the place of its batch: the loader raises it as one line instead of a worker's traceback.
    """
    for item in items:
        if "error" in item:
            return item
    batch: dict[str, Any] = {"input_ids": torch.stack([item["input_ids"] for item in items])}
    batch["index"] = torch.tensor([item["index"] for item in items])
    first = items[0]
    if "attention_mask" in first:
        batch["attention_mask"] = torch.stack([item["attention_mask"] for item in items]).float()
    if "label_mask" in first:
        batch["label_mask"] = torch.stack([item["label_mask"] for item in items])
    if "instance_mask" in first:
        batch["instance_mask"] = torch.tensor([item["instance_mask"] for item in items])
    if "doc_lens" in first:
        longest = max(len(item["doc_lens"]) for item in items)
        pad = torch.nn.functional.pad
        batch["doc_lens"] = torch.stack([pad(item["doc_lens"], (0, longest - len(item["doc_lens"]))) for item in items])
        batch["max_doc_lens"] = [int(item["doc_lens"].max()) for item in items]
    return batch


class TrainLoader(DataLoader):
    """A DataLoader that makes the epoch's order before its workers need it and raises their errors as one line."""

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        self.dataset.prepare()  # type: ignore[attr-defined]
        for batch in super().__iter__():
            if "error" in batch:
                kind, arguments = batch["error"]
                raise kind(*arguments)
            yield batch


def _needed_instances(config: TrainConfig, available: int, *, subset: Path | None) -> int:
    """Instances that one epoch must give, after the checks that the data is enough."""
    batch = config.global_train_batch_size
    where = str(subset) if subset else "data.paths"
    check_one_batch(available, batch, where=where)
    duration = config.max_duration
    steps = run_length(config, instances=available).steps
    in_epochs = isinstance(duration, str) and duration.endswith("ep")
    if subset and not in_epochs and steps > available // batch:
        length = config.model.max_sequence_length
        raise InputError(
            f"the subset holds {available:,} instances ({available // batch:,} steps of {batch}), the run needs"
            f" {steps * batch:,} ({steps * batch * length:,} tokens)",
            where=where,
            right="fetch more with `olmo-ext data fetch --tokens`, or give max_duration in epochs (as in 2ep)",
        )
    return steps * batch


def build_train_loader(config: TrainConfig, *, rank: int, world_size: int, work_dir: Path | str) -> TrainLoader:
    """The loader of one rank.

    A subset is read as it stands. A second epoch over a subset, which only a duration in epochs asks for, is a
    shuffle of the subset by `seed + epoch`; it is not the source's second epoch.

    :param config: a resolved config.
    :param work_dir: where a large order is kept, shared by the ranks of a node.
    :raises InputError: before step 1, naming the file and numbers, for data that cannot be used.
    """
    data, model, batch = config.data, config.model, config.global_train_batch_size
    if batch % world_size:
        right = f"a multiple of {world_size}, or another number of ranks"
        raise InputError(f"global_train_batch_size {batch} does not divide over {world_size} ranks", right=right)
    repetition_filter = RepetitionFilter.from_config(data.instance_filter)
    options: dict[str, Any] = {}
    if data.generate_attention_mask:
        if model.pad_token_id is None:
            raise InputError("data.generate_attention_mask is on", right="give model.pad_token_id, which it masks")
        options["attention_mask_for"] = model.pad_token_id
    if data.generate_doc_lengths:
        if model.eos_token_id is None:
            raise InputError(
                "data.generate_doc_lengths is on", right="give model.eos_token_id, where it ends documents"
            )
        options["document_lengths_by"] = model.eos_token_id
    if data.subset:
        subset = open_subset(config)
        if data.label_mask_paths:
            raise InputError("data.label_mask_paths do not belong to a subset", right="data.paths with their masks")
        reader, seed, directory = subset.reader(model.vocab_size), subset.manifest.order_seed, subset.directory
        if repetition_filter is not None and repetition_filter == subset.filter():
            options["mask"] = subset.mask()
    else:
        files = inspect_training_files(config)
        counts = [file.num_instances for file in files]
        seed, directory = order_seed(data), None
        reader = TokenReader(
            [file.path for file in files],
            counts,
            dtype=np.dtype(data.memmap_dtype),
            sequence_length=model.max_sequence_length,
            vocabulary_size=model.vocab_size,
        )
        if data.label_mask_paths:
            options["label_masks"] = _label_masks(data.label_mask_paths, files=files, config=config)
    instances = TokenInstances(reader, repetition_filter=repetition_filter, **options)
    dataset = OrderedDataset(
        instances,
        global_batch_size=batch,
        seed=seed,
        rank=rank,
        world_size=world_size,
        work_dir=Path(work_dir),
        in_order=directory is not None,
        needed=_needed_instances(config, len(instances), subset=directory),
    )
    workers = data.num_workers or 0
    return TrainLoader(
        dataset,
        batch_size=batch // world_size,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=bool(data.pin_memory) and torch.cuda.is_available(),
        prefetch_factor=data.prefetch_factor if workers else None,
        persistent_workers=bool(data.persistent_workers) if workers else False,
        timeout=data.timeout or 0,
    )


def _label_masks(paths: Sequence[str], *, files: Sequence[Any], config: TrainConfig) -> TokenReader:
    """Readers of the masks, one byte a token, checked against the token files."""
    length = config.model.max_sequence_length
    if len(paths) != len(files):
        raise InputError(f"{len(paths)} data.label_mask_paths for {len(files)} data.paths", right="one each")
    masks = inspect_files(paths, dtype=np.dtype(np.uint8), sequence_length=length, vocabulary_size=2)
    for mask, file in zip(masks, files, strict=True):
        if mask.num_instances != file.num_instances:
            raise InputError(
                f"{mask.num_instances} instances of mask for {file.num_instances} of {file.path}",
                where=mask.path,
                right="one byte for each token, the masks in the order of data.paths",
            )
    return TokenReader(
        [mask.path for mask in masks],
        [mask.num_instances for mask in masks],
        dtype=np.dtype(np.uint8),
        sequence_length=length,
        vocabulary_size=2,
    )
