"""The hourglass FFN (arXiv 2602.06471): K narrow sub-MLPs a layer, each with its own norm and residual.

    u = z + Attention(norm(z));  h_0 = u;  h_{i+1} = h_i + MLP_i(norm_i(h_i));  z' = h_K

With `norm_after` (OLMo-2's placement) the norm acts on each sub-MLP's output instead, before its residual add:
h_{i+1} = h_i + norm_i(MLP_i(h_i)). That form is our extension; the paper's formula is pre-norm. Every sub-MLP then adds
an update of unit RMS at initialisation, so that the residual's variance grows as L (1 + K) where a conventional stack's
grows as 2 L.
"""

from __future__ import annotations

from olmo_ext.shapes.registry import register_ffn
from olmo_ext.shapes.types.conventional import MLPType


@register_ffn
class HourglassFFN(MLPType):
    """`num_sub_mlps` MLPs a layer, of one width or one each; narrower than d_model or not."""

    name = "hourglass"
