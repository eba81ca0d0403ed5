"""Which numbers may stand beside each other: what differs between two runs besides the shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from olmo_ext.base.quantities import EQUAL_WITHIN
from olmo_ext.base.secrecy import without_credentials
from olmo_ext.compare.collect import Run, validation_metric

_NOT_RECORDED = object()
_OTHER_THAN_SHAPE = (
    "run_name", "seed", "model", "budget", "save_folder", "wandb", "device_train_microbatch_size",
    "device_train_batch_size", "fsdp", "ddp", "distributed_strategy", "compile", "node", "console_log_interval",
    "activation_checkpointing", "plugins", "remote_save_folder", "try_load_latest_save", "evaluators",
    "save_overwrite", "speed_monitor", "canceled_check_interval", "data", "gen1_gc_interval",
)  # fmt: skip


def blocking_differences(run: Run, baseline: Run, label: str | None) -> list[str]:
    """What forbids comparing the losses of two runs; empty if nothing does."""
    differences = []
    differences += _differs("training data", run.data.get("fingerprint"), baseline.data.get("fingerprint"))
    differences += _differs("tokenizer", *(_tokenizer(side) for side in (run, baseline)))
    if label is not None:
        left, right = (evaluation_fingerprint(side, label) for side in (run, baseline))
        differences += _differs(f"validation set {label}", left, right)
        for side in (run, baseline):
            if validation_metric(label) not in side.series:
                differences.append(f"{side.name} has no loss on {label}")
    left_tokens, right_tokens = final_tokens(run, label), final_tokens(baseline, label)
    if left_tokens and right_tokens and abs(left_tokens / right_tokens - 1) > EQUAL_WITHIN:
        differences.append(f"tokens seen {left_tokens:,} against {right_tokens:,}")
    return differences


def unlike_runs(runs: list[Run], label: str | None) -> list[str]:
    """What keeps the runs of one group, which should differ in their seed only, from having a mean; empty if nothing.

    Data in another order has another fingerprint too, and seeds may change the order.
    """
    reasons = []
    for run in runs[1:]:
        for reason in blocking_differences(run, runs[0], label):
            reordered = run.data.get("order_seed") != runs[0].data.get("order_seed")
            if not (reordered and reason.startswith("training data")):
                reasons.append(f"{reason} ({run.name} and {runs[0].name})")
    return reasons


def _tokenizer(run: Run) -> Any:
    """Without its folder: which tokens the text became is in the fingerprints, and a corpus lies elsewhere on every
    machine."""
    named = run.data.get("tokenizer")
    return named.rpartition("/")[2] if isinstance(named, str) and named.startswith("/") else named


def evaluation_fingerprint(run: Run, label: str) -> str | None:
    """The fingerprint of a validation set: recorded under its own label, or under that of the evaluator that holds
    several sets in `data.datasets`."""
    recorded = run.data.get("evaluation") or {}
    if label in recorded:
        return recorded[label]
    for evaluator in run.config.get("evaluators") or []:
        data = evaluator.get("data") if isinstance(evaluator, Mapping) else None
        if isinstance(data, Mapping) and label in (data.get("datasets") or {}):
            return recorded.get(evaluator.get("label"))
    return None


def final_tokens(run: Run, label: str | None) -> int:
    """Tokens at the last evaluation, or at the last row where there is none."""
    series = run.series.get(validation_metric(label)) if label else None
    return int(series.tokens[-1]) if series is not None else run.progress()[1]


def remarks(run: Run, baseline: Run, label: str | None) -> list[str]:
    """What differs besides the shape without forbidding the comparison, and what was not recorded."""
    differences = []
    if run.data.get("order_seed") != baseline.data.get("order_seed"):
        differences.append(f"data order: seed {run.data.get('order_seed')} against {baseline.data.get('order_seed')}")
    for key in ("fingerprint", "tokenizer"):
        if run.data.get(key) is None and baseline.data.get(key) is None:
            differences.append(f"data {key} not recorded on either side")
    if label is not None and evaluation_fingerprint(run, label) is None:
        differences.append("fingerprint of the validation set not recorded")
    left, right = _flat(run.config), _flat(baseline.config)
    for key in sorted(left.keys() | right.keys()):
        if left.get(key, _NOT_RECORDED) != right.get(key, _NOT_RECORDED):
            differences.append(f"{key}: {_shown(left, key)} against {_shown(right, key)}")
    for key in ("device", "world_size"):
        a, b = run.provenance.get(key), baseline.provenance.get(key)
        if a != b:
            differences.append(f"{key}: {a} against {b}")
    # Without the hashes, which would make a line of every pair: the provenance of each run has them.
    for key, text in (("revision", "code: another revision"), ("diff_sha256", "code: other uncommitted changes")):
        a, b = ((side.provenance.get("code") or {}).get(key) for side in (run, baseline))
        if a != b:
            differences.append(text)
    a_packages, b_packages = (side.provenance.get("packages") or {} for side in (run, baseline))
    for name in ("torch", "ai2-olmo"):
        if a_packages.get(name) != b_packages.get(name):
            differences.append(f"{name}: {a_packages.get(name)} against {b_packages.get(name)}")
    return differences


def same_device(runs: list[Run]) -> bool:
    """Whether all runs used one kind of device and as many of them: without that no times are compared."""
    return len({(run.provenance.get("device"), run.provenance.get("world_size")) for run in runs}) <= 1


def _differs(name: str, left: Any, right: Any) -> list[str]:
    if left == right:
        return []
    if _short(left) == _short(right):
        return [f"{name} {left} against {right}"]
    return [f"{name} {_short(left)} against {_short(right)}"]


def _short(value: Any) -> str:
    return "not recorded" if value is None else str(value)[:12]


def _shown(flat: Mapping[str, Any], key: str) -> str:
    # A path or an address may carry a password, and this line goes into reports.
    return without_credentials(str(flat[key]))[:60] if key in flat else "not set"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of the part of a config that is not the shape, the seed, the data or the machine."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in _OTHER_THAN_SHAPE:
            continue
        if isinstance(value, Mapping):
            result.update(_flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
