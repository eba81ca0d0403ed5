"""The chunk-wise form of a memory against the recurrence itself, token by token with autograd, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from olmo_ext.blocks.titans_memory import Gates, Memory, run_memory

TIME, DIM, HIDDEN, HEADS, BATCH = 29, 4, 6, 2, 2


def drawn(*, depth=2, momentum=True, time=TIME, seed=0, theta=0.1):
    """q, k, v, the gates' alpha, eta, theta, and initial weights."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    q, k, v = (normal(BATCH, HEADS, time, DIM) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    alpha, eta, step = (uniform(BATCH, HEADS, time) for _ in range(3))
    shapes = ((DIM, HIDDEN), (HIDDEN, DIM)) if depth == 2 else ((DIM, DIM),)
    weights = tuple(0.5 * normal(HEADS, *shape).expand(BATCH, -1, -1, -1) for shape in shapes)
    return q, k, v, 0.3 * alpha, 0.9 * eta if momentum else None, theta * step, weights


def as_gates(alpha, eta, theta):
    return Gates(log_keep=torch.log1p(-alpha), log_momentum=None if eta is None else torch.log(eta), step=theta)


def fresh(weights, momentum=True):
    zeros = tuple(torch.zeros_like(w) for w in weights) if momentum else None
    return Memory(weights=weights, momentum=zeros, anchor=weights)


def apply(weights, x):
    """M(x) for [B, H, X, D]."""
    return x @ weights[0] if len(weights) == 1 else x + F.silu(x @ weights[0]) @ weights[1]


def recurrence(q, k, v, alpha, eta, theta, weights, *, chunk, inclusive=True):
    """Titans' equations as they stand: one token at a time, gradients by autograd at the chunk's starting weights."""
    state = list(weights)
    surprise = [torch.zeros_like(w) for w in weights]
    outputs = []
    for t in range(q.shape[2]):
        if t % chunk == 0:
            anchor = [w.detach().clone().requires_grad_() for w in state]
        if not inclusive:
            outputs.append(apply(state, q[:, :, t : t + 1]))
        with torch.enable_grad():
            loss = (apply(anchor, k[:, :, t : t + 1]) - v[:, :, t : t + 1]).pow(2).sum()
        gradients = torch.autograd.grad(loss, anchor)
        at = (..., slice(t, t + 1))
        for i, gradient in enumerate(gradients):
            decayed = 0.0 if eta is None else eta[at].unsqueeze(-1) * surprise[i]
            surprise[i] = decayed - theta[at].unsqueeze(-1) * gradient
            state[i] = (1 - alpha[at].unsqueeze(-1)) * state[i] + surprise[i]
        if inclusive:
            outputs.append(apply(state, q[:, :, t : t + 1]))
    return torch.cat(outputs, dim=2), state


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 8, 29, 64])
def test_chunks_equal_the_token_by_token_recurrence(chunk, momentum, depth, inclusive):
    """Chunk 1 is the exact online rule; 3 and 8 leave a short last chunk."""
    q, k, v, alpha, eta, theta, weights = drawn(depth=depth, momentum=momentum)
    found, memory = run_memory(
        q, k, v, as_gates(alpha, eta, theta), fresh(weights, momentum), chunk_size=chunk, inclusive=inclusive
    )
    expected, state = recurrence(q, k, v, alpha, eta, theta, weights, chunk=chunk, inclusive=inclusive)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    for ours, theirs in zip(memory.weights, state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_a_linear_memory_does_not_depend_on_the_chunk_without_its_own_error():
    """The error of a linear memory with k orthogonal to all others is that of the start, whatever the chunk."""
    q, k, v, alpha, eta, theta, weights = drawn(depth=1, time=DIM)
    k = torch.eye(DIM, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    zeros = tuple(torch.zeros_like(w) for w in weights)
    outputs = [
        run_memory(q, k, v, as_gates(alpha, eta, theta), fresh(zeros), chunk_size=chunk)[0] for chunk in (1, 2, DIM)
    ]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-12, atol=1e-12)


def test_chunk_sizes_agree_to_the_second_order_of_the_step():
    """Chunks differ by where the gradient is taken, which moves with the step: the difference is quadratic in it."""

    def difference(scale):
        q, k, v, alpha, eta, theta, weights = drawn(theta=scale)
        gates = as_gates(0 * alpha, eta, theta)
        runs = [run_memory(q, k, v, gates, fresh(weights), chunk_size=chunk)[0] for chunk in (1, 8)]
        return float((runs[0] - runs[1]).abs().max())

    assert 0 < difference(1e-3) < 1e-3
    assert difference(1e-3) / difference(1e-4) == pytest.approx(100, rel=0.1)


def test_without_steps_and_forgetting_the_memory_is_a_fixed_mlp():
    q, k, v, alpha, eta, theta, weights = drawn()
    found, _ = run_memory(q, k, v, as_gates(0 * alpha, eta, 0 * theta), fresh(weights), chunk_size=8)
    torch.testing.assert_close(found, apply(weights, q), rtol=1e-12, atol=1e-12)


def test_a_linear_memory_at_chunk_one_is_the_delta_rule():
    """W <- W + beta k (v - k W)' with beta = 2 theta (DeltaNet)."""
    q, k, v, alpha, _, theta, weights = drawn(depth=1)
    found, _ = run_memory(q, k, v, as_gates(0 * alpha, None, theta), fresh(weights, False), chunk_size=1)
    state = weights[0]
    for t in range(TIME):
        key, value = k[:, :, t : t + 1], v[:, :, t : t + 1]
        state = state + 2 * theta[:, :, t, None, None] * key.transpose(-1, -2) @ (value - key @ state)
        torch.testing.assert_close(found[:, :, t : t + 1], q[:, :, t : t + 1] @ state, rtol=1e-12, atol=1e-12)


def test_a_linear_memory_of_zeros_over_one_chunk_is_causal_linear_attention():
    q, k, v, alpha, _, theta, weights = drawn(depth=1)
    zeros = (torch.zeros_like(weights[0]),)
    found, _ = run_memory(q, k, v, as_gates(0 * alpha, None, theta), fresh(zeros, False), chunk_size=TIME)
    scores = (q @ k.transpose(-1, -2)).tril() * 2 * theta.unsqueeze(-2)
    torch.testing.assert_close(found, scores @ v, rtol=1e-12, atol=1e-12)


def test_a_token_that_forgets_all_ends_the_past():
    """alpha = 1 and eta = 0 at a token that writes nothing: what came before it cannot be read any more."""
    q, k, v, alpha, eta, theta, weights = drawn()
    log_keep, log_momentum = torch.log1p(-alpha), torch.log(eta)
    log_keep[:, :, 8] = log_momentum[:, :, 8] = -1e4
    theta[:, :, 8] = 0.0
    gates = Gates(log_keep=log_keep, log_momentum=log_momentum, step=theta)
    for chunk in (1, 4):
        found, _ = run_memory(q, k, v, gates, fresh(weights), chunk_size=chunk)
        # In a chunk the gradients of the forgetting token's neighbours are taken at the weights of its start.
        changed = v.index_fill(2, torch.arange(8), 3.0)
        other, _ = run_memory(q, k, changed, gates, fresh(weights), chunk_size=chunk)
        assert (found[:, :, :8] - other[:, :, :8]).abs().max() > 0.01
        assert torch.equal(found[:, :, 8], other[:, :, 8])
        assert torch.equal(found, other) is False and found.isfinite().all()
        assert torch.equal(found[:, :, 8:], other[:, :, 8:]) == (chunk == 1)


def test_stopping_anywhere_and_going_on_changes_nothing():
    q, k, v, alpha, eta, theta, weights = drawn()
    gates = as_gates(alpha, eta, theta)
    whole, _ = run_memory(q, k, v, gates, fresh(weights), chunk_size=8)
    memory, parts, start = fresh(weights), [], 0
    for end in (3, 4, 8, 9, 20, TIME):
        part, memory = run_memory(
            *(x[:, :, start:end] for x in (q, k, v)),
            gates.part(start, end),
            memory,
            chunk_size=8,
            done=torch.full((BATCH,), float(start % 8)),
        )
        parts.append(part)
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-12, atol=1e-12)


