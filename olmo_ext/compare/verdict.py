"""The answer in two sentences or three, and what a reader has to know to trust it."""

from __future__ import annotations

from olmo_ext.base.quantities import EQUAL_WITHIN
from olmo_ext.compare import words
from olmo_ext.compare.group import GroupResult
from olmo_ext.compare.outcome import Comparison
from olmo_ext.compare.statistics import METHOD_DOCUMENTS, METHOD_SEEDS, MINIMUM_SEEDS_FOR_PLANNING, Difference

SURE = 0.05
"""Corrected p-value below which a difference is called one."""

LEAST_TOKENS = 1.0
"""Per non-embedding parameter; compute-optimal training takes about 20 (Hoffmann et al., arXiv 2203.15556)."""


def is_sure(difference: Difference | None, adjusted: float | None) -> bool:
    """Whether a difference stands after the correction."""
    return difference is not None and difference.excludes_zero and adjusted is not None and adjusted < SURE


def verdict(result: Comparison) -> str:
    """Two sentences: what is best against the baseline, and what of the rest can be told; a third where runs are short.

    Below one token a parameter the loss is that of the first steps, whatever the statistics say of it.
    """
    lengths = [
        group.tokens / group.features.non_embedding
        for group in result.groups
        if group.tokens and group.features.non_embedding
    ]
    if not lengths or max(lengths) >= LEAST_TOKENS:
        return _answer(result)
    # 0.996 would be rounded to the limit that it is below.
    return (
        f"{_answer(result)} The runs are too short to say anything about trained models: at most "
        f"{min(max(lengths), 0.99):.2g} tokens a non-embedding parameter."
    )


def _answer(result: Comparison) -> str:
    compared = [group for group in result.groups if group.nats is not None]
    if not compared:
        return _nothing(result)
    if result.learning_rate_axis and any(row.best_difference is not None for row in result.learning_rates):
        return _over_learning_rates(result)
    best = min(compared, key=lambda group: group.nats.mean if group.nats else 0.0)
    better = [g for g in compared if is_sure(g.nats, g.adjusted_p) and g.nats and g.nats.mean < 0]
    worse = [g for g in compared if is_sure(g.nats, g.adjusted_p) and g.nats and g.nats.mean > 0]
    undecided = [g for g in compared if g not in better and g not in worse]
    if better:
        top = min(better, key=lambda group: group.nats.mean if group.nats else 0.0)
        first = f"{top.name} is better than {_name_of(result, top.baseline)}: {_amount(top)}."
    elif undecided:
        top = best
        first = (
            f"No shape is shown to be better than {_name_of(result, top.baseline)}; "
            f"the lowest of the others is {top.name}, {_amount(top)}{_overruled(result, top)}."
        )
    else:
        top = best
        first = (
            f"Every other shape is worse than {_name_of(result, top.baseline)}; the nearest is {top.name}, "
            f"{_amount(top)}."
        )
    return f"{first} {_rest(result, top, better, worse, undecided)}"


def _name_of(result: Comparison, baseline: str | None) -> str:
    return f"the baseline {baseline or result.sweep.baseline}"


def _amount(group: GroupResult) -> str:
    difference = group.nats
    assert difference is not None
    text = f"{words.signed(difference.mean)} nats of validation loss"
    if group.perplexity is not None:
        text += f" ({words.signed(group.perplexity.mean, 2)} PPL)"
    if not difference.known:
        return f"{text}, from a single seed without documents, so how surely is unknown"
    unit = "paired seeds" if difference.method == METHOD_SEEDS else "documents of one seed"
    many = f"{len(difference.seeds)} {unit}" if difference.method == METHOD_SEEDS else unit
    text += f", 95 % interval {words.signed(difference.low)} to {words.signed(difference.high)} over {many}"
    return text + f", Holm-corrected p {_p(group.adjusted_p)}"


def _overruled(result: Comparison, group: GroupResult) -> str:
    """An interval that excludes zero beside "not shown" needs its reason."""
    if group.nats is None or not group.nats.excludes_zero or result.comparisons < 2:
        return ""
    return f": alone it would count, as one of {result.comparisons} comparisons it does not"


def _p(value: float | None) -> str:
    text = words.p_value(value)
    return text if text.startswith("<") else f"= {text}"


def _rest(
    result: Comparison,
    top: GroupResult,
    better: list[GroupResult],
    worse: list[GroupResult],
    undecided: list[GroupResult],
) -> str:
    others = [group for group in better + worse + undecided if group is not top]
    if not others:
        if is_sure(top.nats, top.adjusted_p):
            return _cost(top)
        if top.seeds_needed is not None:
            return f"About {top.seeds_needed:,} paired seeds would tell a difference of this size from zero."
        if top.nats is not None and len(top.nats.each) >= MINIMUM_SEEDS_FOR_PLANNING:
            return "A difference of this size is too small to be told from zero with any number of seeds one could run."
        return "With fewer than three paired seeds, how many would be needed is unknown."
    parts = []
    also = [group for group in better if group is not top]
    if also:
        parts.append(f"{_list(also)} {_are(also)} better as well")
    if worse and worse != [top]:
        rest = [group for group in worse if group is not top]
        parts.append(f"{_list(rest)} {_are(rest)} worse")
    open_ones = [group for group in undecided if group is not top]
    if open_ones:
        text = f"{_list(open_ones)} cannot be told from {_its(result, open_ones)} baseline"
        # Planned without the correction: a number no larger than what was run would only confuse.
        needed = [(g.seeds_needed, len(g.nats.seeds)) for g in open_ones if g.nats is not None]
        known = [number for number, had in needed if number is not None and number > had]
        if len(known) == len(open_ones):
            text += f" (it would take about {min(known):,} paired seeds{' or more' if len(known) > 1 else ''})"
        parts.append(text)
    if not parts:
        return _cost(top)
    return f"{'Of the others' if len(others) > 1 else 'Beside it'}, {'; '.join(parts)}."


