"""The continuum memory system of Hope-attention (Nested Learning, arXiv 2512.24695, equations 70-71): a stack of MLPs
whose weights are updated at different rates.

    y = MLP^(f_k)( ... MLP^(f_1)(o) )    each with its own norm and residual, o what attention has left

`update_periods: [1, 4, 16]` are optimizer steps, the level next to attention first: level l keeps its weights for C_l
steps and then takes one step of the optimizer on the mean of the gradients since (see
`olmo_ext.training.update_periods`). With all periods 1 it is the hourglass stack. The paper also describes levels that
go on learning inside a sequence; that is another model, and not here.

`composition: independent` lets all levels read o and adds their updates. The paper sums them with learned weights;
each level's last matrix already has any such weight in it.
"""

from __future__ import annotations

from olmo_ext.shapes.layers import FFNSpec
from olmo_ext.shapes.registry import register_ffn, whatever_the_widths
from olmo_ext.shapes.types.conventional import MLPType

COMPOSITIONS = ("sequential", "independent")


@register_ffn
class HopeFFN(MLPType):
    """`num_sub_mlps` levels, of one width or one each."""

    name = "hope"
    options = {"update_periods": [], "composition": "sequential"}

    @whatever_the_widths
    def check(self, spec: FFNSpec, d_model: int) -> str | None:
        periods = spec.options.get("update_periods", [])
        if not isinstance(periods, (list, tuple)) or any(
            not isinstance(period, int) or isinstance(period, bool) or period < 1 for period in periods
        ):
            return f"update_periods {periods!r} is no list of positive whole numbers"
        if periods and len(periods) != spec.num_sub_mlps:
            return f"{len(periods)} update_periods for {spec.num_sub_mlps} sub-MLPs"
        if (composition := spec.options.get("composition", "sequential")) not in COMPOSITIONS:
            return f"composition {composition!r} is none of {', '.join(COMPOSITIONS)}"
        return super().check(spec, d_model)

    def is_parallel(self, spec: FFNSpec) -> bool:
        return spec.options.get("composition", "sequential") == "independent"

    def update_periods(self, spec: FFNSpec) -> tuple[int, ...]:
        return tuple(spec.options.get("update_periods") or ()) or super().update_periods(spec)
