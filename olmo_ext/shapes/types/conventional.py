"""The conventional FFN: one MLP a layer, SwiGLU (three matrices) or GELU/ReLU (two)."""

from __future__ import annotations

from typing import Any

from olmo_ext.shapes.layers import FFNSpec
from olmo_ext.shapes.registry import ExportedModule, FFNType, Matrix, built_in_module, register_ffn, whatever_the_widths

ACTIVATIONS = ("swiglu", "gelu", "relu")


class MLPType(FFNType):
    """What the conventional and the hourglass FFN share: a sub-MLP is OLMo's MLP with its own width.

    With `swiglu` the first matrix holds both branches, as OLMo's does: rows [0, d_ff) are the linear branch
    ("up"), rows [d_ff, 2 d_ff) the gated one.
    """

    @whatever_the_widths
    def check(self, spec: FFNSpec, d_model: int) -> str | None:
        if spec.activation not in ACTIVATIONS:
            return f"activation {spec.activation!r} is none of {', '.join(ACTIVATIONS)}"
        if not spec.d_ff:
            return "no sub-MLP at all"
        if any(width < 1 for width in spec.d_ff):
            return f"widths {list(spec.d_ff)} are not all positive"
        if self.single and spec.num_sub_mlps != 1:
            return f"{spec.num_sub_mlps} sub-MLPs, but type {self.name!r} has one a layer (hourglass has several)"
        return None

    def matrices(self, d_model: int, d_ff: int, spec: FFNSpec) -> list[Matrix]:
        first = 2 * d_ff if spec.activation == "swiglu" else d_ff
        return [(first, d_model), (d_model, d_ff)]

    def activation_elements(self, d_model: int, d_ff: int, spec: FFNSpec) -> int:
        # SwiGLU keeps both branches, SiLU(gate) and their product; GELU its input and output; ReLU its output.
        return {"swiglu": 4, "gelu": 2, "relu": 1}[spec.activation] * d_ff

    def exported_modules(self, d_ff: int, spec: FFNSpec) -> list[ExportedModule] | None:
        # Swapped halves would load without a message and be wrong.
        first: tuple[tuple[str, int | None], ...] = (("up_proj", d_ff),)
        if spec.activation == "swiglu":
            first += (("gate_proj", d_ff),)
        return [ExportedModule("ff_proj", first), ExportedModule.whole("ff_out", "down_proj")]

    def exported_config(self, spec: FFNSpec) -> dict[str, Any]:
        return {"mlp_type": spec.activation, "parallel_sub_mlps": self.is_parallel(spec)}

    build = built_in_module


@register_ffn
class ConventionalFFN(MLPType):
    """One MLP a layer. Its layers are stock OLMo blocks of their own width."""

    name = "conventional"
    single = True
