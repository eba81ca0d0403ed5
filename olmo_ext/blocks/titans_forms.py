"""The forms of a Titans layer: a memory alone, beside attention over a window, or before it.

Needs torch and its neighbours alone: an exported Hugging Face folder runs a copy of this very file.

B batch, T new tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from olmo_ext.blocks.titans_layer import MemoryState, NeuralMemory
from olmo_ext.blocks.window_attention import KeysValues, WindowAttention
from olmo_ext.shapes.types.titans_sizes import TitansSizes


class TitansForm(nn.Module):
    """Everything of the layer but its output projection.

    lmm: memory(x) * sigmoid(gate(x));  mag: norm(window(x)) * sigmoid(norm(memory(x)));
    mal: window(norm(proj(memory(x) * sigmoid(gate(x))))).
    """

    def __init__(
        self,
        *,
        d_model: int,
        sizes: TitansSizes,
        bias: bool,
        head_norm: nn.Module,
        make_norm: Callable[[int], nn.Module],
        window: dict[str, Any],
        device: str | None = None,
    ) -> None:
        """
        :param head_norm: as `NeuralMemory` takes it.
        :param make_norm: makes a norm of vectors of a width.
        :param window: what `WindowAttention` takes beside the window; not looked at where the form has none.
        """
        super().__init__()
        self.sizes = sizes
        place: dict[str, Any] = {"bias": bias, "device": device}
        self.memory = NeuralMemory(d_model=d_model, sizes=sizes, head_norm=head_norm, **place)
        self.out_gate = nn.Linear(d_model, sizes.width, **place) if sizes.output_gate else None
        self.window = WindowAttention(window=sizes.window, **window) if sizes.has_attention else None
        if sizes.form == "mag":
            self.window_norm, self.memory_norm = make_norm(sizes.width), make_norm(sizes.width)
        if sizes.form == "mal":
            self.memory_proj = nn.Linear(sizes.width, d_model, **place)
            self.between_norm = make_norm(d_model)

    def compose(
        self,
        h: Tensor,
        state: MemoryState | None,
        past: KeysValues | None,
        *,
        angles: tuple[Tensor, Tensor] | None,
        keep: Tensor | None,
    ) -> tuple[Tensor, MemoryState, KeysValues | None]:
        """
        :param past: of the window's attention, as `angles` (see `WindowAttention`).
        :param keep: [B, past + T] False for padding; None where nothing is padded.
        :returns: [B, T, W], and the state and the keys and values that the next call needs.
        """
        mixed, state = self.memory(h, state, None if keep is None else keep[:, -h.shape[1] :])
        if self.out_gate is not None:
            mixed = mixed * torch.sigmoid(self.out_gate(h).float()).to(mixed.dtype)
        if self.window is not None and self.sizes.form == "mag":
            persistent = None if self.memory.persistent is None else self.memory.persistent()
            attended, past = self.window(h, angles=angles, past=past, keep=keep, persistent=persistent)
            gate = torch.sigmoid(self.memory_norm(mixed).float())
            mixed = self.window_norm(attended) * gate.to(attended.dtype)
        elif self.window is not None:
            between = self.between_norm(self.memory_proj(mixed))
            mixed, past = self.window(between, angles=angles, past=past, keep=keep)
        return mixed, state, past
