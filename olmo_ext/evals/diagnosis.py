"""What each layer does to the residual stream over real text.

    rho_mlp(l)    mean over tokens of cos(FFN update of layer l, residual stream before it is added)
    rho_block(l)  mean over tokens of cos(update of the whole layer, residual stream at its start)

as in "Tapered Language Models" (arXiv 2606.23670), with Pearson's r of each with depth. A layer with several sub-MLPs
has a rho for each, and its rho_mlp is that of their summed update against the stream before the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from olmo_ext.base.errors import WorkError
from olmo_ext.evals.taps import LayerTap, find_taps, first_tensor
from olmo_ext.evals.target import EvaluatedModel

RANK_TOKENS = 4096
"""Tokens whose inner activations enter the effective rank; it cannot exceed them."""

DEAD_BELOW = 0.01
"""A unit is never active if its largest magnitude over all tokens is at most this share of the layer's RMS."""


def effective_rank(rows: torch.Tensor) -> float:
    """exp of the Shannon entropy of the normalised singular values (Roy and Vetterli 2007), of [tokens, d_ff]."""
    values = torch.linalg.svdvals(rows.double())
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    shares = shares[shares > 0]
    return float(torch.exp(-(shares * shares.log()).sum()))


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine per token of [.., d]; a vector of length 0 has cosine 0 with everything."""
    a, b = a.double(), b.double()
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(lengths > 0, (a * b).sum(dim=-1) / lengths.clamp_min(1e-300), torch.zeros_like(lengths))


def pearson_with_depth(values: Sequence[float]) -> float | None:
    """Pearson's r of a quantity with the number of its layer; None for fewer than three layers or a constant."""
    number = len(values)
    if number < 3:
        return None
    depth_mean, mean = (number - 1) / 2, math.fsum(values) / number
    covariance = math.fsum((layer - depth_mean) * (value - mean) for layer, value in enumerate(values))
    spread = math.fsum((value - mean) ** 2 for value in values)
    depth_spread = math.fsum((layer - depth_mean) ** 2 for layer in range(number))
    return covariance / math.sqrt(spread * depth_spread) if spread > 1e-24 else None


