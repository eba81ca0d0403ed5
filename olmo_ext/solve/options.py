"""The words of `olmo-ext solve`: ranges, printed counts, tapers, and the problem they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from olmo_ext.base.errors import InputError
from olmo_ext.base.quantities import parse_count, parse_fraction, parse_number
from olmo_ext.base.sections import AttentionSection, FFNSection, OpenSection, TaperSection
from olmo_ext.config.run_config import RunConfig, load_run_config, parse_override
from olmo_ext.config.schema import coerce_class
from olmo_ext.shapes.budget import QUANTITIES, printed_interval
from olmo_ext.shapes.counts import count
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES, FFN_TYPES, TAPER_SCHEDULES, AttentionType, FFNType
from olmo_ext.shapes.resolve import read_taper
from olmo_ext.shapes.taper import Taper
from olmo_ext.solve.problem import Interval, Problem
from olmo_ext.solve.refusals import refuse_impossible_options

FLAGS = {"training_flops_per_token": "--training-flops", "num_sub_mlps": "--sub-mlps"}
"""Options that are shorter than the name of their quantity."""

AROUND = {name: name for name in ("embedding_size", "max_sequence_length", "weight_tying")}
AROUND |= {"qk_norm": "attention_layer_norm"}
"""What a problem takes from the model of `--like` around the shape, and its name there."""


def flag_of(quantity: str) -> str:
    """The option that states a quantity."""
    return FLAGS.get(quantity, "--" + quantity.replace("_", "-"))


class Words(click.ParamType):
    """A click type from a function of the text.

    :param name: the placeholder in the help.
    :param right: what would be right where `parse` raises a ValueError; an InputError of its own says that itself.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], right: str) -> None:
        self.name, self._parse, self._right = name, parse, right

    def read(self, text: str, *, option: str) -> Any:
        """What an option's text means.

        :raises InputError: naming the option.
        """
        try:
            return self._parse(text)
        except InputError as error:
            raise InputError(error.what, where=error.where or option, right=error.right) from None
        except ValueError as error:
            raise InputError(str(error), where=option, right=self._right) from None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.read(value, option=param.opts[0] if param else self.name)


