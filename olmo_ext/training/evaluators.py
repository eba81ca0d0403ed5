"""Evaluations during training that give the same number on any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo.config import EvaluatorConfig, EvaluatorType, TrainConfig
from olmo.data import DataCollator
from olmo.eval import Evaluator, build_downstream_evaluator, label_to_task_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.data.loader import TokenInstances
from olmo_ext.data.tokens import TokenFile, TokenReader, check_dtype, inspect_files
from olmo_ext.training.distributed import Ranks, agree
from olmo_ext.upstream.trainer import RunTrainer

PADDING = -1
"""Index of a masked instance that fills up a rank's last batches, so that all ranks run as many."""


@dataclass
class LanguageModelEvaluator(Evaluator):
    """Mean loss over the labels that count, all ranks together, summed in float64.

    Upstream repeats instances to fill the ranks, averages instances instead of tokens, and counts masked labels.
    """

    groups: list[str] = field(default_factory=list)
    """Labels of the reported numbers: the evaluator's own, or one per entry of `data.datasets`."""

    device: torch.device = torch.device("cpu")
    sums: torch.Tensor | None = None
    """[groups, 2]: summed loss, number of labels."""

    def reset_metrics(self) -> None:
        self.sums = torch.zeros(len(self.groups), 2, dtype=torch.float64, device=self.device)

    def update_metrics(self, batch: dict[str, Any], ce_loss: torch.Tensor, logits: torch.Tensor) -> None:
        """:param ce_loss: [instances, positions - 1], zero where no label counts."""
        del logits
        assert self.sums is not None
        totals = torch.stack([ce_loss.double().sum(-1), batch["predicted"].double().sum(-1)], dim=-1)
        group = [self.groups.index(metadata["label"]) for metadata in batch["metadata"]]
        self.sums.index_add_(0, torch.tensor(group, device=self.device), totals)

    def compute_metrics(self) -> dict[str, float]:
        assert self.sums is not None
        sums = self.sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        metrics: dict[str, float] = {}
        for group, (loss_sum, labels) in zip(self.groups, sums.tolist(), strict=True):
            if labels:
                loss = loss_sum / labels
                metrics[f"eval/{group}/CrossEntropyLoss"] = loss
                metrics[f"eval/{group}/Perplexity"] = math.exp(loss) if loss < 700 else math.inf
                metrics[f"eval/{group}/tokens"] = labels
        return metrics


@dataclass
class DownstreamEvaluator(Evaluator):
    """Upstream's task metric, which counts each item once, with the number of items beside it."""

    num_items: int | None = None

    def compute_metrics(self) -> dict[str, float]:
        metrics = super().compute_metrics()
        if self.num_items is not None:
            metrics[f"eval/downstream/{self.label}_items"] = self.num_items
        return metrics


class _Instances(Dataset):
    """Validation instances with the group that each belongs to; `PADDING` gives a masked one.

    :param groups: label of the group and number of instances, in order.
    """

    def __init__(self, instances: TokenInstances, groups: list[tuple[str, int]]) -> None:
        self._instances = instances
        self._labels = [label for label, _ in groups]
        self._ends = np.cumsum([number for _, number in groups])

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = max(index, 0)
        item = dict(self._instances[place], index=place)
        item["instance_mask"] = bool(item.get("instance_mask", True)) and index != PADDING
        item["metadata"] = {"label": self._labels[int(np.searchsorted(self._ends, place, side="right"))]}
        return item


