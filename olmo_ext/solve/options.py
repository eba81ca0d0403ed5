"""The words of `olmo-ext solve`: ranges, printed counts, tapers, and the problem they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import parse_count, parse_fraction, parse_number
from olmo_ext.base.sections import AttentionSection, FFNSection, OpenSection, TaperSection
from olmo_ext.config.run_config import RunConfig, load_run_config, parse_override
from olmo_ext.config.schema import coerce_class
from olmo_ext.shapes.budget import printed_interval
from olmo_ext.shapes.layers import FFNSpec, ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, AttentionType, FFNType
from olmo_ext.shapes.resolve import read_taper
from olmo_ext.shapes.taper import Taper
from olmo_ext.solve.problem import Interval, Problem
from olmo_ext.solve.refusals import refuse_impossible_options

QUANTITIES = {
    "non_embedding": "--non-embedding",
    "total": "--total",
    "training_flops_per_token": "--training-flops",
}

AROUND = {"embedding_size": 100_352, "max_sequence_length": 4096, "weight_tying": False, "qk_norm": True}
"""OLMo-2's, where neither an option nor `--like` says otherwise."""


def whole_numbers(text: str, *, option: str, step: int = 1) -> tuple[int, ...]:
    """`6`, `4,6,8`, `4..24`, `4..24:2`; a range steps over multiples of its step.

    :raises InputError: naming the option.
    """
    try:
        if ".." not in text:
            values = tuple(parse_count(part) for part in text.split(","))
        else:
            ends, _, by = text.partition(":")
            low, _, high = ends.partition("..")
            step = parse_count(by) if by else step
            if step < 1:
                raise ValueError(f"step {step} is not positive")
            first = -(-parse_count(low) // step) * step
            values = tuple(range(first, parse_count(high) + 1, step))
    except ValueError as error:
        raise InputError(str(error), where=option, right="as 6, 4,6,8, 4..24 or 1024..2048:64") from None
    if not values or min(values) < 1:
        raise InputError(f"{text!r} holds no positive whole number", where=option)
    return values


def interval(text: str, *, option: str, share: bool = False) -> Interval:
    """`0.4`, `40%`, or `0.4..0.8`.

    :param share: of a whole: above 0 and at most 1, a percentage or not.
    :raises InputError: naming the option.
    """
    parse = parse_fraction if share else lambda value: float(parse_number(value))
    low, dots, high = text.partition("..")
    try:
        pair = parse(low), parse(high if dots else low)
    except ValueError as error:
        raise InputError(str(error), where=option, right="a number, or a range as 0.4..0.8") from None
    if not 0 <= pair[0] <= pair[1]:
        raise InputError(f"{text!r} is no range", where=option, right="the smaller number first")
    if share and not 0 < pair[1] <= 1:
        raise InputError(f"{text!r} is no share", where=option, right="above 0 and at most 1 (100%)")
    return pair


def weights(text: str, *, option: str) -> Interval:
    """`45M` means all that rounds to it; `40M..50M` a range.

    :raises InputError: naming the option.
    """
    if ".." in text:
        return interval(text, option=option)
    low, high = printed_interval(text, where=option)
    return float(low), float(high)


def parse_taper(text: str, *, multiple_of: int) -> Taper:
    """`cosine:1.5:0.5`, `sigmoid:1.5:0.5:10` (steepness), `groups:1.5,1,0.5`.

    :raises InputError: for anything else.
    """
    kind, *rest = text.split(":")
    try:
        if kind == "groups" and len(rest) == 1:
            section = TaperSection(groups=[float(parse_number(part)) for part in rest[0].split(",")])
        elif len(rest) in (2, 3):
            numbers = [float(parse_number(part)) for part in rest]
            steepness = numbers[2] if len(numbers) == 3 else None
            section = TaperSection(schedule=kind, start=numbers[0], end=numbers[1], steepness=steepness)
        else:
            raise ValueError(f"{text!r} names no taper")
        return read_taper(section, multiple_of=multiple_of)
    except ValueError as error:
        raise InputError(str(error), where="--taper", right="as cosine:1.5:0.5 or groups:1.5,1,0.5") from None


def taper_section(taper: Taper) -> dict[str, Any]:
    """A taper as the config's section."""
    if taper.groups:
        return {"groups": list(taper.groups), "multiple_of": taper.multiple_of}
    section: dict[str, Any] = {"schedule": taper.schedule, "start": taper.start, "end": taper.end}
    if taper.schedule == "sigmoid":
        section["steepness"] = taper.steepness
    return {**section, "multiple_of": taper.multiple_of}


def _budget(options: Mapping[str, Any], like: RunConfig | None) -> dict[str, Any]:
    """The budget, and what belongs to the model around the shape: from a config (`--like`) or from the options."""
    given = [name for name in QUANTITIES if options.get(name) is not None]
    around = {
        "embedding_size": options["embedding_size"],
        "max_sequence_length": options["sequence_length"],
        "weight_tying": options["tied"],
        "qk_norm": options["qk_norm"],
    }
    if like is not None:
        if given:
            raise InputError(f"both --like and {QUANTITIES[given[0]]}", right="one budget")
        shape = like.shape
        if like.budget_report is not None and like.budget_report.quantity == "total":
            _refuse_uncounted(shape, where=str(like.source))
        its_own = {
            "embedding_size": shape.embedding_size,
            "max_sequence_length": shape.max_sequence_length,
            "weight_tying": shape.weight_tying,
            "qk_norm": shape.attention_layer_norm,
        }
        stated = {name: its_own[name] if value is None else value for name, value in around.items()}
        if like.budget_report is not None:
            return {"quantity": like.budget_report.quantity, "target": like.budget_report.target, **stated}
        return {"quantity": "non_embedding", "target": like.counts.non_embedding, **stated}
    if len(given) != 1:
        named = " and ".join(QUANTITIES[name] for name in given) or "no budget"
        raise InputError(f"{named} given", right=f"one of {', '.join(QUANTITIES.values())}, --like CONFIG")
    try:
        target = parse_count(options[given[0]])
    except ValueError as error:
        raise InputError(str(error), where=QUANTITIES[given[0]], right="as 113.25M") from None
    if target < 1:
        raise InputError(f"{target} is not positive", where=QUANTITIES[given[0]])
    stated = {name: AROUND[name] if value is None else value for name, value in around.items()}
    return {"quantity": given[0], "target": target, **stated}


def _refuse_uncounted(shape: ModelShape, *, where: str) -> None:
    """A total that `solve` would reckon otherwise than the config's own runs are counted.

    :raises InputError: naming the key.
    """
    uncounted = {
        "include_bias": shape.include_bias,
        "bias_for_layer_norm": shape.bias_for_layer_norm,
        "layer_norm_with_affine": not shape.layer_norm_with_affine,
        "attention_layer_norm_with_affine": shape.attention_layer_norm and not shape.attention_layer_norm_with_affine,
        "embedding_layer_norm": shape.embedding_layer_norm,
        "rope": shape.positional_embedding,
    }
    for key, differs in uncounted.items():
        if differs:
            raise InputError(
                "a budget of all parameters is searched in OLMo-2's form: no biases, affine norms, no position table",
                where=f"{where}, model.{key}",
                right="a budget.non_embedding, which these do not change",
            )


def _typed_options(
    kind: FFNType | AttentionType, pairs: Sequence[str], *, section: str, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """`key=value` options of a registered type over what is inherited and the defaults, typed as in a config.

    :param section: `ffn` or `attention`, the config's section that takes them.
    """
    option, given = f"--{section}-option", dict[str, Any]()
    for text in pairs:
        name, equals, _ = text.partition("=")
        if not equals or name not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise InputError(f"{text!r} is no option of {kind.name!r}", where=option, right=f"known: {known}")
        given[name] = parse_override(text)[1]
    typed: OpenSection = coerce_class(
        FFNSection if section == "ffn" else AttentionSection,
        {"type": kind.name, **inherited, **given},
        key=f"model.{section}",
        origins={f"model.{section}.{name}": option for name in given},
        options=kind.options,
    )
    return dict(typed.options)


def _only(values: Sequence[Any]) -> Any:
    """What all layers have, or None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def _kinds(options: Mapping[str, Any], like: RunConfig | None) -> dict[str, Any]:
    """Types, their options and the number of sub-MLPs: as named, else those that all layers of `--like` have."""
    ffn = _only([(f.type, f.options, f.num_sub_mlps, f.activation) for f in _ffns(like)]) if like else None
    mixer = _only([(layer.attention.type, layer.attention.options) for layer in like.shape.layers]) if like else None
    named, several = options["ffn_type"], options["sub_mlps"] not in (None, "1")
    ffn_type = named or ("hourglass" if several else "conventional")
    stated: dict[str, Any] = {"activation": options["activation"] or (ffn[3] if ffn else "swiglu")}
    if named is None and ffn is not None and not (several and FFN_TYPES.get(ffn[0]).single):
        ffn_type = ffn[0]
        stated["num_sub_mlps"] = (ffn[2],)
    attention_type = options["attention_type"] or (mixer[0] if mixer else "softmax")
    stated |= {"ffn_type": ffn_type, "attention_type": attention_type}
    stated["ffn_options"] = _typed_options(
        FFN_TYPES.get(ffn_type, where="--ffn-type"),
        options["ffn_option"],
        section="ffn",
        inherited=ffn[1] if ffn and ffn[0] == ffn_type else {},
    )
    stated["attention_options"] = _typed_options(
        ATTENTION_TYPES.get(attention_type, where="--attention-type"),
        options["attention_option"],
        section="attention",
        inherited=mixer[1] if mixer and mixer[0] == attention_type else {},
    )
    return stated


def _ffns(config: RunConfig) -> list[FFNSpec]:
    return [layer.ffn for layer in config.shape.layers]


def make_problem(options: Mapping[str, Any]) -> Problem:
    """The problem that the command line states; every option that is left out stays free.

    :raises InputError: naming the option.
    """
    like = None
    if options.get("like") is not None:
        like = load_run_config(Path(options["like"]), check_budget_too=False)
    stated: dict[str, Any] = {
        **_budget(options, like),
        **_kinds(options, like),
        "tolerance": options["tolerance"],
        "multiple_of": options["multiple_of"],
        "kv_heads": options["kv_heads"],
    }
    lists = (
        ("layers", "layers", 1),
        ("num_sub_mlps", "sub_mlps", 1),
        ("heads", "heads", 1),
        ("head_dim", "head_dim", 2),
    )
    for name, key, step in lists:
        if options[key] is not None:
            stated[name] = whole_numbers(options[key], option=f"--{key.replace('_', '-')}", step=step)
    if any(dim % 2 for dim in stated.get("head_dim", ())):
        raise InputError("an odd head_dim", where="--head-dim", right="rotary embeddings turn pairs: even sizes")
    if options["d_model"] is not None:
        stated["d_model"] = whole_numbers(options["d_model"], option="--d-model", step=options["d_model_multiple_of"])
    else:
        step = options["d_model_multiple_of"]
        stated["d_model"] = tuple(range(step, 8193, step))
    if options["d_ff"] is not None:
        stated["d_ff"] = interval(options["d_ff"], option="--d-ff")
    for name, share in (("ratio", False), ("total_ratio", False), ("aspect", False), ("attention_share", True)):
        if options[name] is not None:
            stated[name] = interval(options[name], option=f"--{name.replace('_', '-')}", share=share)
    for name in ("attention", "ffn"):
        if options[name] is not None:
            stated[name] = weights(options[name], option=f"--{name}")
    if options["taper"] is not None:
        stated["taper"] = parse_taper(options["taper"], multiple_of=options["taper_multiple_of"])
    problem = Problem(**stated)
    refuse_impossible_options(problem)
    return problem
