"""From the compact rules of a config to one entry per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import olmo_ext.shapes.types  # noqa: F401  (registers the built-in types)
from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import ModelConfig, TaperSection, TrainConfig
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec, LayerShape, ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, TAPER_SCHEDULES, FFNType
from olmo_ext.shapes.taper import DEFAULT_MULTIPLE, Taper, round_half_even, taper_widths


@dataclass
class _Section:
    """The model section with what errors and notes need."""

    model: ModelConfig
    where: str | None
    notes: list[str] = field(default_factory=list)

    def error(self, key: str, what: str, right: str | None = None) -> InputError:
        return InputError(what, where=f"{self.where}, {key}" if self.where else key, right=right)

    def positive(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"{value!r} is no positive whole number")
        return value


def resolve_shape(config: TrainConfig, *, where: str | None = None) -> ModelShape:
    """The shape that a config describes.

    :param where: the config's name, for errors.
    :raises InputError: naming the key of a value that is odd, indivisible or contradicts another.
    """
    return _resolve(config, where)[0]


def resolution_notes(config: TrainConfig, *, where: str | None = None) -> list[str]:
    """What resolving had to round or change, in words; `plan` prints it."""
    return _resolve(config, where)[1]


def _resolve(config: TrainConfig, where: str | None) -> tuple[ModelShape, list[str]]:
    model = config.model
    section = _Section(model, where)
    d_model = section.positive("model.d_model", model.d_model)
    num_layers = section.positive("model.n_layers", model.n_layers)
    ffns = _ffn_layers(section, d_model, num_layers)
    attentions = _attention_layers(section, d_model, num_layers)
    if config.data.generate_doc_lengths:
        _refuse_document_masks(section, attentions)
    vocabulary = section.positive("model.vocab_size", model.vocab_size)
    embedding_size = model.embedding_size or vocabulary
    if embedding_size < vocabulary:
        raise section.error(
            "model.embedding_size", f"{embedding_size} rows for a vocabulary of {vocabulary}", "at least the vocabulary"
        )
    bias_for_norm = model.bias_for_layer_norm
    shape = ModelShape(
        d_model=d_model,
        layers=tuple(LayerShape(ffn=f, attention=a) for f, a in zip(ffns, attentions, strict=True)),
        embedding_size=embedding_size,
        max_sequence_length=section.positive("model.max_sequence_length", model.max_sequence_length),
        weight_tying=model.weight_tying,
        include_bias=model.include_bias,
        bias_for_layer_norm=model.include_bias if bias_for_norm is None else bias_for_norm,
        layer_norm_with_affine=model.layer_norm_with_affine,
        attention_layer_norm=model.attention_layer_norm,
        attention_layer_norm_with_affine=model.attention_layer_norm_with_affine,
        embedding_layer_norm=model.embedding_layer_norm,
        positional_embedding=not (model.alibi or model.rope),
        norm_after=model.norm_after,
    )
    return shape, section.notes


def _ffn_layers(section: _Section, d_model: int, num_layers: int) -> list[FFNSpec]:
    ffn = section.model.ffn
    kind = FFN_TYPES.get(ffn.type, where=f"{section.where}, model.ffn.type" if section.where else None)
    bases = _base_widths(section, kind, d_model)
    if ffn.taper is None:
        widths = [bases] * num_layers
    else:
        per_sub_mlp = [_tapered(section, ffn.taper, base, num_layers) for base in bases]
        widths = [tuple(column[layer] for column in per_sub_mlp) for layer in range(num_layers)]
    options = {name: ffn.options.get(name, default) for name, default in kind.options.items()}
    specs: dict[tuple[int, ...], FFNSpec] = {}
    for d_ff in widths:
        if d_ff not in specs:
            spec = FFNSpec(type=ffn.type, d_ff=d_ff, activation=section.model.activation_type, options=options)
            if (wrong := kind.check(spec, d_model)) is not None:
                raise section.error("model.ffn", wrong)
            specs[d_ff] = spec
    return [specs[d_ff] for d_ff in widths]


def _base_widths(section: _Section, kind: FFNType, d_model: int) -> tuple[int, ...]:
    """d_ff per sub-MLP before the taper."""
    ffn = section.model.ffn
    count = section.positive("model.ffn.num_sub_mlps", ffn.num_sub_mlps)
    multiple = 1 if ffn.multiple_of is None else section.positive("model.ffn.multiple_of", ffn.multiple_of)
    from_olmo = _olmo_width(section, d_model)
    if ffn.d_ff is not None:
        listed = ffn.d_ff if isinstance(ffn.d_ff, list) else [ffn.d_ff] * count
        if isinstance(ffn.d_ff, list) and count not in (1, len(listed)):
            raise section.error(
                "model.ffn.d_ff", f"{len(listed)} widths for num_sub_mlps {count}", "one width, or one per sub-MLP"
            )
        if not listed:
            raise section.error("model.ffn.d_ff", "an empty list", "one width per sub-MLP")
        for width in listed:
            if section.positive("model.ffn.d_ff", width) % multiple:
                raise section.error("model.ffn.d_ff", f"{width} is no multiple of multiple_of {multiple}")
        if ffn.ratio is not None and any(abs(w - ffn.ratio * d_model) >= max(multiple, 1) for w in listed):
            raise section.error(
                "model.ffn.d_ff", f"d_ff {ffn.d_ff} and ratio {ffn.ratio:g} disagree", "set one of them to null"
            )
        if section.model.mlp_hidden_size is not None and any(width != from_olmo for width in listed):
            hidden = section.model.mlp_hidden_size
            raise section.error(
                "model.ffn.d_ff",
                f"d_ff {ffn.d_ff} and mlp_hidden_size {hidden} (d_ff {from_olmo}) disagree",
                "set one of them to null",
            )
        bases = tuple(listed)
    elif ffn.ratio is not None:
        exact = ffn.ratio * d_model
        width = round_half_even(exact / multiple) * multiple
        if width < 1:
            what = f"{ffn.ratio:g} of d_model {d_model} rounds to no multiple of {multiple}"
            raise section.error("model.ffn.ratio", what)
        if abs(width - exact) > 1e-6:
            change = f"d_ff is {width} ({width / exact - 1:+.2%})"
            section.notes.append(f"ratio {ffn.ratio:g} of {d_model} is {exact:.6g}; {change}")
        bases = (width,) * count
    else:
        if from_olmo % multiple and not (ffn.taper and ffn.taper.widths):
            raise section.error("model.ffn.multiple_of", f"d_ff {from_olmo} is no multiple of {multiple}")
        bases = (from_olmo,) * count
    if kind.single and len(bases) != 1:
        raise section.error(
            "model.ffn.num_sub_mlps", f"type {kind.name!r} has one sub-MLP, not {len(bases)}", "use type: hourglass"
        )
    return bases


def _olmo_width(section: _Section, d_model: int) -> int:
    """d_ff from OLMo's own keys, which count both halves of SwiGLU."""
    model = section.model
    key = "model.mlp_ratio" if model.mlp_hidden_size is None else "model.mlp_hidden_size"
    ratio = model.mlp_ratio * d_model
    hidden = section.positive(key, ratio if model.mlp_hidden_size is None else model.mlp_hidden_size)
    if model.activation_type != "swiglu":
        return hidden
    if hidden % 2:
        raise section.error(key, f"{hidden} is odd, and SwiGLU needs two equal halves", "an even number: twice d_ff")
    return hidden // 2