@dataclass
class _Sum:
    total: float = 0.0
    count: int = 0

    def add(self, values: torch.Tensor) -> None:
        self.total += float(values.double().sum())
        self.count += values.numel()

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass
class _Inner:
    """Running statistics of one FFN's inner activations."""

    largest: torch.Tensor | None = None
    squares: float = 0.0
    elements: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)

    def add(self, values: torch.Tensor, keep: int) -> None:
        flat = values.reshape(-1, values.shape[-1]).float()
        largest = flat.abs().amax(dim=0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.squares += float(flat.double().pow(2).sum())
        self.elements += flat.numel()
        if keep > 0:
            # Evenly over the batch, so that the kept tokens are not one document's.
            chosen = torch.linspace(0, len(flat) - 1, min(keep, len(flat))).round().long()
            self.rows.append(flat[chosen.to(flat.device)].cpu())

    def dead_share(self) -> float:
        assert self.largest is not None
        rms = math.sqrt(self.squares / self.elements)
        return float((self.largest <= DEAD_BELOW * rms).double().mean())


@dataclass
class _Layer:
    sums: dict[str, _Sum] = field(default_factory=dict)
    parts: list[dict[str, _Sum]] = field(default_factory=list)
    inner: list[_Inner] = field(default_factory=list)

    def add(self, name: str, values: torch.Tensor) -> None:
        self.sums.setdefault(name, _Sum()).add(values)


@contextmanager
def _recording(taps: Sequence[LayerTap]) -> Iterator[list[dict[str, Any]]]:
    """Hooks that keep, for one forward pass, what the taps point at; removed on leaving."""
    seen: list[dict[str, Any]] = [{} for _ in taps]
    handles = []

    def keep(layer: int, name: str, *, output: bool) -> Any:
        def hook(module: Any, arguments: Any, keywords: dict[str, Any], result: Any = None) -> None:
            value = result if output else (arguments or tuple(keywords.values()))
            seen[layer][name] = first_tensor(value).detach()

        return hook

    def watch(module: Any, layer: int, name: str, *, output: bool) -> None:
        hook = keep(layer, name, output=output)
        if output:
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        else:
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for layer, tap in enumerate(taps):
        watch(tap.block, layer, "start", output=False)
        watch(tap.block, layer, "end", output=True)
        watch(tap.attention, layer, "attention", output=True)
        for number, part in enumerate(tap.ffn):
            watch(part.residual, layer, f"residual.{number}", output=False)
            watch(part.update, layer, f"update.{number}", output=True)
            if part.inner is not None:
                watch(part.inner, layer, f"inner.{number}", output=False)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _take(layer: _Layer, seen: dict[str, Any], tap: LayerTap, keep: int) -> None:
    start, end = seen["start"].double(), seen["end"].double()
    block_update = end - start
    updates = [seen[f"update.{number}"].double() for number in range(len(tap.ffn))]
    residual = seen["residual.0"].double()
    ffn_update = torch.stack(updates).sum(dim=0)
    attention = seen["attention"].double()
    layer.add("rho_mlp", cosine(ffn_update, residual))
    layer.add("rho_block", cosine(block_update, start))
    layer.add("rho_attention", cosine(attention, start))
    layer.add("residual_norm", start.norm(dim=-1))
    layer.add("block_update_norm", block_update.norm(dim=-1))
    layer.add("ffn_update_norm", ffn_update.norm(dim=-1))
    layer.add("attention_update_norm", attention.norm(dim=-1))
    # Attention and FFN updates have to add up to the layer's: otherwise a tap reads the wrong place.
    missed = (block_update - attention - ffn_update).norm() / end.norm().clamp_min(1e-30)
    if float(missed) > 1e-3:
        raise WorkError(
            f"{type(tap.block).__name__}: attention and FFN updates miss the layer's own by {float(missed):.1%}"
        )
    for number, update in enumerate(updates):
        if len(layer.parts) <= number:
            layer.parts.append({"rho": _Sum(), "update_norm": _Sum()})
            layer.inner.append(_Inner())
        layer.parts[number]["rho"].add(cosine(update, seen[f"residual.{number}"]))
        layer.parts[number]["update_norm"].add(update.norm(dim=-1))
        if f"inner.{number}" in seen:
            layer.inner[number].add(seen[f"inner.{number}"], keep)


def _layer_report(number: int, layer: _Layer) -> dict[str, Any]:
    report: dict[str, Any] = {"layer": number, **{name: value.mean for name, value in layer.sums.items()}}
    attention = report["attention_update_norm"]
    report["ffn_over_attention"] = report["ffn_update_norm"] / attention if attention else None
    parts = []
    for part, inner in zip(layer.parts, layer.inner, strict=True):
        row: dict[str, Any] = {name: value.mean for name, value in part.items()}
        if inner.largest is not None:
            kept = torch.cat(inner.rows)
            row |= {"d_ff": len(inner.largest), "dead_share": inner.dead_share(), "rank_tokens": len(kept)}
            row["effective_rank"] = effective_rank(kept)
        parts.append(row)
    known = [row for row in parts if "d_ff" in row]
    if known and len(known) == len(parts):
        # Over a layer's sub-MLPs: ranks add up, the share is of all units.
        units = sum(row["d_ff"] for row in known)
        report["effective_rank"] = math.fsum(row["effective_rank"] for row in known)
        report["effective_rank_share"] = report["effective_rank"] / units
        report["dead_share"] = math.fsum(row["dead_share"] * row["d_ff"] for row in known) / units
        report["d_ff"] = units
    report["sub_mlps"] = parts
    return report


def diagnose(
    model: EvaluatedModel, batches: Sequence[torch.Tensor], *, rank_tokens: int = RANK_TOKENS
) -> dict[str, Any]:
    """Run text through a model and report every layer.

    :param batches: token ids, each [batch, time].
    :param rank_tokens: inner activations kept per FFN for the effective rank.
    :returns: `layers` (a mapping per layer), `pearson_with_depth`, `tokens`, the settings.
    """
    taps = find_taps(model.module)
    layers = [_Layer() for _ in taps]
    tokens = 0
    keep = -(-rank_tokens // len(batches))
    for ids in batches:
        with _recording(taps) as seen:
            model.logits(ids)
        for layer, values, tap in zip(layers, seen, taps, strict=True):
            _take(layer, values, tap, keep)
        tokens += ids.numel()
    reports = [_layer_report(number, layer) for number, layer in enumerate(layers)]
    for report in reports:
        bad = [name for name, value in report.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise WorkError(f"layer {report['layer']}: {bad[0]} is not finite")
    quantities = ("rho_mlp", "rho_block", "rho_attention", "effective_rank_share", "ffn_over_attention")
    depth = {
        name: pearson_with_depth([report[name] for report in reports])
        for name in quantities
        if all(report.get(name) is not None for report in reports)
    }
    return {
        "pooling": "mean over tokens of the cosine",
        "tokens": tokens,
        "rank_tokens": rank_tokens,
        "dead_below": DEAD_BELOW,
        "pearson_with_depth": depth,
        "layers": reports,
    }