def test_rows_of_different_lengths_are_read_as_if_alone_and_go_on_from_their_own_places():
    q, k, v, alpha, eta, theta, weights = drawn()
    gates = as_gates(alpha, eta, theta)
    active = torch.ones(BATCH, 21, dtype=torch.bool)
    active[1, 13:] = False
    first = [x[:, :, :21] for x in (q, k, v)]
    found, memory = run_memory(*first, gates.part(0, 21), fresh(weights), chunk_size=8, active=active)
    more, _ = run_memory(
        *(x[:, :, 21:] for x in (q, k, v)),
        gates.part(21, TIME),
        memory,
        chunk_size=8,
        done=torch.tensor([21.0, 13.0]),
    )
    kept = [*range(13), *range(21, TIME)]
    alone = Gates(
        log_keep=gates.log_keep[:, :, kept], log_momentum=gates.log_momentum[:, :, kept], step=gates.step[:, :, kept]
    )
    second, _ = run_memory(*(x[:, :, kept] for x in (q, k, v)), alone, fresh(weights), chunk_size=8)
    whole, _ = run_memory(q, k, v, gates, fresh(weights), chunk_size=8)
    torch.testing.assert_close(torch.cat((found, more), 2)[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat((found[:, :, :13], more), 2)[1], second[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2])
def test_gradients_through_all_chunks_equal_finite_differences(depth):
    q, k, v, alpha, eta, theta, weights = (
        x if x is None or isinstance(x, tuple) else x[:1, :1] for x in drawn(depth=depth, time=7)
    )
    weights = tuple(w[:1, :1].clone().requires_grad_() for w in weights)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, alpha, eta, theta)]

    def read(q, k, v, alpha, eta, theta, *weights):
        return run_memory(q, k, v, as_gates(alpha, eta, theta), fresh(weights), chunk_size=3)[0]

    assert torch.autograd.gradcheck(read, (*inputs, *weights), fast_mode=False)


def test_the_default_step_keeps_long_sequences_finite_where_a_larger_one_does_not():
    """theta_max = 1 / C: gradients of a chunk are summed, so a step of 1 is one of C."""
    size, time = 16, 512
    random = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, 1, time, 32, generator=random), dim=-1) for _ in range(2))
    v = torch.randn(1, 1, time, 32, generator=random)
    weights = (torch.randn(1, 1, 32, 64, generator=random) / 32**0.5,)
    weights += (torch.randn(1, 1, 64, 32, generator=random) / 8,)

    def largest(theta):
        gates = as_gates(torch.full((1, 1, time), 0.02), torch.full((1, 1, time), 0.5), torch.full((1, 1, time), theta))
        return float(run_memory(q, k, v, gates, fresh(weights), chunk_size=size)[0].abs().max())

    assert largest(1 / size) < 100
    assert not largest(1.0) < 1e6