def read_taper(section: TaperSection, *, multiple_of: int | None = None, where: str | None = None) -> Taper:
    """The taper rule of a typed config section.

    :param multiple_of: the FFN's own, used where the taper names none.
    :param where: of the schedule's name, for errors.
    :raises InputError: for an unknown schedule.
    :raises ValueError: if it is not exactly one of schedule, groups and widths, or a number is out of range.
    """
    given = [key for key in ("schedule", "groups", "widths") if getattr(section, key)]
    if len(given) != 1:
        named = " and ".join(given) or "nothing"
        raise ValueError(f"{named} given: one of schedule (with start and end), groups, widths")
    multiple = section.multiple_of or multiple_of or (1 if given == ["widths"] else DEFAULT_MULTIPLE)
    if multiple < 1:
        raise ValueError(f"multiple_of {multiple} is not positive")
    if given != ["schedule"]:
        extra = [key for key in ("start", "end") if getattr(section, key) is not None]
        if extra:
            raise ValueError(f"{extra[0]} belongs to a schedule, not to {given[0]}")
        values: Sequence[float] = getattr(section, given[0])
        if any(value <= 0 for value in values):
            raise ValueError(f"{given[0]} {list(values)} must be positive")
        if given == ["groups"]:
            return Taper(groups=tuple(values), multiple_of=multiple)
        return Taper(widths=tuple(int(value) for value in values), multiple_of=multiple)
    kind = TAPER_SCHEDULES.get(str(section.schedule), where=where)
    ends: list[float] = []
    for key, factor in (("start", section.start), ("end", section.end)):
        if factor is None:
            raise ValueError(f"a schedule needs {key}, as a multiple of d_ff")
        if factor <= 0:
            raise ValueError(f"{key} {factor:g} must be positive")
        ends.append(factor)
    options = {**kind.options, **section.options}
    if (wrong := kind.check(options)) is not None:
        raise ValueError(wrong)
    return Taper(schedule=section.schedule, start=ends[0], end=ends[1], options=options, multiple_of=multiple)


