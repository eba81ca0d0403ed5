"""Which data a run trains on, as a fingerprint that goes into `provenance.json` and checkpoints. No torch.

It depends on contents, order and cut, not on where files lie: sizes and sampled hashes of the files in order, token
type, sequence length, seed of the order, settings of the instance filter. A subset's fingerprint does not depend on
its length, so a run may go on with a longer subset of the same sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import DataConfig, TrainConfig
from olmo_ext.config.corpus_manifest import refuse_cut_files
from olmo_ext.config.schema import DEFAULT_ORDER_SEED
from olmo_ext.data.repetition import RepetitionFilter
from olmo_ext.data.subset import Subset, fingerprint_of
from olmo_ext.data.tokens import TokenFile, check_dtype, inspect_files
from olmo_ext.data.validation_sets import PERPLEXITY_SETS

PREPARED = frozenset(f"{name}.npy" for name in PERPLEXITY_SETS)
"""Files of `olmo-ext eval --prepare`."""


def training_paths(data: DataConfig) -> list[str]:
    """The token files of a `data` section in order: `paths`, or `datasets` by sorted label as upstream takes them.

    :raises InputError: if there are none, or both.
    """
    paths, datasets = data.paths, data.datasets
    if paths and datasets:
        raise InputError("data.paths and data.datasets are both given", right="one of them")
    if datasets:
        paths = [path for label in sorted(datasets) for path in datasets[label]]
    if not paths:
        raise InputError("no training data", where="data", right="give data.paths, data.subset or data.corpus")
    return [str(path) for path in paths]


def order_seed(data: DataConfig) -> int:
    """The seed of the order: `data.seed`, or the official one where the config leaves it out."""
    seed = data.seed
    return DEFAULT_ORDER_SEED if seed is None else int(seed)


def open_subset(config: TrainConfig) -> Subset:
    """The subset of a resolved config, checked against the config.

    :raises InputError: another sequence length, order seed or a smaller vocabulary.
    """
    data, model = config.data, config.model
    if data.paths and not data.corpus:
        raise InputError("data.subset and data.paths are both given", right="one of them")
    assert data.subset is not None
    subset = Subset(data.subset)
    manifest, where = subset.manifest, str(subset.directory)
    if manifest.sequence_length != model.max_sequence_length:
        raise InputError(
            f"its instances have {manifest.sequence_length} tokens, model.max_sequence_length is"
            f" {model.max_sequence_length}",
            where=where,
            right="set one to the other: cutting instances again would be another order",
        )
    if order_seed(data) not in (DEFAULT_ORDER_SEED, manifest.order_seed):
        raise InputError(
            f"data.seed is {order_seed(data)}, the subset holds the order of seed {manifest.order_seed}",
            where=where,
            right="leave data.seed out, or fetch the subset of that seed",
        )
    if manifest.vocabulary_size is not None and manifest.vocabulary_size > model.vocab_size:
        raise InputError(
            f"its vocabulary has {manifest.vocabulary_size:,} ids, model.vocab_size is {model.vocab_size:,}",
            where=where,
            right="the model of this tokenizer",
        )
    return subset


def inspect_training_files(config: TrainConfig) -> list[TokenFile]:
    """Every token file of the config, looked at and checked."""
    data, model = config.data, config.model
    kind = check_dtype(data.memmap_dtype, model.vocab_size, where="data.memmap_dtype")
    paths = training_paths(data)
    refuse_cut_files(paths)
    return inspect_files(
        paths,
        dtype=kind,
        sequence_length=model.max_sequence_length,
        vocabulary_size=model.vocab_size,
    )


def _filter_settings(data: DataConfig) -> dict[str, int] | None:
    chosen = RepetitionFilter.from_config(data.instance_filter)
    return None if chosen is None else chosen.to_json()


def data_fingerprint(config: TrainConfig) -> dict[str, Any]:
    """The training data of a resolved config, JSON-like.

    :return: `fingerprint`, `kind` (`files` or `subset`), `instances`, `tokens`, `order_seed`, `sequence_length`,
        `dtype`, `instance_filter`, for a subset in the official order its `source`, and, to tell what differs,
        `files` or `shards`.
    :raises InputError: naming the file that cannot be used.
    """
    data = config.data
    facts: dict[str, Any] = {}
    if data.subset:
        manifest = open_subset(config).manifest
        facts |= {"kind": "subset", "instances": manifest.instances, "order_seed": manifest.order_seed}
        facts |= {"sequence_length": manifest.sequence_length, "dtype": manifest.dtype}
        facts |= {"sequence": manifest.fingerprint, "shard_instances": manifest.shard_instances}
        facts["shards"] = [[shard.instances, shard.sha256] for shard in manifest.shards]
        if manifest.order_name is None:
            # What a paper's figures name: see `data` in an expected.yaml.
            facts["source"] = f"{manifest.source_name}, seed {manifest.order_seed}, epoch {manifest.order_epoch}"
        content: Any = manifest.fingerprint
    else:
        files = inspect_training_files(config)
        masks = data.label_mask_paths or []
        facts |= {"kind": "files", "instances": sum(f.num_instances for f in files), "order_seed": order_seed(data)}
        facts |= {"sequence_length": config.model.max_sequence_length, "dtype": data.memmap_dtype}
        facts["files"] = [[Path(file.path).name, file.num_bytes, file.sample] for file in files]
        content = [[file.num_bytes, file.sample] for file in files]
        if masks:
            looked_at = inspect_files(
                masks, dtype=check_dtype("uint8", None), sequence_length=facts["sequence_length"], vocabulary_size=2
            )
            facts["label_masks"] = [[Path(file.path).name, file.num_bytes, file.sample] for file in looked_at]
            content = [content, [[file.num_bytes, file.sample] for file in looked_at]]
    facts["instance_filter"] = _filter_settings(data)
    facts["tokens"] = facts["instances"] * facts["sequence_length"]
    settings = {name: facts[name] for name in ("order_seed", "sequence_length", "dtype", "instance_filter")}
    return {"fingerprint": fingerprint_of({"content": content, **settings}), **facts}


def evaluation_fingerprints(config: TrainConfig) -> dict[str, str]:
    """Fingerprint of the token files of every perplexity evaluator, by label."""
    by_label = {}
    for evaluator in config.evaluators:
        if evaluator.type != "lm":
            continue
        section, model = evaluator.data, config.model
        kind = check_dtype(section.memmap_dtype, model.vocab_size, where=f"evaluators: {evaluator.label}")
        length, paths = model.max_sequence_length, training_paths(section)
        for path in map(Path, paths):
            if path.name in PREPARED and not path.exists():
                right = f"`olmo-ext eval --prepare {path.parent}` fetches the papers' sets"
                raise InputError("no such file", where=str(path), right=right)
        refuse_cut_files(paths)
        files = inspect_files(paths, dtype=kind, sequence_length=length, vocabulary_size=model.vocab_size)
        content = [[file.num_bytes, file.sample] for file in files]
        by_label[evaluator.label] = fingerprint_of([content, section.memmap_dtype, length])
    return by_label


def compare_fingerprints(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What differs between the data a run began with and the data that is there now, one sentence each.

    Files that have moved, and a subset that has grown or shrunk, are the same data.

    :return: empty if training may go on.
    """
    if recorded["kind"] != present["kind"]:
        return [f"the data was a list of {recorded['kind']}, now it is {present['kind']}"]
    names = ("order_seed", "sequence_length", "dtype", "instance_filter")
    differing = [
        f"{name} was {recorded[name]}, now it is {present[name]}" for name in names if recorded[name] != present[name]
    ]
    if present["kind"] == "subset":
        differing += _compare_shards(recorded, present)
    else:
        differing += _compare_files(recorded["files"], present["files"], "file")
        differing += _compare_files(recorded.get("label_masks", []), present.get("label_masks", []), "label mask")
    if not differing and recorded["fingerprint"] != present["fingerprint"]:
        differing.append(f"the fingerprint was {recorded['fingerprint'][:12]}, now it is {present['fingerprint'][:12]}")
    return differing


