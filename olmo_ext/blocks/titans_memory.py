"""The chunk-wise form of a memory that learns in context: everything of a chunk from products of its matrices.

B batch, H heads, T tokens, C tokens of a chunk, N chunks, D head_dim, P hidden size. With all gradients of a chunk
taken at its starting weights, the two recurrences of Titans (arXiv 2501.00663, section 3) are linear in them:

    W_t = b_t W_0 + f_t S_0 - sum_{j<=t} G_tj grad_j
    A_ti = prod_{i<s<=t} (1 - alpha_s);  E_ij = prod_{j<s<=i} eta_s;  G = A E diag(theta)
    b_t = prod_{s<=t} (1 - alpha_s);     f_t = sum_{i<=t} A_ti prod_{s<=i} eta_s

and the gradient of a layer at token j is an outer product, so W_t is never formed (the dual form of arXiv 2407.04620):

    depth 2, M(x) = x + SiLU(x W2) W1:    z = K W2, a = SiLU(z), d1 = 2 (a W1 + K - V), d2 = (d1 W1') SiLU'(z)
        zq = b (Q W2) + f (Q S2) - (G * Q K') d2;  aq = SiLU(zq);  y = Q + b (aq W1) + f (aq S1) - (G * aq a') d1
    depth 1, M(x) = x W:                  d1 = 2 (K W - V);  y = b (Q W) + f (Q S) - (G * Q K') d1

A token that is not `active` (padding) is no step of the recurrence: weights, momentum and chunk position stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Weights = tuple[torch.Tensor, ...]
"""(W2 [B, H, D, P], W1 [B, H, P, D]), or (W [B, H, D, D],)."""


@dataclass(frozen=True, kw_only=True)
class Gates:
    """Per token, [B, H, T]."""

    log_keep: torch.Tensor
    """log(1 - alpha)."""

    log_momentum: torch.Tensor | None
    """log(eta)."""

    step: torch.Tensor
    """theta."""

    def part(self, start: int, end: int) -> Gates:
        momentum = self.log_momentum
        return Gates(
            log_keep=self.log_keep[..., start:end],
            log_momentum=None if momentum is None else momentum[..., start:end],
            step=self.step[..., start:end],
        )

    def only(self, active: torch.Tensor) -> Gates:
        """Decay and step where `active` [B, T] alone."""
        keep = active[:, None].to(self.step.dtype)
        momentum = self.log_momentum
        return Gates(
            log_keep=self.log_keep * keep,
            log_momentum=None if momentum is None else momentum * keep,
            step=self.step * keep,
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is carried from one chunk to the next."""

    weights: Weights
    momentum: Weights | None
    anchor: Weights
    """The weights at the start of the chunk that is under way."""


@dataclass(frozen=True, kw_only=True)
class _Decays:
    """Everything that follows from the gates; N is where chunks are stacked: [B, H, N, ...]."""

    read_weights: torch.Tensor
    """b, [.., C, 1]."""

    read_momentum: torch.Tensor | None
    """f, [.., C, 1]."""

    read_gain: torch.Tensor
    """G, [.., C, C]."""

    end_weights: torch.Tensor
    """b at the chunk's end, [.., 1, 1]."""

    end_momentum: torch.Tensor | None
    end_gain: torch.Tensor
    """The last row of G as a column, [.., C, 1]."""

    momentum_decay: torch.Tensor | None
    """Product of eta over the chunk, [.., 1, 1]."""

    momentum_gain: torch.Tensor | None
    """How much of each gradient is left in the momentum, [.., C, 1]."""