def whole_numbers(text: str, *, step: int = 1) -> tuple[int, ...]:
    """`6`, `4,6,8`, `4..24`, `4..24:2`; a range steps over multiples of its step."""
    if ".." in text:
        ends, _, by = text.partition(":")
        low, _, high = ends.partition("..")
        step = parse_count(by) if by else step
        if step < 1:
            raise ValueError(f"step {step} is not positive")
        values = tuple(range(-(-parse_count(low) // step) * step, parse_count(high) + 1, step))
    else:
        values = tuple(parse_count(part) for part in text.split(","))
    if not values or min(values) < 1:
        raise InputError(f"{text!r} holds no positive whole number")
    return values


def head_dims(text: str) -> tuple[int, ...]:
    """Even whole numbers; a range takes the even ones."""
    values = whole_numbers(text, step=2)
    if any(dim % 2 for dim in values):
        raise InputError("an odd head_dim", right="rotary embeddings turn pairs: even sizes")
    return values


def interval(text: str, *, parse: Callable[[str], Any] = parse_number) -> Interval:
    """`0.4`, or `0.4..0.8`."""
    low, dots, high = text.partition("..")
    first, last = float(parse(low)), float(parse(high if dots else low))
    if not 0 <= first <= last:
        raise InputError(f"{text!r} is no range", right="the smaller number first")
    return first, last


def share(text: str) -> Interval:
    """`40%`, `0.4` or `20%..40%` of a whole."""
    first, last = interval(text, parse=parse_fraction)
    if not 0 < last <= 1:
        raise InputError(f"{text!r} is no share", right="above 0 and at most 1 (100%)")
    return first, last


def weights(text: str) -> Interval:
    """`45M` means all that rounds to it; `40M..50M` a range."""
    low, high = interval(text) if ".." in text else printed_interval(text)
    return float(low), float(high)


def budget(text: str) -> int:
    """`113.25M`."""
    if (target := parse_count(text)) < 1:
        raise InputError(f"{target} is not positive")
    return target


def tolerance(text: str) -> float:
    """`0.5%` or `0.005`."""
    if (deviation := parse_fraction(text)) < 0:
        raise InputError(f"{text} is negative")
    return deviation


A_LIST, A_RANGE = "as 6, 4,6,8, 4..24 or 1024..2048:64", "a number, or a range as 0.4..0.8"
NUMBERS, HEAD_DIMS = Words("range", whole_numbers, A_LIST), Words("range", head_dims, A_LIST)
INTERVAL, SHARE = Words("range", interval, A_RANGE), Words("range", share, A_RANGE)
WEIGHTS, BUDGET = Words("count", weights, A_RANGE), Words("count", budget, "as 113.25M")
TOLERANCE = Words("text", tolerance, "as 0.5% or 0.005")


def parse_taper(text: str, *, multiple_of: int) -> Taper:
    """`cosine:1.5:0.5`, `sigmoid:1.5:0.5:10` (steepness), `groups:1.5,1,0.5`."""
    kind, *rest = text.split(":")
    if kind == "groups" and len(rest) == 1:
        section = TaperSection(groups=[float(parse_number(part)) for part in rest[0].split(",")])
    elif len(rest) >= 2:
        # Behind start and end stand the schedule's own options, in its order.
        start, end, *more = [float(parse_number(part)) for part in rest]
        names = list(TAPER_SCHEDULES.get(kind, where="--taper").options)
        if len(more) > len(names):
            raise ValueError(f"{text!r} has {len(rest)} numbers, {kind} takes {', '.join(('start', 'end', *names))}")
        options = dict(zip(names, more, strict=False))
        section = TaperSection(schedule=kind, start=start, end=end, options=options)
    else:
        raise ValueError(f"{text!r} names no taper")
    return read_taper(section, multiple_of=multiple_of)


def taper_section(taper: Taper) -> dict[str, Any]:
    """A taper as the config's section."""
    if taper.groups:
        return {"groups": list(taper.groups), "multiple_of": taper.multiple_of}
    ends = {"schedule": taper.schedule, "start": taper.start, "end": taper.end}
    return {**ends, **taper.options, "multiple_of": taper.multiple_of}


def make_problem(options: Mapping[str, Any]) -> Problem:
    """The problem that the command line states; every option that is left out stays free.

    :param options: the command's, by the names of `Problem`'s fields where they state one.
    :raises InputError: naming the option.
    """
    like = load_run_config(Path(options["like"]), check_budget_too=False) if options["like"] else None
    stated = _budget(options, like)
    if like is not None:
        stated |= {name: getattr(like.shape, field) for name, field in AROUND.items()}
    stated |= {name: value for name in (f.name for f in fields(Problem)) if (value := options.get(name)) is not None}
    stated |= _types(options, like)
    step = options["d_model_multiple_of"]
    d_models = options["d_model"] or f"{step}..8192"
    multiples = Words("range", partial(whole_numbers, step=step), A_LIST)
    stated["d_model"] = multiples.read(d_models, option="--d-model")
    if options["taper"] is not None:
        parse = partial(parse_taper, multiple_of=options["taper_multiple_of"])
        rule = Words("rule", parse, "as cosine:1.5:0.5 or groups:1.5,1,0.5")
        stated["taper"] = rule.read(options["taper"], option="--taper")
    problem = Problem(**stated)
    refuse_impossible_options(problem)
    return problem


def _budget(options: Mapping[str, Any], like: RunConfig | None) -> dict[str, Any]:
    """The budget's quantity and target: stated, or from a config (`--like`)."""
    given = [name for name in QUANTITIES if options[name] is not None]
    if like is None:
        if len(given) != 1:
            named = " and ".join(map(flag_of, given)) or "no budget"
            raise InputError(f"{named} given", right=f"one of {', '.join(map(flag_of, QUANTITIES))}, --like CONFIG")
        return {"quantity": given[0], "target": options[given[0]]}
    if given:
        raise InputError(f"both --like and {flag_of(given[0])}", right="one budget")
    report = like.budget_report
    if report is None:
        return {"quantity": "non_embedding", "target": like.counts.non_embedding}
    if report.quantity == "total":
        _refuse_uncounted(like.shape, where=str(like.source))
    return {"quantity": report.quantity, "target": report.target}


def _refuse_uncounted(shape: ModelShape, *, where: str) -> None:
    """Refuse a model whose total the search would count otherwise, because it knows some keys at their defaults only.

    :raises InputError: naming the key.
    """
    for field in fields(ModelShape):
        if field.default is MISSING or field.name in AROUND.values():
            continue
        if count(replace(shape, **{field.name: field.default})).total != count(shape).total:
            key = "rope" if field.name == "positional_embedding" else field.name
            raise InputError(
                "a budget of all parameters is searched in OLMo-2's form: no biases, affine norms, no position table",
                where=f"{where}, model.{key}",
                right="a budget.non_embedding, which these do not change",
            )


def _types(options: Mapping[str, Any], like: RunConfig | None) -> dict[str, Any]:
    """Types, their options and the number of sub-MLPs: as named, else those that all layers of `--like` have."""
    layers = like.shape.layers if like else ()
    ffn = _shared([(of.type, of.options, of.num_sub_mlps, of.activation) for of in (layer.ffn for layer in layers)])
    attention = _shared([(layer.attention.type, layer.attention.options) for layer in layers])
    several = options["num_sub_mlps"] not in (None, (1,))
    stated: dict[str, Any] = {}
    ffn_type = options["ffn_type"] or ("hourglass" if several else "conventional")
    if ffn:
        stated["activation"] = options["activation"] or ffn[3]
        if options["ffn_type"] is None and not (several and FFN_TYPES.get(ffn[0]).single):
            ffn_type = ffn[0]
            stated["num_sub_mlps"] = options["num_sub_mlps"] or (ffn[2],)
    attention_type = options["attention_type"] or (attention[0] if attention else "softmax")
    ffn_kind = FFN_TYPES.get(ffn_type, where="--ffn-type")
    attention_kind = ATTENTION_TYPES.get(attention_type, where="--attention-type")
    return stated | {
        "ffn_type": ffn_type,
        "ffn_options": _typed_options("ffn", ffn_kind, options["ffn_option"], ffn),
        "attention_type": attention_type,
        "attention_options": _typed_options("attention", attention_kind, options["attention_option"], attention),
    }


def _shared(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """What all layers have, or None where they differ or there are none."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _typed_options(
    section: str, kind: FFNType | AttentionType, pairs: Sequence[str], shared: tuple[Any, ...] | None
) -> dict[str, Any]:
    """`key=value` options of a registered type over those of `--like` and the defaults, typed as in a config.

    :param section: `ffn` or `attention`, the config's section that takes them.
    :param shared: type and options that all layers of `--like` have.
    """
    option, given = f"--{section}-option", dict[str, Any]()
    for text in pairs:
        name, equals, _ = text.partition("=")
        if not equals or name not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise InputError(f"{text!r} is no option of {kind.name!r}", where=option, right=f"known: {known}")
        given[name] = parse_override(text)[1]
    inherited = shared[1] if shared and shared[0] == kind.name else {}
    typed: OpenSection = coerce_class(
        FFNSection if section == "ffn" else AttentionSection,
        {"type": kind.name, **inherited, **given},
        key=f"model.{section}",
        origins={f"model.{section}.{name}": option for name in given},
        options=kind.options,
    )
    return dict(typed.options)
