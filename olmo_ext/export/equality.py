"""Whether a Hugging Face folder computes what the OLMo model computes, on real tokens and from the disk.

Tolerances are absolute, 1e-5 of the largest logit (of the largest update for a layer), in fp32. In a deep model with
large weights, or at a token whose update nearly vanishes before a norm, fp32 itself is no better than that: where the
OLMo model's own cached decoding, or its forward with the last bits of each layer's output changed, differs from its
full forward by more than a quarter of it, four times that difference is allowed for logits, and 1e-4 at most. Layers
are compared one by one, so depth adds nothing there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from olmo_ext.base.errors import WorkError
from olmo_ext.shapes.layers import ModelShape
from olmo_ext.shapes.registry import ATTENTION_TYPES

TOLERANCE = 1e-5
LARGEST_TOLERANCE = 1e-4
CACHED_TOKENS = 16
"""Tokens that are decoded one by one with the cache."""


class MismatchError(WorkError):
    """The two models differ; the message says where."""


def load(folder: Path) -> Any:
    """The model of a folder as a user without our package loads it, in fp32 and eval mode."""
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = json.loads((folder / "config.json").read_text()).get("auto_map", {}).get("AutoModelForCausalLM")
    with _quiet():
        if name is None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            # AutoModelForCausalLM prefers our own class to the folder's where `register` has been called.
            model_class: Any = get_class_from_dynamic_module(name, str(folder))
            model_class.register_for_auto_class("AutoModelForCausalLM")
            model = model_class.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def load_with_our_code(folder: Path, model_type: str) -> Any:
    """The model of someone's folder, run by classes of this package or of transformers: none of the folder's code."""
    from transformers import Olmo2ForCausalLM

    from olmo_ext.hf.modeling_olmo_ext import OlmoExtForCausalLM

    classes: dict[str, Any] = {"olmo2": Olmo2ForCausalLM, "olmo_ext": OlmoExtForCausalLM}
    with _quiet():
        return classes[model_type].from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def _quiet() -> Any:
    """Without transformers' progress bars and hints."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def real_tokens(encode: Callable[[str], list[int]], *, length: int) -> torch.Tensor:
    """Two rows of text from the standard library's documentation, [2, length].

    :raises WorkError: if the tokenizer makes nothing of it.
    """
    import argparse
    import textwrap

    text = "\n".join(module.__doc__ or "" for module in (json, argparse, textwrap))
    ids = encode(text)
    if not ids:
        raise WorkError("the tokenizer makes no token of English text: there is nothing to compare the models on")
    while len(ids) < 2 * length:
        ids = ids + ids
    return torch.tensor(ids[: 2 * length]).view(2, length)


def length_for(shape: ModelShape, *, least: int) -> int:
    """Tokens to compare on: half of those that are decoded one by one lie beyond the length at which the layers' types
    ask for a look at the cache, as far as the model's own length allows."""
    beyond = CACHED_TOKENS // 2
    most = max(1, shape.max_sequence_length - beyond)
    specs = [layer.attention for layer in shape.layers]
    types = [ATTENTION_TYPES.get(spec.type) for spec in specs]
    asked = (
        kind.tokens_to_compare(spec, least=least - beyond, most=most) for kind, spec in zip(types, specs, strict=True)
    )
    return min(max(asked) + beyond, shape.max_sequence_length)


def _blocks(olmo: Any) -> list[Any]:
    from olmo.model import OLMoBlock

    return [module for module in olmo.modules() if isinstance(module, OLMoBlock)]


