"""Decoding: the cache changes nothing, Hugging Face's greedy decoding is reproduced, settings do what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from olmo_ext.base.errors import InputError
from olmo_ext.evals.generation import choose, generate
from olmo_ext.evals.target import EvaluatedModel

PROMPT = [5, 9, 300, 41, 7, 7, 88]


def test_decoding_with_and_without_cache_gives_the_same_tokens(model: Any) -> None:
    with_cache = generate(model, PROMPT, max_tokens=40)
    assert with_cache == generate(model, PROMPT, max_tokens=40, use_cache=False)
    assert len(set(with_cache)) > 3


def test_greedy_decoding_equals_hugging_faces() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=120, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    module = transformers.GPT2LMHeadModel(config).eval()
    prompt = [3, 50, 17, 99]
    expected = module.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    model = EvaluatedModel(module, max_sequence_length=64)
    assert generate(model, prompt, max_tokens=20) == expected
    assert generate(model, prompt, max_tokens=20, use_cache=False) == expected


def test_decoding_ends_before_a_stop_token_and_never_gives_padding_rows() -> None:
    logits = torch.zeros(1, 1, 10)
    logits[0, 0, 4], logits[0, 0, 9] = 1.0, 5.0
    model = EvaluatedModel(lambda ids: logits.expand(1, ids.shape[1], 10), max_sequence_length=20)
    assert generate(model, [1], max_tokens=3) == [9, 9, 9]
    assert generate(model, [1], max_tokens=3, num_tokens=8) == [4, 4, 4]
    assert generate(model, [1], max_tokens=3, stop_token_ids=(9,)) == []


def test_sampling_follows_the_distribution_and_its_seed() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)

    def counts(**settings: Any) -> torch.Tensor:
        options = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "generator": generator} | settings
        drawn = [choose(probabilities.log(), **options) for _ in range(2000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 2000

    assert torch.allclose(counts(), probabilities, atol=0.04)
    assert torch.allclose(counts(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04)
    assert torch.allclose(counts(top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04)
    assert counts(top_p=0.2)[0] == 1
    assert counts(temperature=0.1)[0] > 0.98


def test_the_same_seed_samples_the_same_text(model: Any) -> None:
    first = generate(model, PROMPT, max_tokens=20, temperature=1.0, seed=1)
    assert first == generate(model, PROMPT, max_tokens=20, temperature=1.0, seed=1)
    assert first != generate(model, PROMPT, max_tokens=20, temperature=1.0, seed=2)


def test_what_does_not_fit_into_the_model_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="a prompt of 7 tokens and 250 more, the model takes 256"):
        generate(model, PROMPT, max_tokens=250)