def _open_instances(cfg: TrainConfig, config: EvaluatorConfig) -> tuple[TokenInstances, list[tuple[str, int]]]:
    """The evaluator's checked token files, and the label and number of instances of each group."""
    section, where = config.data, f"evaluators, {config.label}"
    if bool(section.paths) == bool(section.datasets):
        names = "both data.paths and data.datasets" if section.paths else "neither data.paths nor data.datasets"
        raise InputError(f"has {names}", where=where, right="one of them")
    by_label = {config.label: section.paths} if section.paths else section.datasets or {}
    vocabulary, length = cfg.model.vocab_size, cfg.model.max_sequence_length
    dtype = check_dtype(section.memmap_dtype, vocabulary, where=where)
    groups: list[tuple[str, int]] = []
    files: list[TokenFile] = []
    for label in sorted(by_label):
        labelled = inspect_files(by_label[label], dtype=dtype, sequence_length=length, vocabulary_size=vocabulary)
        groups.append((label, sum(file.num_instances for file in labelled)))
        files += labelled
    reader = _reader(files, dtype=dtype, length=length, vocabulary=vocabulary)
    masks = None
    if section.label_mask_paths:
        byte = np.dtype(np.uint8)
        mask_files = inspect_files(section.label_mask_paths, dtype=byte, sequence_length=length, vocabulary_size=2)
        if [file.num_instances for file in mask_files] != [file.num_instances for file in files]:
            raise InputError(
                f"label masks of {[file.num_instances for file in mask_files]} instances for token files of"
                f" {[file.num_instances for file in files]}",
                where=where,
                right="one byte for each token, the masks in the order of the token files (datasets by label)",
            )
        masks = _reader(mask_files, dtype=byte, length=length, vocabulary=2)
    pad = cfg.model.pad_token_id if section.generate_attention_mask else None
    return TokenInstances(reader, label_masks=masks, attention_mask_for=pad), groups


def _reader(files: list[TokenFile], *, dtype: np.dtype, length: int, vocabulary: int) -> TokenReader:
    return TokenReader(
        [file.path for file in files],
        [file.num_instances for file in files],
        dtype=dtype,
        sequence_length=length,
        vocabulary_size=vocabulary,
    )


def batches_of_rank(indices: list[int], *, batch_size: int, world_size: int, rank: int) -> Iterator[list[int]]:
    """One rank's batches; every rank gets as many, of the same sizes, the last ones filled up with `PADDING`."""
    for start in range(0, len(indices), batch_size * world_size):
        part = indices[start : start + batch_size * world_size]
        size = math.ceil(len(part) / world_size)
        own = part[rank * size : (rank + 1) * size]
        yield own + [PADDING] * (size - len(own))


def build_language_model_evaluator(
    cfg: TrainConfig, config: EvaluatorConfig, *, device: torch.device, world_size: int, rank: int
) -> LanguageModelEvaluator:
    """:raises InputError: if the evaluator names no data, or files that cannot be used."""
    instances, groups = _open_instances(cfg, config)
    num_instances = len(instances)
    batch_size = config.device_eval_batch_size or cfg.device_eval_batch_size
    indices = list(range(num_instances))
    subset = config.subset_num_batches if config.subset_num_batches is not None else cfg.eval_subset_num_batches
    if subset > 0 and subset * batch_size < num_instances:
        # `subset_num_batches` counts batches of one device, so that the subset is the same on any number of ranks.
        order = np.random.Generator(np.random.PCG64(config.data.seed or 0)).permutation(num_instances)
        indices = sorted(order[: subset * batch_size].tolist())
    batches = list(batches_of_rank(indices, batch_size=batch_size, world_size=world_size, rank=rank))
    loader: Any = DataLoader(
        _Instances(instances, groups),
        batch_sampler=batches,
        collate_fn=DataCollator(pad_direction=config.data.pad_direction, pad_token_id=cfg.model.pad_token_id),
        num_workers=config.data.num_workers,
        pin_memory=config.data.pin_memory and device.type == "cuda",
        timeout=config.data.timeout,
    )
    return LanguageModelEvaluator(
        label=config.label,
        type=EvaluatorType.lm,
        eval_loader=loader,
        eval_metric={},
        subset_num_batches=-1,
        groups=[label for label, _ in groups],
        device=device,
    )


def build_task_evaluator(cfg: TrainConfig, config: EvaluatorConfig, tokenizer: Any, device: torch.device) -> Evaluator:
    """One of upstream's tasks, from the files in its wheel.

    `subset_num_batches` counts batches of one device, as for perplexity, and takes whole items from the beginning:
    upstream's cuts every rank's own batches, another subset on every number of ranks.
    """
    built = build_downstream_evaluator(cfg, config, tokenizer, device)
    subset = built.subset_num_batches if built.subset_num_batches is not None else cfg.eval_subset_num_batches
    loader: Any = built.eval_loader
    if subset > 0 and subset * loader.batch_size < len(loader.dataset.samples):
        loader = _of_first_items(loader, subset * loader.batch_size)
    return DownstreamEvaluator(
        label=built.label,
        type=built.type,
        eval_loader=loader,
        eval_metric=built.eval_metric,
        subset_num_batches=-1,
        num_items=len({sample["doc_id"] for sample in loader.dataset.samples}),
    )


