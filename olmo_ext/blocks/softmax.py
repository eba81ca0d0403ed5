"""Softmax attention with free head count and head_dim (heads * head_dim need not be d_model), MHA, GQA or MQA."""

from __future__ import annotations

from typing import Any

from olmo_ext.blocks.registry import AttentionType, Matrix, register_attention
from olmo_ext.shapes.model import AttentionSpec


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

    def build(self, d_model: int, spec: AttentionSpec, config: Any, layer_id: int, cache: Any) -> Any:
        from olmo_ext.blocks.modules.attention import SoftmaxAttention

        return SoftmaxAttention(d_model=d_model, spec=spec, config=config, cache=cache)
