"""Gated Attention (arXiv 2505.06708): each head's output times a sigmoid gate, before the output projection.

    Y' = Y * sigmoid(X W_g);  X is the layer's normed input, the same that q, k and v are made from.

`elementwise`: W_g is d_model -> heads * head_dim. `headwise`: d_model -> heads, one gate a head. A plain sigmoid halves
the attention output at initialisation; `gate_scale: 2` with `gate_init: zero` starts as plain attention instead.
"""

from __future__ import annotations

from typing import Any

from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.registry import ExportedModule, Matrix, built_in_module, register_attention
from olmo_ext.shapes.types.softmax import SoftmaxAttentionType, exported_heads

GATES = ("elementwise", "headwise")
GATE_INITS = ("normal", "zero")


def gate_width(spec: AttentionSpec) -> int:
    """Outputs of the gate's matrix."""
    return spec.n_heads if spec.options.get("gate", "elementwise") == "headwise" else spec.width


@register_attention
class GatedAttentionType(SoftmaxAttentionType):
    """Softmax attention and a gate. The KV cache is that of softmax attention."""

    name = "gated"
    options = {"gate": "elementwise", "gate_scale": 1.0, "gate_init": "normal"}

    def check(self, spec: AttentionSpec, d_model: int) -> str | None:
        if (gate := spec.options.get("gate", "elementwise")) not in GATES:
            return f"gate {gate!r} is none of {', '.join(GATES)}"
        if (init := spec.options.get("gate_init", "normal")) not in GATE_INITS:
            return f"gate_init {init!r} is none of {', '.join(GATE_INITS)}"
        if not spec.options.get("gate_scale", 1.0) > 0:
            return f"gate_scale {spec.options['gate_scale']} is not positive"
        return super().check(spec, d_model)

    def matrices(self, d_model: int, spec: AttentionSpec) -> list[Matrix]:
        return [*super().matrices(d_model, spec), (gate_width(spec), d_model)]

    def activation_elements(self, d_model: int, spec: AttentionSpec) -> int:
        # Beside softmax attention's: the gate after its sigmoid, and the gated output.
        return super().activation_elements(d_model, spec) + gate_width(spec) + spec.width

    def exported_modules(self, spec: AttentionSpec) -> list[ExportedModule] | None:
        return [*exported_heads(spec), ExportedModule.whole("attn_out", "o_proj"), ExportedModule.whole("gate_proj")]

    def exported_config(self, spec: AttentionSpec) -> dict[str, Any]:
        options = {**self.options, **spec.options}
        gate = {"attention_gate": options["gate"], "gate_scale": options["gate_scale"]}
        return {"attention_types": "gated", **gate}

    build = built_in_module