def _lower_products(log_factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logs [.., C] of factors -> running products [.., C] and P_ti = prod_{i<s<=t}, [.., C, C], zero above."""
    total = log_factors.cumsum(-1)
    size = log_factors.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: above the diagonal it would overflow.
    return total.exp(), (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, -torch.inf).exp()


def _shift(rows: torch.Tensor, first: float) -> torch.Tensor:
    """Rows [.., C, X] moved down by one: token t reads what token t-1 has left."""
    head = torch.full_like(rows[..., :1, :], first)
    return torch.cat((head, rows[..., :-1, :]), dim=-2)


def _decays(gates: Gates, active: torch.Tensor | None, *, inclusive: bool) -> _Decays:
    """:param active: [B, 1, N, C], or None where every token counts."""
    keep, products = _lower_products(gates.log_keep)
    step = gates.step.unsqueeze(-2)
    if gates.log_momentum is None:
        gain, read_momentum, end_momentum, decay, momentum_gain = products * step, None, None, None, None
    else:
        running, momentum = _lower_products(gates.log_momentum)
        momentum = momentum * step
        if active is not None:
            # At a token that is no step nothing is added to the weights, the momentum of before included.
            products = products * active.unsqueeze(-2)
        gain = products @ momentum
        read_momentum = products @ running.unsqueeze(-1)
        end_momentum = read_momentum[..., -1:, :]
        decay, momentum_gain = running[..., -1:, None], momentum[..., -1:, :].transpose(-1, -2)
    read_weights = keep.unsqueeze(-1)
    end_weights, end_gain = read_weights[..., -1:, :], gain[..., -1:, :].transpose(-1, -2)
    if not inclusive:
        read_weights, gain = _shift(read_weights, 1.0), _shift(gain, 0.0)
        read_momentum = None if read_momentum is None else _shift(read_momentum, 0.0)
    return _Decays(
        read_weights=read_weights,
        read_momentum=read_momentum,
        read_gain=gain,
        end_weights=end_weights,
        end_momentum=end_momentum,
        end_gain=end_gain,
        momentum_decay=decay,
        momentum_gain=momentum_gain,
    )


def _silu_slope(z: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(z)
    return gate * (1 + z * (1 - gate))


def _combined(
    scale: torch.Tensor, weights: torch.Tensor, more: torch.Tensor | None, momentum: torch.Tensor | None
) -> torch.Tensor:
    """scale * weights (+ more * momentum): matrices of one kind, or products with them."""
    return scale * weights if more is None or momentum is None else scale * weights + more * momentum


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, decays: _Decays, memory: Memory
) -> tuple[torch.Tensor, Weights, Weights | None]:
    """One chunk: what is read [B, H, C, D], and weights and momentum at its end.

    :param scores: G * (Q K'), [B, H, C, C].
    """
    b, f, start, old = decays.read_weights, decays.read_momentum, memory.anchor, memory.momentum

    def read(x: torch.Tensor, layer: int) -> torch.Tensor:
        return _combined(b, x @ memory.weights[layer], f, None if old is None else x @ old[layer])

    errors: Weights
    inputs: Weights
    if len(start) == 1:
        errors, inputs = (2 * (k @ start[0] - v),), (k,)
        y = read(q, 0) - scores @ errors[0]
    else:
        z = k @ start[0]
        a = F.silu(z)
        outer = 2 * (a @ start[1] + k - v)
        errors = ((outer @ start[1].transpose(-1, -2)) * _silu_slope(z), outer)
        inputs = (k, a)
        inner = F.silu(read(q, 0) - scores @ errors[0])
        y = q + read(inner, 1) - (decays.read_gain * (inner @ a.transpose(-1, -2))) @ outer
    weights = tuple(
        _combined(decays.end_weights, now, decays.end_momentum, None if old is None else old[i])
        - (x * decays.end_gain).transpose(-1, -2) @ error
        for i, (now, x, error) in enumerate(zip(memory.weights, inputs, errors, strict=True))
    )
    if old is None or decays.momentum_decay is None or decays.momentum_gain is None:
        return y, weights, None
    momentum = tuple(
        decays.momentum_decay * now - (x * decays.momentum_gain).transpose(-1, -2) @ error
        for now, x, error in zip(old, inputs, errors, strict=True)
    )
    return y, weights, momentum


def _whole_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    memory: Memory,
    active: torch.Tensor | None,
    position: torch.Tensor | None,
    *,
    size: int,
    chunk_size: int,
    inclusive: bool,
) -> tuple[torch.Tensor, Memory]:
    """T tokens in pieces of `size`, which divides T; no piece crosses the end of a chunk.

    :param position: [B] tokens of the chunk under way, after the first piece those of the next; needed where rows
        differ (`active`) or where a piece is no whole chunk.
    """
    batch, heads, time, dim = q.shape
    number = time // size
    q, k, v = (tensor.reshape(batch, heads, number, size, dim) for tensor in (q, k, v))
    if active is not None:
        gates = gates.only(active)
        active = active.to(q.dtype).reshape(batch, 1, number, size)
    log_momentum = gates.log_momentum
    stacked = Gates(
        log_keep=gates.log_keep.reshape(batch, heads, number, size),
        log_momentum=None if log_momentum is None else log_momentum.reshape(batch, heads, number, size),
        step=gates.step.reshape(batch, heads, number, size),
    )
    decays = _decays(stacked, active, inclusive=inclusive)
    scores = decays.read_gain * (q @ k.transpose(-1, -2))
    outputs = []
    # Apart all at once: the gradient of each x[:, :, i] would be a tensor as large as x.
    parts = zip(*(tensor.unbind(2) for tensor in (q, k, v, scores)), _apart(decays), strict=True)
    for i, (q_i, k_i, v_i, scores_i, decays_i) in enumerate(parts):
        y, weights, momentum = _chunk(q_i, k_i, v_i, scores_i, decays_i, memory)
        outputs.append(y)
        anchor = weights
        if position is not None:
            position = position + (size if active is None else active[:, 0, i].sum(-1))
            done = (position % chunk_size == 0)[:, None, None, None]
            anchor = tuple(torch.where(done, new, old) for new, old in zip(weights, memory.anchor, strict=True))
        memory = Memory(weights=weights, momentum=momentum, anchor=anchor)
    return torch.cat(outputs, dim=2), memory


def _apart(decays: _Decays) -> list[_Decays]:
    """The decays of each chunk."""
    number = decays.read_gain.shape[2]
    columns = {key: number * (None,) if value is None else value.unbind(2) for key, value in vars(decays).items()}
    rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [_Decays(**row) for row in rows]


def run_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    memory: Memory,
    *,
    chunk_size: int,
    inclusive: bool = True,
    done: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Memory]:
    """Read T tokens, learning from each.

    :param q: [B, H, T, D], as k and v.
    :param done: [B] tokens of the chunk under way that the memory has seen; None at the start of a chunk. Rows that
        differ are read token by token.
    :param active: [B, T] whether a token is one, those that are standing before the others; None for all.
    :returns: what is read, [B, H, T, D], and the memory after the last token. A last chunk may be short.
    """
    time = q.shape[2]
    places = [0]
    ragged = False
    if done is not None:
        counts = [int(count) % chunk_size for count in done.tolist()]
        ragged = len(set(counts)) > 1
        if not ragged and counts[0]:
            places.append(min(chunk_size - counts[0], time))
    if ragged:
        sizes = [(i, i + 1, 1) for i in range(time)]
    else:
        whole = (time - places[-1]) // chunk_size * chunk_size + places[-1]
        sizes = [(places[i], places[i + 1], places[i + 1] - places[i]) for i in range(len(places) - 1)]
        sizes += [(places[-1], whole, chunk_size), (whole, time, time - whole)]
    outputs = []
    position = done
    if position is None and (active is not None or time % chunk_size):
        position = torch.zeros(q.shape[0], device=q.device)
    for start, end, size in sizes:
        if start == end:
            continue
        mask = None if active is None else active[:, start:end]
        # Whole chunks of whole rows end where the next begins: no look at positions.
        needs = active is not None or ragged or size != chunk_size
        part, memory = _whole_chunks(
            q[:, :, start:end],
            k[:, :, start:end],
            v[:, :, start:end],
            gates.part(start, end),
            memory,
            mask,
            position if needs else None,
            size=size,
            chunk_size=chunk_size,
            inclusive=inclusive,
        )
        outputs.append(part)
        if position is not None:
            position = position + (end - start if mask is None else mask.sum(-1))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0], memory
