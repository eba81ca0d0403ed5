"""Instances a second of the training loader against OLMo's own, warm, with equal workers, in one run.

Both read the same token files in the same order; a subset with a stored filter mask is measured too. `plain` is a
memory map read in a loop: what the disk and the copy alone cost. Rounds are interleaved, the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILTER = {"repetition_max_period": 13, "repetition_min_period": 1, "repetition_max_count": 32}
VOCABULARY = 100278
SEQUENCE_LENGTH = 4096


def write_files(folder: Path, instances: int) -> list[str]:
    """Token files with frequent tokens frequent, as text has them: chance repetitions occur."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(8):
        share = instances // 8
        tokens = np.minimum(generator.zipf(1.3, share * SEQUENCE_LENGTH), VOCABULARY - 1).astype(np.uint32)
        tokens[:200] = 5
        paths.append(str(folder / f"part-{number}.npy"))
        tokens.tofile(paths[-1])
    return paths


def values_of(paths: list[str] | None, arguments: argparse.Namespace, *, filtered: bool, subset: Path | None) -> Any:
    return {
        "model": {"max_sequence_length": SEQUENCE_LENGTH, "vocab_size": VOCABULARY, "pad_token_id": 100277},
        "data": {
            "paths": paths,
            "subset": str(subset) if subset else None,
            "memmap_dtype": "uint32",
            "seed": 6198,
            "instance_filter": FILTER if filtered else None,
            "num_workers": arguments.workers,
        },
        "global_train_batch_size": arguments.batch_size,
        "max_duration": "1ep",
        "stop_at": None,
        "stop_after": None,
        "load_path": None,
        "reset_trainer_state": False,
    }


def ours(values: Any, folder: Path) -> Iterator[Any]:
    from olmo_ext.data.loader import build_train_loader

    return iter(build_train_loader(values, rank=0, world_size=1, work_dir=folder / "work"))


def stock(values: Any) -> Iterator[Any]:
    from olmo.config import InstanceFilterConfig, PaddingDirection
    from olmo.data import DataCollator, IterableDataset, MemMapDataset

    data = values["data"]
    dataset = MemMapDataset(
        *data["paths"],
        chunk_size=SEQUENCE_LENGTH,
        memmap_dtype=np.uint32,
        include_instance_metadata=False,
        instance_filter_config=InstanceFilterConfig(**FILTER) if data["instance_filter"] else None,
    )
    batch = values["global_train_batch_size"]
    sequence = IterableDataset(
        dataset,  # type: ignore[arg-type]
        batch,
        seed=6198,
        drop_last=True,
        world_size=1,
        rank=0,
        fs_local_rank=0,
    )
    collator = DataCollator(pad_direction=PaddingDirection.right, pad_token_id=100277)
    loader = torch.utils.data.DataLoader(
        sequence, batch_size=batch, drop_last=True, collate_fn=collator, num_workers=data["num_workers"]
    )
    return iter(loader)


def plain(paths: list[str], batch: int) -> Iterator[Any]:
    maps = [np.memmap(path, dtype=np.uint32, mode="r").reshape(-1, SEQUENCE_LENGTH) for path in paths]
    places = [(k, row) for k, rows in enumerate(maps) for row in range(len(rows))]
    order = np.random.default_rng(0).permutation(len(places))
    for begin in range(0, len(order) - batch + 1, batch):
        rows = [maps[places[k][0]][places[k][1]] for k in order[begin : begin + batch]]
        yield {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}


def microseconds(make: Callable[[], Iterator[Any]]) -> float:
    """Microseconds an instance from the second batch to the last."""
    iterator, count, begin = make(), 0, 0.0
    for number, batch in enumerate(iterator):
        if number == 0:
            begin = time.perf_counter()
        else:
            count += len(batch["input_ids"])
    return (time.perf_counter() - begin) / count * 1e6


def subset_of(paths: list[str], folder: Path) -> Path:
    from olmo_ext.data.fetch import FetchOptions, SubsetFetch
    from olmo_ext.data.sources import load_source
    from olmo_ext.data.survey import survey

    (folder / "list.txt").write_text("\n".join(paths))
    manifest = survey(load_source(folder / "list.txt"), quiet=True)
    options = FetchOptions(quiet=True)
    SubsetFetch(folder / "subset", manifest, instances=manifest.instances, seed=6198, options=options).run()
    return folder / "subset"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_files(folder, arguments.instances)
        subset = subset_of(paths, folder)
        contenders: dict[str, Callable[[], Iterator[Any]]] = {}
        for filtered in (False, True):
            word = "filter on " if filtered else "filter off"
            values = values_of(paths, arguments, filtered=filtered, subset=None)
            of_subset = values_of(None, arguments, filtered=filtered, subset=subset)
            contenders[f"stock, {word}"] = lambda values=values: stock(values)  # type: ignore[misc]
            contenders[f"files, {word}"] = lambda values=values: ours(values, folder)  # type: ignore[misc]
            contenders[f"subset, {word}"] = lambda values=of_subset: ours(values, folder)  # type: ignore[misc]
        contenders["plain memory map"] = lambda: plain(paths, arguments.batch_size)
        measured: dict[str, list[float]] = {label: [] for label in contenders}
        for _ in range(arguments.rounds):
            for label, make in contenders.items():
                measured[label].append(microseconds(make))
    median = {label: statistics.median(times) for label, times in measured.items()}
    print(f"{arguments.workers} workers, batches of {arguments.batch_size}, {arguments.instances} instances, warm")
    for label, value in median.items():
        reference = median.get(f"stock, {label.split(', ')[-1]}")
        ratio = f"  {reference / value:5.1f} x stock" if reference else ""
        print(f"{label:20s} {value:8.1f} us an instance{ratio}")


if __name__ == "__main__":
    main()
