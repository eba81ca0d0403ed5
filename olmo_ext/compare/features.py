"""What a run's shape is in the terms of a plot: aspect ratio, FFN ratio, taper, family."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from olmo_ext.base.sections import AttentionSection, FFNSection
from olmo_ext.compare.collect import Run
from olmo_ext.shapes.kinds import kind_text
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES


@dataclass(frozen=True, kw_only=True)
class Features:
    """Of one group; `None` where shape.json does not say."""

    d_model: int | None = None
    n_layers: int | None = None
    widths: tuple[int, ...] = ()
    """Inner FFN width per layer: d_ff summed over the sub-MLPs."""

    sub_widths: tuple[tuple[int, ...], ...] = ()
    attention_widths: tuple[int, ...] = ()
    """heads * head_dim per layer."""

    ffn_kinds: tuple[str, ...] = ()
    """Per layer the type and the options that are not its defaults: `hope, update_periods [1, 4]`."""

    mixer_kinds: tuple[str, ...] = ()
    """Per layer: `titans, form mag, window 64`."""

    num_sub_mlps: int | None = None
    ratio: float | None = None
    """Mean d_ff of one sub-MLP over d_model."""

    taper: str | None = None
    """`cosine`, `linear`, ..., `groups`, or none for equal widths."""

    taper_range: str | None = None
    """`1.5-0.5`."""

    family: str = "unknown"
    """Types with their options, number of sub-MLPs and taper: groups of one family differ in size (for scaling)."""

    non_embedding: int | None = None
    """Parameters: attention (gates included) and FFN matrices."""

    total: int | None = None
    """Parameters of the whole model."""

    attention: int | None = None
    ffn: int | None = None
    flops_per_token: float | None = None
    """Training FLOPs a token, attention over the whole sequence (PaLM, appendix B)."""

    flops_per_token_causal: float | None = None
    """The same with the half of the attention that causal masking leaves."""

    kv_cache_bytes_per_token: float | None = None
    """Bytes that a token adds to the cache of all layers."""

    state_bytes: float | None = None
    """Bytes that decoding keeps per sequence whatever its length (fp32)."""

    @property
    def aspect(self) -> float | None:
        """d_model / n_layers."""
        return self.d_model / self.n_layers if self.d_model and self.n_layers else None


def features(run: Run) -> Features:
    """Read a run's shape.json, and the taper rule from its config."""
    shape = run.shape
    layers = shape.get("layers") or []
    if not layers:
        return Features()
    sub_widths = tuple(tuple(int(w) for w in layer["ffn"]["d_ff"]) for layer in layers)
    widths = tuple(sum(layer) for layer in sub_widths)
    attention = tuple(int(a["n_heads"]) * int(a["head_dim"]) for a in (layer["attention"] for layer in layers))
    counts = shape.get("parameters") or {}
    flops = shape.get("flops_per_token") or {}
    subs = {len(layer) for layer in sub_widths}
    taper, taper_range = _taper(run, widths)
    mean = sum(widths) / sum(len(layer) for layer in sub_widths)
    ffn_kinds = tuple(kind_text(FFN_TYPES, *_kind(run, layer, "ffn")) for layer in layers)
    mixer_kinds = tuple(kind_text(ATTENTION_TYPES, *_kind(run, layer, "attention")) for layer in layers)
    return Features(
        d_model=shape.get("d_model"),
        n_layers=len(layers),
        widths=widths,
        sub_widths=sub_widths,
        attention_widths=attention,
        ffn_kinds=ffn_kinds,
        mixer_kinds=mixer_kinds,
        num_sub_mlps=subs.pop() if len(subs) == 1 else None,
        ratio=mean / shape["d_model"] if shape.get("d_model") else None,
        taper=taper,
        taper_range=taper_range,
        family=_family(ffn_kinds, mixer_kinds, sub_widths, taper, taper_range),
        non_embedding=counts.get("non_embedding"),
        total=counts.get("total"),
        attention=counts.get("attention"),
        ffn=counts.get("ffn"),
        flops_per_token=flops.get("training"),
        flops_per_token_causal=flops.get("training_causal"),
        kv_cache_bytes_per_token=shape.get("kv_cache_bytes_per_token"),
        state_bytes=shape.get("state_bytes"),
    )


def _kind(run: Run, layer: Mapping[str, Any], part: str) -> tuple[str, Mapping[str, Any]]:
    """Type and options of a layer's `ffn` or `attention`; the config's where shape.json is older than `options`."""
    name, options = str(layer[part]["type"]), layer[part].get("options")
    if isinstance(options, Mapping):
        return name, options
    model = run.config.get("model")
    section = model.get(part) if isinstance(model, Mapping) else None
    if not isinstance(section, Mapping):
        return name, {}
    known = {field.name for field in fields(FFNSection if part == "ffn" else AttentionSection)}
    return name, {key: value for key, value in section.items() if key not in known and value is not None}


def _taper(run: Run, widths: tuple[int, ...]) -> tuple[str | None, str | None]:
    model = run.config.get("model")
    ffn = model.get("ffn") if isinstance(model, Mapping) else None
    rule = ffn.get("taper") if isinstance(ffn, Mapping) else None
    if isinstance(rule, Mapping):
        if rule.get("schedule"):
            start, end = rule.get("start"), rule.get("end")
            if start is None or end is None:
                return str(rule["schedule"]), None
            return str(rule["schedule"]), f"{float(start):g}–{float(end):g}"
        if rule.get("groups"):
            return "groups", "/".join(f"{float(g):g}" for g in rule["groups"])
    return ("widths", None) if len(set(widths)) > 1 else (None, None)


def _family(
    ffn_kinds: Collection[str],
    mixer_kinds: Collection[str],
    sub_widths: tuple[tuple[int, ...], ...],
    taper: str | None,
    taper_range: str | None,
) -> str:
    parts = [_joined(ffn_kinds)]
    subs = sorted({len(layer) for layer in sub_widths})
    if subs != [1]:
        parts.append("K=" + "/".join(map(str, subs)))
    if taper:
        parts.append(f"{taper} {taper_range or ''}".strip())
    if set(mixer_kinds) != {"softmax"}:
        parts.append(f"{_joined(mixer_kinds)} attention")
    return ", ".join(parts)


def _joined(kinds: Collection[str]) -> str:
    """`softmax+titans (form mag, window 64)`."""
    named = (kind.partition(", ") for kind in sorted(set(kinds)))
    return "+".join(f"{name} ({options})" if options else name for name, _, options in named)