def _of_first_items(loader: Any, num_samples: int) -> DataLoader:
    """The loader of as many whole items (an item has a sample per continuation) as have so many samples, at least one.

    :param loader: upstream's, whose dataset is cut.
    """
    dataset, sampler = loader.dataset, loader.sampler
    number_of = Counter(sample["doc_id"] for sample in dataset.samples)
    kept: set[Any] = set()
    taken = 0
    for item, number in number_of.items():
        if kept and taken + number > num_samples:
            break
        kept.add(item)
        taken += number
    dataset.samples = [sample for sample in dataset.samples if sample["doc_id"] in kept]
    return DataLoader(
        dataset,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        sampler=DistributedSampler(
            dataset, num_replicas=sampler.num_replicas, rank=sampler.rank, shuffle=False, drop_last=sampler.drop_last
        ),
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )


def _load_tokenizer(cfg: TrainConfig) -> Any:
    """:raises InputError: if it is not there, or is not the model's."""
    from olmo.tokenizer import Tokenizer

    try:
        return Tokenizer.from_train_config(cfg)
    except Exception as error:  # noqa: BLE001  (files, network and upstream's own kinds)
        raise InputError(
            f"tokenizer {cfg.tokenizer.identifier!r} cannot be used: {' '.join(str(error).split())[:200]}",
            where="tokenizer.identifier",
            right=f"downstream tasks need the tokenizer of the model's {cfg.model.vocab_size} ids, as a file",
        ) from None


def reported_names(config: EvaluatorConfig) -> list[str]:
    """The prefix of the evaluator's metric names."""
    if config.type == EvaluatorType.lm:
        return [f"eval/{label}" for label in config.data.datasets or [config.label]]
    return [f"eval/downstream/{config.label}"]


def build_evaluators(cfg: TrainConfig, *, device: torch.device, world_size: int, rank: int) -> list[Evaluator]:
    """All evaluators of the config. The tokenizer is loaded only where a downstream task needs it: it may be a name
    that only the network knows.

    :raises InputError: for unknown tasks, unusable data, and two that would report under one name.
    """
    reported = Counter(name for config in cfg.evaluators for name in reported_names(config))
    if twice := [name for name, number in reported.items() if number > 1]:
        raise InputError(f"two evaluations report as {twice[0]}", where="evaluators", right="labels that differ")
    evaluators: list[Evaluator] = []
    tokenizer = None
    for config in cfg.evaluators:
        if config.type == EvaluatorType.lm:
            evaluators.append(
                build_language_model_evaluator(cfg, config, device=device, world_size=world_size, rank=rank)
            )
            continue
        if config.label not in label_to_task_map:
            otherwise = "one of olmo.eval.label_to_task_map"
            right = did_you_mean(config.label, label_to_task_map, otherwise=otherwise, most=3)
            raise InputError(f"no downstream task {config.label!r}", where="evaluators", right=right)
        tokenizer = tokenizer or _load_tokenizer(cfg)
        evaluators.append(build_task_evaluator(cfg, config, tokenizer, device))
    return evaluators


def evaluation_is_due(trainer: RunTrainer, directory: RunDirectory, ranks: Ranks) -> bool:
    """Whether the reached step should have an evaluation that metrics.jsonl lacks, as after a kill between the two."""
    step = trainer.global_step
    asked = bool(trainer.evaluators) and (
        step >= trainer.stop_step or (step > 0 and step % trainer.cfg.eval_interval == 0)
    )
    if trainer.evaluators and trainer.cfg.eval_on_load and step == trainer.first_step > 0:
        asked = True
    rows = directory.read_metrics() if asked and ranks.is_first else []
    return agree(asked and not any(row.kind == "eval" and row.step == step for row in rows), ranks)