def _tapered(section: _Section, taper_section: TaperSection, base: int, num_layers: int) -> tuple[int, ...]:
    ffn = section.model.ffn
    try:
        where = f"{section.where}, model.ffn.taper.schedule" if section.where else None
        taper = read_taper(taper_section, multiple_of=ffn.multiple_of, where=where)
        tapered = taper_widths(base=base, num_layers=num_layers, taper=taper)
    except ValueError as error:
        raise section.error("model.ffn.taper", str(error)) from None
    notes = list(tapered.notes)
    wanted = {"d_ff": ffn.d_ff, "ratio": ffn.ratio, "mlp_hidden_size": section.model.mlp_hidden_size}
    named = next((key for key, value in wanted.items() if value is not None), None)
    if taper.widths and named and abs(tapered.mean - base) >= taper.multiple_of:
        what = f"widths of mean {tapered.mean:.6g} and {named} {wanted[named]}"
        if named != "d_ff":
            what += f" (d_ff {base})"
        raise section.error("model.ffn.taper.widths", f"{what} disagree", f"set {named} to null")
    if sum(tapered.widths) != base * num_layers and (named or not taper.widths):
        notes.append(
            f"taper: the mean width is {tapered.mean:.6g}, {tapered.deviation:+.3%} from d_ff {base} "
            f"(multiples of {taper.multiple_of})"
        )
    section.notes.extend(note for note in notes if note not in section.notes)
    return tapered.widths


def _per_layer(section: _Section, key: str, value: Any, num_layers: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_layers
    if len(value) != num_layers:
        raise section.error(key, f"{len(value)} entries for {num_layers} layers", "one value, or one per layer")
    return value


def _attention_layers(section: _Section, d_model: int, num_layers: int) -> list[AttentionSpec]:
    model, attention = section.model, section.model.attention
    types = _per_layer(section, "model.attention.type", attention.type, num_layers)
    heads_key = "model.attention.n_heads" if attention.n_heads is not None else "model.n_heads"
    named_heads = model.n_heads if attention.n_heads is None else attention.n_heads
    heads = _per_layer(section, heads_key, named_heads, num_layers)
    for value in heads:
        section.positive(heads_key, value)
    kv_key = "model.attention.n_kv_heads" if attention.n_kv_heads is not None else "model.n_kv_heads"
    named_kv = model.n_kv_heads if attention.n_kv_heads is None else attention.n_kv_heads
    if named_kv is None and model.multi_query_attention:
        named_kv = 1
    kv_heads = _per_layer(section, kv_key, named_kv, num_layers)
    head_dim = _head_dim(section, heads_key, heads, d_model)
    specs = []
    for type_name, n_heads, n_kv_heads in zip(types, heads, kv_heads, strict=True):
        where = f"{section.where}, model.attention.type" if section.where else None
        kind = ATTENTION_TYPES.get(type_name, where=where)
        n_kv_heads = n_heads if n_kv_heads is None else section.positive(kv_key, n_kv_heads)
        if n_heads % n_kv_heads:
            raise section.error(kv_key, f"{n_kv_heads} does not divide {n_heads} heads")
        spec = AttentionSpec(
            type=type_name,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            options={name: attention.options.get(name, default) for name, default in kind.options.items()},
        )
        if (wrong := kind.check(spec, d_model)) is not None:
            raise section.error("model.attention", wrong)
        specs.append(spec)
    return specs


def _refuse_document_masks(section: _Section, attentions: list[AttentionSpec]) -> None:
    for spec in attentions:
        if not ATTENTION_TYPES.get(spec.type).honours_document_masks:
            what = f"attention type {spec.type!r} cannot keep documents of one sequence apart"
            raise section.error("data.generate_doc_lengths", what, "false")


def _head_dim(section: _Section, heads_key: str, heads: list[int], d_model: int) -> int:
    """One head size for all layers: their rotary tables are shared."""
    given = section.model.attention.head_dim
    if given is None:
        if len(set(heads)) > 1:
            raise section.error(
                "model.attention.head_dim", "heads differ by layer and no head_dim is given", "name the head size"
            )
        if d_model % heads[0]:
            raise section.error(
                heads_key, f"{heads[0]} heads do not divide d_model {d_model}", "name model.attention.head_dim"
            )
        given = d_model // heads[0]
    head_dim = section.positive("model.attention.head_dim", given)
    if section.model.rope and head_dim % 2:
        raise section.error(
            "model.attention.head_dim",
            f"{head_dim} is odd, and rotary embeddings turn pairs",
            "an even head_dim, or another number of heads",
        )
    return head_dim
