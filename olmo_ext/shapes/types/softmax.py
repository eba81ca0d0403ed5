"""Softmax attention with free head count and head_dim (heads * head_dim need not be d_model), MHA, GQA or MQA."""

from __future__ import annotations

from typing import Any

from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.registry import AttentionType, ExportedModule, Matrix, built_in_module, register_attention


def exported_heads(spec: AttentionSpec, prefix: str = "") -> list[ExportedModule]:
    """Projections and QK-norm of the class `Heads` (`olmo_ext/blocks/heads.py`), in an exported folder."""
    fused = (("q_proj", spec.width), ("k_proj", spec.kv_width), ("v_proj", spec.kv_width))
    return [
        ExportedModule(f"{prefix}att_proj", tuple((prefix + name, rows) for name, rows in fused)),
        ExportedModule.whole(f"{prefix}q_norm"),
        ExportedModule.whole(f"{prefix}k_norm"),
    ]


@register_attention
class SoftmaxAttentionType(AttentionType):
    """OLMo's attention. At OLMo's own sizes the layer is a stock OLMo block."""

    name = "softmax"

    def check(self, spec: AttentionSpec, d_model: int) -> str | None:
        for word, value in (
            ("n_heads", spec.n_heads),
            ("n_kv_heads", spec.n_kv_heads),
            ("head_dim", spec.head_dim),
        ):
            if value < 1:
                return f"{word} {value} is not positive"
        if spec.n_heads % spec.n_kv_heads:
            return f"{spec.n_heads} heads cannot share {spec.n_kv_heads} key-value heads evenly"
        return None

    def matrices(self, d_model: int, spec: AttentionSpec) -> list[Matrix]:
        return [(spec.width + 2 * spec.kv_width, d_model), (d_model, spec.width)]

    def exported_modules(self, spec: AttentionSpec) -> list[ExportedModule] | None:
        return [*exported_heads(spec), ExportedModule.whole("attn_out", "o_proj")]

    def exported_config(self, spec: AttentionSpec) -> dict[str, Any]:
        return {"attention_types": "softmax"}

    build = built_in_module
