"""Which layers are OLMo's own block. No torch."""

from __future__ import annotations

from olmo_ext.shapes.layers import LayerShape


def is_stock_layer(layer: LayerShape, d_model: int) -> bool:
    """Whether OLMo's own block is this layer: a conventional FFN, and softmax attention as wide as d_model."""
    mixer = layer.attention
    return layer.ffn.type == "conventional" and mixer.type == "softmax" and mixer.width == d_model