def _compare_shards(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    if recorded["sequence"] != present["sequence"]:
        return ["the subset was taken from another source or order"]
    if recorded["shard_instances"] != present["shard_instances"]:
        return []
    pairs = enumerate(zip(recorded["shards"], present["shards"], strict=False))
    return [
        f"shard {number} has other content (sha256 was {ours[1][:12]}, now it is {theirs[1][:12]})"
        for number, (ours, theirs) in pairs
        if ours[0] == theirs[0] and ours[1] != theirs[1]
    ]


def _compare_files(recorded: Sequence[Sequence[Any]], present: Sequence[Sequence[Any]], word: str) -> list[str]:
    before, now = [tuple(entry[1:]) for entry in recorded], [tuple(entry[1:]) for entry in present]
    if before == now:
        return []
    if sorted(before) == sorted(now):
        at = next(k for k, (ours, theirs) in enumerate(zip(before, now, strict=True)) if ours != theirs)
        return [f"the {word}s are the same in another order: number {at} was {recorded[at][0]}, now {present[at][0]}"]
    if len(before) != len(now):
        gone = [recorded[k][0] for k, entry in enumerate(before) if entry not in now]
        text = f"the list had {len(before)} {word}s, now it has {len(now)}"
        return [f"{text}; {gone[0]} is missing" if gone else text]
    at = next(k for k, (ours, theirs) in enumerate(zip(before, now, strict=True)) if ours != theirs)
    name = recorded[at][0] if recorded[at][0] == present[at][0] else f"{recorded[at][0]} (now {present[at][0]})"
    if before[at][0] != now[at][0]:
        return [f"{word} {at}, {name}, had {before[at][0]} bytes, now it has {now[at][0]}"]
    return [f"{word} {at}, {name}, has other content at the same size"]
