"""Cross-entropy and z-loss from hidden states, without ever holding the logits of more than one chunk of tokens.

The logits of a step are its largest tensor: 4 x 4,096 tokens of 100,352 entries take 6.6 GB in fp32, several times over
with what the softmax and its gradient keep. Here the gradients of a chunk are formed while its logits are there, in the
forward pass, so that nothing of them is kept and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from olmo.model import OLMo
from torch import nn

from olmo_ext.shapes.memory import LOSS_CHUNK

IGNORED = -100
"""Label of a position that is left out of the loss."""


class _ChunkedLoss(torch.autograd.Function):
    """hidden [N, d], weight [V, d], bias [V] or None, labels [N] -> (loss, cross-entropy, z-loss), each a sum in fp32.

    Only the first has a gradient: the sum of the other two.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor, z_multiplier: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        product = (lambda tensor: tensor.to(dtype)) if dtype else (lambda tensor: tensor)
        matrix = product(weight)
        cross_entropy = torch.zeros((), dtype=torch.float32, device=hidden.device)
        z_loss = torch.zeros_like(cross_entropy)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        size = LOSS_CHUNK[hidden.device.type]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], size):
                chosen = slice(start, start + size)
                states, wanted = product(hidden[chosen]), labels[chosen]
                logits, log_sum, chunk_loss = _softmax(states, matrix, bias, wanted)
                counted = wanted != IGNORED
                cross_entropy += chunk_loss.sum()
                z_loss += z_multiplier * (log_sum * counted).square().sum()
                # d/dlogits of (log_sum - logit of the label + z log_sum^2), with `logits` holding the softmax now.
                factor = ((1 + 2 * z_multiplier * log_sum) * counted).unsqueeze(1)
                gradient = logits.mul_(factor)
                gradient[torch.arange(len(wanted), device=wanted.device), wanted.clamp(min=0)] -= counted.float()
                narrow = product(gradient)
                hidden_gradient[chosen] = narrow @ matrix
                if dtype is None:
                    weight_gradient.addmm_(narrow.t(), states)
                else:
                    weight_gradient += narrow.t() @ states
                if bias_gradient is not None:
                    bias_gradient += gradient.sum(0)
                # Otherwise they stay in memory beside the next chunk's logits.
                del logits, gradient, narrow
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return cross_entropy + z_loss, cross_entropy, z_loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.gradients
        ctx.gradients = None  # Scaled in place: a second backward would find them scaled.
        hidden.mul_(outer[0])
        weight.mul_(outer[0])
        bias = None if bias is None else bias.mul_(outer[0]).to(ctx.dtypes[1])
        return hidden, weight.to(ctx.dtypes[0]), bias, None, None


def _softmax(
    states: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax [n, V], log of its divisor [n], and loss per label [n] (0 where the label is ignored), all fp32."""
    logits = nn.functional.linear(states, matrix, None if bias is None else bias.to(matrix.dtype)).float()
    of_label = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    largest = logits.amax(1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    log_sum = (largest + total.log()).squeeze(1)
    return logits.div_(total), log_sum, torch.where(labels == IGNORED, 0.0, log_sum - of_label)


def chunked_loss(
    hidden: torch.Tensor, head: Any, labels: torch.Tensor, *, z_multiplier: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over all positions: the loss to differentiate (cross-entropy and z-loss), and its two parts for reports.

    :param hidden: [..., d], in any floating type; products run in autocast's type where it is on, sums in fp32.
    :param head: has `weight` [V, d], and `bias` [V] or None.
    :param labels: [...], `IGNORED` where a position does not count.
    :param z_multiplier: the z-loss is this times the squared log of the softmax's divisor (PaLM, arXiv 2204.02311).
    """
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    return _ChunkedLoss.apply(flat, head.weight, getattr(head, "bias", None), wanted, z_multiplier)


@torch.no_grad()
def chunked_cross_entropy(hidden: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
    """Loss of each position in fp32, of the shape of `labels`; 0 where the label is ignored. Has no gradient."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else flat.dtype
    matrix, bias = head.weight.to(dtype), getattr(head, "bias", None)
    size = LOSS_CHUNK[device]
    losses = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
    with torch.autocast(device, enabled=False):
        for start in range(0, flat.shape[0], size):
            chosen = slice(start, start + size)
            losses[chosen] = _softmax(flat[chosen].to(dtype), matrix, bias, wanted[chosen])[2]
    return losses.view(labels.shape)


class _TiedHead:
    """The embedding's weight where OLMo looks for an untied head."""

    bias = None

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        return self._embedding.weight  # read when it is needed: under FSDP it is whole inside the forward alone

    def __call__(self, hidden: torch.Tensor) -> Any:
        return self.forward(hidden)  # type: ignore[attr-defined]


@contextmanager
def loss_in_place_of_logits(model: OLMo, compute: Callable[[torch.Tensor, Any], Any]) -> Iterator[None]:
    """Inside, `model.forward` calls `compute(hidden, head)` where it would make logits, and returns that as `logits`.

    The model's own forward stays upstream's. The head is replaced from within it, because under FSDP its weight is
    whole only there, and it may be a unit of its own.
    """
    transformer, config = model.transformer, model.config
    if config.weight_tying:
        head: Any = _TiedHead(transformer.wte)
        # Not registered as a module, so that nothing that saves or shards the model sees it.
        transformer.__dict__["ff_out"] = head
        config.weight_tying = False
    else:
        head = transformer.ff_out
        head = getattr(head, "_fsdp_wrapped_module", head)
    head.forward = lambda hidden: compute(hidden, head)
    try:
        yield
    finally:
        del head.forward
        if transformer.__dict__.pop("ff_out", None) is not None:
            config.weight_tying = True
