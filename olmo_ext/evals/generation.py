"""Decoding token by token, with the model's key-value cache where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from olmo_ext.base.errors import InputError
from olmo_ext.evals.target import EvaluatedModel


def choose(
    logits: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator | None
) -> int:
    """One token from logits of shape [vocabulary]: the largest at temperature 0, a sample otherwise."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / temperature
    if top_k is not None:
        kept = torch.topk(scaled, min(top_k, len(scaled))).values[-1]
        scaled = scaled.masked_fill(scaled < kept, -torch.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        # A token stays while what stands before it has not reached top_p: at least one stays.
        drop = ordered.cumsum(0) - ordered >= top_p
        probabilities = probabilities.index_fill(0, index[drop], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def check_fits(model: EvaluatedModel, prompt: Sequence[int], *, max_tokens: int) -> None:
    """:raises InputError: if prompt and continuation do not fit into the model's input."""
    if not prompt:
        raise InputError("the prompt has no token", right="at least one character")
    if len(prompt) + max_tokens > model.max_sequence_length:
        raise InputError(
            f"a prompt of {len(prompt)} tokens and {max_tokens} more, the model takes {model.max_sequence_length}",
            right="a shorter prompt or fewer tokens",
        )


def generate(
    model: EvaluatedModel,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    num_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    use_cache: bool = True,
    on_token: Callable[[int], None] | None = None,
) -> list[int]:
    """Continue a prompt.

    :param prompt: token ids, at least one.
    :param stop_token_ids: decoding ends before one of these, which is not returned.
    :param num_tokens: size of the vocabulary; ids beyond it (padding rows of the embedding) are never chosen.
    :param temperature: 0 for greedy decoding.
    :raises InputError: as `check_fits`.
    """
    check_fits(model, prompt, max_tokens=max_tokens)
    generator = None
    generated: list[int] = []
    ids = torch.tensor([list(prompt)])
    cache = None
    for _ in range(max_tokens):
        logits, cache = model.next_logits(ids, cache, use_cache=use_cache)
        if temperature and generator is None:
            generator = torch.Generator(device=logits.device).manual_seed(seed)
        token = choose(
            logits[0, :num_tokens].float(),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        )
        if token in stop_token_ids:
            break
        generated.append(token)
        if on_token is not None:
            on_token(token)
        ids = torch.tensor([[token]])
    return generated