@torch.no_grad()
def compare_layers(olmo: Any, hugging_face: Any, tokens: torch.Tensor) -> None:
    """Feed every Hugging Face layer what the OLMo layer was fed, and compare the updates.

    :raises MismatchError: naming the layers.
    """
    blocks, layers = _blocks(olmo), hugging_face.model.layers
    if len(blocks) != len(layers):
        raise MismatchError(f"{len(layers)} layers, the model has {len(blocks)}")
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    answers: list[torch.Tensor] = []

    def record(module: Any, arguments: Any, output: Any) -> None:
        inputs.append(arguments[0])
        outputs.append(output[0])

    def replace(index: int) -> Callable:
        return lambda module, arguments, keywords: ((inputs[index], *arguments[1:]), keywords)

    handles = [block.register_forward_hook(record) for block in blocks]
    handles += [layer.register_forward_pre_hook(replace(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(lambda m, a, output: answers.append(output)) for layer in layers]
    try:
        olmo(tokens)
        hugging_face(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    wrong = []
    for index, (given, expected, got) in enumerate(zip(inputs, outputs, answers, strict=True)):
        # Adding an update to a larger residual rounds at the residual's scale.
        allowed = TOLERANCE * (expected - given).abs().max() + 2.0**-22 * expected.abs().max()
        difference = (expected - got).abs().max()
        if not difference <= allowed:
            wrong.append(f"layer {index} (by {difference / (expected - given).abs().max():.1e} of its update)")
    if wrong:
        raise MismatchError(f"{', '.join(wrong)} computes something else than the OLMo model")


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit; not a number if one of them is none."""
    return float((logits - expected).abs().max() / expected.abs().max())


def _decode(
    step: Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]], tokens: torch.Tensor, ends: list[int]
) -> torch.Tensor:
    """Logits of the tokens before the last end, read with the cache in pieces that end there."""
    start, cache, logits = 0, None, []
    for end in ends:
        some, cache = step(tokens[:, start:end], cache)
        logits.append(some)
        start = end
    return torch.cat(logits, dim=1)


def _pieces(length: int) -> dict[str, list[int]]:
    """Where the pieces end in which tokens are read with the cache."""
    few = min(CACHED_TOKENS, length)
    return {
        "decoding with the cache": list(range(1, few + 1)),
        "decoding after a prompt": list(range(max(1, length - few), length + 1)),
        "reading in two pieces": sorted({max(1, length // 2), length}),
    }


def _rounding(olmo: Any, tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """How far the OLMo model's logits move when each number between two layers changes by two units of its last bit,
    which is about what computing a layer in another order does."""
    generator = torch.Generator().manual_seed(0)

    def change(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
        return x * (1 + 2.0**-22 * signs)

    handles = [olmo.transformer.wte.register_forward_hook(lambda module, given, output: change(output))]
    handles += [
        block.register_forward_hook(lambda module, given, output: (change(output[0]), *output[1:]))
        for block in _blocks(olmo)
    ]
    try:
        return max(_difference(olmo(tokens).logits, expected) for _ in range(2))
    finally:
        for handle in handles:
            handle.remove()


def _cache_of(output: Any) -> Any:
    cache = getattr(output, "cache", None)
    return output.past_key_values if cache is None else cache


@torch.no_grad()
def compare_models(olmo: Any, hugging_face: Any, tokens: torch.Tensor) -> float:
    """Layers, logits, and decoding token by token with the cache; returns the largest difference of the logits.

    :raises MismatchError: saying what differs, and which layer if it is one.
    :raises WorkError: if the OLMo model itself computes no numbers.
    """
    expected = olmo(tokens).logits
    if not bool(expected.isfinite().all()):
        raise WorkError("the OLMo model's own logits are not finite on text: there is nothing to compare with")
    compare_layers(olmo, hugging_face, tokens)

    def olmo_step(token: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        output = olmo(token, past_key_values=cache, use_cache=True)
        return output.logits, output.attn_key_values

    def hugging_face_step(token: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        # `past_key_values` is what every version of transformers takes.
        output = hugging_face(token, past_key_values=cache, use_cache=True)
        return output.logits, _cache_of(output)

    differences = {"the whole model": _difference(hugging_face(tokens, use_cache=False).logits, expected)}
    noise = _rounding(olmo, tokens, expected)
    for what, ends in _pieces(tokens.shape[1]).items():
        read = expected[:, : ends[-1]]
        noise = max(noise, _difference(_decode(olmo_step, tokens, ends), read))
        differences[what] = _difference(_decode(hugging_face_step, tokens, ends), read)
    allowed = min(max(TOLERANCE, 4 * noise), LARGEST_TOLERANCE)
    for what, difference in differences.items():
        if not difference <= allowed:
            raise MismatchError(f"{what}: logits differ by {difference:.1e} of their scale, allowed {allowed:.0e}")
    return max(differences.values())


@torch.no_grad()
def compare_generation(hugging_face: Any, tokens: torch.Tensor) -> None:
    """`generate` with and without the cache gives the same greedy text.

    :raises MismatchError: at the first step that differs by more than rounding.
    """
    prompt = tokens[:1, : max(1, tokens.shape[1] // 2)]
    steps = min(8, tokens.shape[1] - prompt.shape[1])
    arguments = {"do_sample": False, "max_new_tokens": steps, "attention_mask": torch.ones_like(prompt)}
    with _quiet():
        cached, plain = (hugging_face.generate(prompt, use_cache=use, **arguments)[0] for use in (True, False))
    same = min(len(cached), len(plain))
    different = (cached[:same] != plain[:same]).nonzero()
    if len(different) == 0 and len(cached) == len(plain):
        return
    at = int(different[0]) if len(different) else same
    logits = hugging_face(plain[None, :at], use_cache=False).logits[0, -1]
    if at < same and (logits[plain[at]] - logits[cached[at]]).abs() <= 10 * TOLERANCE * logits.abs().max():
        return
    raise MismatchError(f"generate with and without the cache differ from token {at} on")


@torch.no_grad()
def compare_saved_again(hugging_face: Any, tokens: torch.Tensor) -> None:
    """`save_pretrained` and loading that folder gives the same bits.

    :raises MismatchError: if it does not.
    """
    with tempfile.TemporaryDirectory(prefix="olmo-ext-") as folder:
        with _quiet():
            hugging_face.save_pretrained(folder)
        again = load(Path(folder))
        if not torch.equal(again(tokens).logits, hugging_face(tokens).logits):
            raise MismatchError("saved again and reloaded, the model computes something else")


def compare_tokenizer(folder: Path, encode: Callable[[str], list[int]]) -> None:
    """The folder's tokenizer gives the run's ids.

    :raises MismatchError: if it does not.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = "def f(x):\n    return x  # naïve – 12,345 apples\n\n"
    with _quiet():
        loaded = (
            AutoTokenizer.from_pretrained(folder, trust_remote_code=True),
            PreTrainedTokenizerFast.from_pretrained(folder),
        )
        encoded = [tokenizer.encode(text, add_special_tokens=False) for tokenizer in loaded]
    if any(ids != encode(text) for ids in encoded):
        raise MismatchError("the folder's tokenizer gives other ids than the run's")