def _are(groups: list[GroupResult]) -> str:
    return "is" if len(groups) == 1 else "are"


def _its(result: Comparison, groups: list[GroupResult]) -> str:
    """Which baseline: a scaling sweep has one per size."""
    if all(group.baseline == result.sweep.baseline for group in groups):
        return "the"
    return "its" if len(groups) == 1 else "their"


def _list(groups: list[GroupResult]) -> str:
    names = [group.name for group in groups]
    if len(names) > 3:
        return str(len(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cost(group: GroupResult) -> str:
    parts = []
    if group.speed_up is not None:
        if group.speed_up.ratio >= 1:
            parts.append(f"It reaches the baseline's loss with {1 / group.speed_up.ratio:.0%} of the tokens")
        else:
            parts.append(f"The baseline reaches its loss with {group.speed_up.ratio:.0%} of the tokens")
    if group.flops_change is not None:
        same = abs(group.flops_change) < 0.0005
        change = "the same" if same else words.percent(group.flops_change)
        parts.append(f"a token costs {change} training FLOPs")
    return (", and ".join(parts) if parts else "Its cost is not recorded") + "."


def _over_learning_rates(result: Comparison) -> str:
    rows = [row for row in result.learning_rates if row.best_difference is not None]
    best = min(rows, key=lambda row: row.best_difference.mean if row.best_difference else 0.0)
    difference = best.best_difference
    assert difference is not None
    if difference.known:
        sure = "excludes zero" if difference.excludes_zero else "includes zero"
        text = f"95 % interval {words.signed(difference.low)} to {words.signed(difference.high)}, which {sure}"
    else:
        text = "from a single seed, so how surely is unknown"
    edge = [row.shape for row in result.learning_rates if row.at_edge]
    second = (
        f"The best learning rate of {', '.join(edge[:3])} is the smallest or largest tried, so a better one may exist."
        if edge
        else "Every shape's best learning rate lies inside the range that was tried."
    )
    return (
        f"Each at its best learning rate, {best.shape} is {words.signed(difference.mean)} nats from the baseline's "
        f"shape ({text}). {second}"
    )


def _nothing(result: Comparison) -> str:
    done = sum(1 for run in result.sweep.runs if run.finished)
    if not done:
        many = words.plural(len(result.sweep.runs), "run")
        return f"No run has finished yet, so nothing is compared. The sweep has {many}."
    if len(result.groups) == 1:
        return "There is one group of runs only, so nothing is compared. Its curves and its shape are below."
    reasons = list(dict.fromkeys(reason for group in result.groups for reason in group.blocking))
    why = f": {'; '.join(reasons[:2])}" if reasons else ""
    return f"Nothing here can be compared{why}. {done} of {len(result.sweep.runs)} runs have finished."


def notes(result: Comparison) -> list[str]:
    """What was assumed and what is not covered, one sentence each."""
    notes = []
    compared = [group for group in result.groups if group.nats is not None]
    methods = {group.nats.method for group in compared if group.nats is not None}
    if METHOD_SEEDS in methods:
        names = {name for group in compared for name in (group.name, group.baseline)}
        finished = [run for group in result.groups if group.name in names for run in group.finished]
        orders = {run.data.get("order_seed") for run in finished} - {None}
        notes.append(
            "Intervals are 95 %, Student's t on differences paired by seed. "
            + (
                "Seeds change the initial weights; the order of the data is the same for all, so the intervals do not "
                "cover data-order variance."
                if len(orders) < 2
                else "The order of the data is not the same for all runs: where it changes with the seed, the "
                "intervals cover its variance as well."
            )
        )
    if METHOD_DOCUMENTS in methods:
        notes.append(
            "Where there is one seed, the interval is a bootstrap over evaluation documents: it covers the choice of "
            "documents, neither that of the seed nor that of the data order."
        )
    if any(not group.nats.known for group in compared if group.nats is not None):
        notes.append("One paired seed without losses per document says nothing about its own noise: unknown.")
    if result.comparisons > 1:
        notes.append(
            f"p-values are corrected with Holm's method for the {result.comparisons} comparisons of this sweep; the "
            "intervals are not."
        )
    if compared:
        notes.append(
            "Seeds needed: a two-sided paired t-test at 5 % with 80 % power and the observed deviation; unknown below "
            "three seeds."
        )
    unequal = sum(1 for group in result.groups if group.unequal)
    if unequal:
        notes.append(
            f"Budgets differ by more than {100 * EQUAL_WITHIN:g} % from the baseline's in "
            f"{words.plural(unequal, 'group')}: the "
            "table shows by how much, in parameters and in FLOPs per token. Nothing is averaged over unequal budgets."
        )
    if not result.sweep.budget_checked:
        notes.append("The sweep asked for unequal budgets.")
    if not result.sweep.declared:
        notes.append("There is no sweep.json: runs were grouped by the names of their folders, without the seed part.")
    own = sorted(
        {group.baseline for group in result.groups if group.baseline not in (None, result.sweep.baseline)} - {None}
    )
    if own:
        notes.append(f"Groups of another size are compared with the baseline of that size: {', '.join(map(str, own))}.")
    if result.learning_rate_axis:
        notes.append(
            "The best learning rate is chosen by the same validation loss that is compared, which flatters shapes with "
            "more rates tried."
        )
    return notes
