"""The sizes of one Titans layer as plain numbers. No torch; copied into exported folders with the memory itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TitansSizes:
    """The options of a layer, and the sizes that follow from them."""

    form: str
    depth: int
    """2: M(x) = x + W1 SiLU(W2 x); 1: M(x) = W x."""

    heads: int
    """Of the memory; attention has the layer's own."""

    head_dim: int
    hidden: int
    """Inner width of a depth-2 memory, per head."""

    chunk_size: int
    window: int
    """Tokens that attention sees, the token itself included; 0 without attention."""

    persistent_tokens: int
    conv_width: int
    """1 is no convolution."""

    momentum: bool
    inclusive: bool
    output_gate: bool
    theta_max: float
    value_norm: bool
    """Whether a value has unit length, as queries and keys have."""

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def num_gates(self) -> int:
        """alpha, theta and (with momentum) eta, per memory head."""
        return (3 if self.momentum else 2) * self.heads

    @property
    def has_attention(self) -> bool:
        return self.form != "lmm"

    @property
    def memory_weights(self) -> int:
        """Weights of the memories of one layer."""
        per_head = 2 * self.hidden * self.head_dim if self.depth == 2 else self.head_dim**2
        return self.heads * per_head
