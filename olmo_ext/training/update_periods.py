"""Levels that are updated every C-th optimizer step (Nested Learning, arXiv 2512.24695, equation 71; Hope's FFN).

Between two updates a level's weights stand still and its gradients are summed: those that the optimizer would have
seen, after the sum over micro-batches and the reduction over ranks. At a step that C divides, the mean of the sum is
the level's gradient:

- it is clipped together with the gradients of all other weights that move in this step;
- weight decay is lr wd C, so that over C steps it shrinks the weights as it does at other levels;
- Adam's moments and its own count of steps belong to the level: they see the level's updates alone.

Sum and count live in the optimizer's state of each parameter (`grad_sum`, `grad_count`): a checkpoint in the middle of
a period holds them like moments, whatever the number of ranks. A run whose length C does not divide leaves the last
gradients unapplied, and says so: a longer run then goes on as if it had never ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.registry import FFN_TYPES
from olmo_ext.upstream.parameter_names import clean_name

LEVEL = re.compile(r"\.(?:sub_mlps|ff_norms)\.(\d+)\.")
SUM, COUNT = "grad_sum", "grad_count"


def periods_of(shape: ModelShape) -> tuple[int, ...]:
    """Update period of each sub-MLP, the same in all layers."""
    spec = shape.layers[0].ffn
    return FFN_TYPES.get(spec.type).update_periods(spec)


def with_update_periods(optimizer: Any, shape: ModelShape) -> Any:
    """The optimizer, whose levels now keep their periods; unchanged where every period is 1.

    Call it before any optimizer state is loaded.

    :param optimizer: OLMo's, with its parameter groups.
    :raises InputError: for settings that the periods do not go with.
    """
    periods = periods_of(shape)
    if all(period == 1 for period in periods):
        return optimizer
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if group.get("max_grad_norm_ratio") is not None:
            raise InputError(
                "adaptive clipping averages the norms of every step, and a level has none in most",
                where="max_grad_norm_ratio",
                right="max_grad_norm",
            )
        groups += _split(group, periods)
    optimizer.param_groups = groups
    _Levels(optimizer)
    return optimizer


def _split(group: dict[str, Any], periods: tuple[int, ...]) -> list[dict[str, Any]]:
    """One parameter group per period, those of period 1 first and as they were."""
    members: dict[int, list[tuple[str, Any]]] = {1: []}
    for name, parameter in zip(group["param_names"], group["params"], strict=True):
        if "flat_param" in name:
            raise InputError("levels are one tensor with others", where="fsdp.use_orig_params", right="true")
        level = LEVEL.search(f".{clean_name(name)}")
        members.setdefault(periods[int(level[1])] if level else 1, []).append((name, parameter))
    return [
        {
            **group,
            "params": [parameter for _, parameter in own],
            "param_names": [name for name, _ in own],
            "weight_decay": group["weight_decay"] * period,
            "update_period": period,
        }
        for period, own in sorted(members.items())
        if own
    ]


@contextmanager
def equal_entries(optimizer: Any) -> Iterator[list[tuple[str, str]]]:
    """Sums for all parameters while FSDP gathers its state: it wants the same entries for all that share a tensor.

    :returns: (parameter, entry) of those that are not to be kept.
    """
    added, superfluous = [], []
    if any(group.get("update_period", 1) > 1 for group in optimizer.param_groups):
        for group in (group for group in optimizer.param_groups if group["update_period"] == 1):
            superfluous += [(clean_name(name), key) for name in group["param_names"] for key in (SUM, COUNT)]
            for state in (optimizer.state[p] for p in group["params"] if optimizer.state.get(p)):
                state |= {SUM: torch.zeros_like(state["exp_avg"]), COUNT: torch.tensor(0.0)}
                added.append(state)
    try:
        yield superfluous
    finally:
        for state in added:
            del state[SUM], state[COUNT]


class _Levels:
    """Stands before the clipping of an optimizer, where the gradients of a step are complete."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._clip = optimizer.clip_grads_and_collect_metrics
        self._slow = [group for group in optimizer.param_groups if group["update_period"] > 1]
        optimizer.clip_grads_and_collect_metrics = self.clip_grads_and_collect_metrics

    @torch.no_grad()
    def clip_grads_and_collect_metrics(self, global_step: int, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Sum the slow levels' gradients, or put their mean in place; then clip what is left.

        The norm that is reported and clipped is that of the gradients applied in this step.
        """
        # At load the optimizer may have new group dicts.
        self._slow = [group for group in self._optimizer.param_groups if group["update_period"] > 1]
        waiting: list[torch.Tensor] = []
        counts: dict[int, int] = {}
        for group in self._slow:
            period = group["update_period"]
            is_due = global_step % period == 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                count = self._add(parameter)
                if is_due:
                    self._take(parameter, count)
                else:
                    waiting.append(parameter.grad)
                    parameter.grad = None
                counts[period] = 0 if is_due else count
        metrics = self._clip(global_step, *args, **kwargs)
        if waiting:
            # A gradient that is no number would be found only when it is applied: 0 x inf is NaN, 0 x 1 is 0.
            norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in waiting])
            metrics["total_grad_norm"] = metrics["total_grad_norm"] + 0.0 * norms.sum().to(
                metrics["total_grad_norm"].device
            )
        return {**metrics, **self._report(metrics, counts, global_step)}

    def _add(self, parameter: torch.nn.Parameter) -> int:
        """Add a parameter's gradient to its sum; returns how many are in it."""
        state = self._optimizer.state[parameter]
        if not state:
            # The optimizers make a parameter's state where it is empty, which it would not be with a sum in it.
            state["exp_avg"] = torch.zeros_like(parameter)
            if isinstance(self._optimizer, torch.optim.AdamW):
                state["step"] = torch.tensor(0.0)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if SUM not in state:
            state[SUM] = torch.zeros_like(parameter)
            state[COUNT] = torch.tensor(0.0)
        state[SUM].add_(parameter.grad)
        # A new tensor on the CPU: a loaded one may be on the GPU, and reading that would wait for it at each step.
        count = int(state[COUNT]) + 1
        state[COUNT] = torch.tensor(float(count))
        return count

    def _take(self, parameter: torch.nn.Parameter, count: int) -> None:
        """Make the mean the parameter's gradient, and begin a new sum."""
        state = self._optimizer.state[parameter]
        assert parameter.grad is not None
        parameter.grad.copy_(state[SUM]).div_(count)
        state[SUM].zero_()
        state[COUNT] = torch.tensor(0.0)

    def _report(
        self, metrics: dict[str, torch.Tensor], counts: dict[int, int], global_step: int
    ) -> dict[str, torch.Tensor]:
        """Per period: gradients in the sum after this step, updates so far, and the norm of the mean when applied."""
        report: dict[str, torch.Tensor] = {}
        squares: dict[int, torch.Tensor] = {}
        for group in self._slow:
            period = group["update_period"]
            report[f"period{period}/accumulated"] = torch.tensor(float(counts.get(period, 0)))
            report[f"period{period}/updates"] = torch.tensor(float(global_step // period))
            if global_step % period == 0:
                for name in group["param_names"]:
                    norm = metrics[f"grad/{self._optimizer._clean_param_name(name)}.norm"]
                    squares[period] = squares.get(period, torch.zeros_like(norm)) + norm**2
        return report | {f"period{period}/grad_norm": square.sqrt() for period, square in squares.items()}
