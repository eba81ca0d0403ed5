"""A transformer block assembled from the registries: one mixer, then any number of sub-MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import Dropout, LayerNorm, LayerNormBase, OLMoBlock, activation_checkpoint_function
from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.blocks.initialise import Branches, initialise
from olmo_ext.blocks.modules import attention_module, ffn_module
from olmo_ext.shapes.layers import LayerShape
from olmo_ext.shapes.registry import FFN_TYPES


def check_parameters(module: nn.Module, name: str) -> None:
    """Refuse what OLMo's optimizer groups cannot place, while the type's author can still be told.

    :raises InputError: for a weight that is in no Linear, norm or embedding.
    """
    for path, owner in module.named_modules():
        for key, _ in owner.named_parameters(recurse=False):
            known = isinstance(owner, (nn.Linear, LayerNormBase, nn.LayerNorm, nn.Embedding))
            if not (key.endswith("bias") or (key.endswith("weight") and known)):
                raise InputError(
                    f"{name}: parameter {f'{path}.{key}'.lstrip('.')!r} of {type(owner).__name__} belongs to no"
                    " optimizer group of OLMo",
                    right="keep it in an nn.Linear, a LayerNormBase or an nn.Embedding, or name it ...bias",
                )


class ShapedBlock(OLMoBlock):
    """One layer of any registered shape, in OLMo's place for a block.

    Pre-norm: `x += dropout(attention(attn_norm(x)))`, then for each sub-MLP `x += dropout(mlp(ff_norm(x)))`.
    With `norm_after` the norms act on the updates: `x += dropout(ff_norm(mlp(x)))`.
    """

    def __init__(self, layer_id: int, config: Any, cache: Any, *, layer: LayerShape, branches: Branches) -> None:
        # NOTE: OLMoBlock's own constructor would build the matrices of a stock layer.
        nn.Module.__init__(self)
        self.layer_id, self.config, self.layer, self.branches = layer_id, config, layer, branches
        self._activation_checkpoint_fn: Callable | None = None
        self.parallel = FFN_TYPES.get(layer.ffn.type).is_parallel(layer.ffn)
        self.dropout = Dropout(config.residual_dropout)
        self.attn_norm = LayerNorm.build(config, size=config.d_model)
        # Through nn.Module.__setattr__, which puts it among the submodules whatever the class defines.
        self.attention = attention_module(  # type: ignore[misc]
            config.d_model, layer.attention, config, layer_id, cache
        )
        check_parameters(self.attention, f"attention type {layer.attention.type!r}")
        self.ff_norms = nn.ModuleList(LayerNorm.build(config, size=config.d_model) for _ in layer.ffn.d_ff)
        self.sub_mlps = nn.ModuleList(ffn_module(config.d_model, width, layer.ffn, config) for width in layer.ffn.d_ff)
        check_parameters(self.sub_mlps, f"FFN type {layer.ffn.type!r}")

    @property
    def attention(self) -> nn.Module:
        """The mixer. OLMoBlock has a method of this name, which would hide a plain submodule."""
        return cast(nn.Module, self._modules["attention"])

    def reset_parameters(self) -> None:
        for name, module in self.named_children():
            initialise(module, name=name, config=self.config, layer_id=self.layer_id, branches=self.branches)

    def set_activation_checkpointing(
        self, strategy: ActivationCheckpointingStrategy | None, checkpoint_func: Callable | None = None
    ) -> None:
        """`fine_grained` recomputes norms, mixing and activations; whole layers are OLMo's own business."""
        function = None
        if strategy == ActivationCheckpointingStrategy.fine_grained:
            function = checkpoint_func or activation_checkpoint_function(self.config)
        self._activation_checkpoint_fn = function
        for module in (self.attention, *self.sub_mlps):
            if hasattr(module, "checkpoint_function"):
                module.checkpoint_function = function

    def _recomputed(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x) if self._activation_checkpoint_fn is None else self._activation_checkpoint_fn(module, x)

    def forward(
        self,
        x: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:
        norm_after = self.config.norm_after
        update, cache = self.attention(
            x if norm_after else self._recomputed(self.attn_norm, x),
            attention_bias,
            layer_past=layer_past,
            use_cache=use_cache,
            max_doc_len=max_doc_len,
            cu_doc_lens=cu_doc_lens,
        )
        if norm_after:
            update = self._recomputed(self.attn_norm, update)
        return self.feed_forward(x + self.dropout(update)), cache

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """What follows attention: every sub-MLP with its norm and residual."""
        norm_after = self.config.norm_after
        start = x
        for norm, mlp in zip(self.ff_norms, self.sub_mlps, strict=True):
            read = start if self.parallel else x
            update = self._recomputed(norm, mlp(read)) if norm_after else mlp(self._recomputed(norm, read))
            x = x + self.dropout(update)
        return x
