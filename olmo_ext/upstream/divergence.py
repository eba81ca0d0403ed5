"""The error for a step whose loss or gradient is not finite or too large, and its message."""

from __future__ import annotations

import math
from collections.abc import Sequence

from olmo_ext.base.errors import WorkError

LARGEST_LOSS = 700.0
"""Largest usable loss. Above about 709 exp() overflows, and OLMo's perplexity raises OverflowError after the update."""

FEW_SAMPLES = 4
"""Most instance ids that one message names."""


class DivergedError(WorkError):
    """The loss or the gradient is no usable number; nothing of that step was applied."""


def divergence(
    step: int, ranks: Sequence[tuple[Sequence[int], float, float]], norm: float, samples_file: str | None
) -> str:
    """What was wrong with a step's numbers, which limit they passed, on which samples, and what to try.

    :param ranks: of each rank its sample ids, its loss with and without the auxiliary part.
    :param norm: the gradient norm, over all ranks.
    :param samples_file: where the ids of every step are recorded, if they are.
    """
    broken = [rank for rank, (_, value, _) in enumerate(ranks) if not math.isfinite(value)]
    large = [rank for rank, (_, _, loss) in enumerate(ranks) if loss > LARGEST_LOSS]
    guilty = broken or large
    if guilty:
        rank = guilty[0]
        what = f"loss {ranks[rank][1 if broken else 2]:.4g}"
        if len(ranks) > 1:
            what += f" on {len(guilty)} of {len(ranks)} ranks"
        what += ", not finite" if broken else f", above the limit of {LARGEST_LOSS:g} (its perplexity overflows)"
        what += f", and gradient norm {norm:.4g}"
    else:
        what = f"gradient norm {norm:.4g}, not finite, and loss {max(loss for _, _, loss in ranks):.4g}"
    ids = [sample for rank in guilty or range(len(ranks)) for sample in ranks[rank][0]]
    samples = ", ".join(map(str, ids[:FEW_SAMPLES])) or "unknown"
    if len(ids) > FEW_SAMPLES:
        recorded = f"all in {samples_file}" if samples_file else "save_data_indices: true records all"
        samples += f" and {len(ids) - FEW_SAMPLES} more, {recorded}"
    return (
        f"step {step}: {what} before the update, which was not applied and not saved; samples {samples};"
        " a lower optimizer.learning_rate or a longer scheduler.t_warmup may help"
    )
