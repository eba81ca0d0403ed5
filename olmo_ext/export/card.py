"""`README.md` of an exported folder: what the model is, which checkpoint of which run, and how it was verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import olmo_ext
from olmo_ext.base.quantities import format_count
from olmo_ext.shapes.layers import ModelShape


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint that a folder is made of."""

    run: str
    step: int
    tokens: int | None
    """Seen in training; None for a model that was imported."""

    checkpoint_sha256: str
    """Of its `model.safetensors`, as evaluations state it."""


def origin_of(checkpoint: Path, run_name: str) -> Origin:
    """Read from a complete checkpoint's folder `step<N>`."""
    from olmo_ext.training.checkpoint import checkpoint_fingerprint, read_train_state

    return Origin(
        run=run_name,
        step=int(checkpoint.name.removeprefix("step")),
        tokens=read_train_state(checkpoint).get("tokens"),
        checkpoint_sha256=checkpoint_fingerprint(checkpoint),
    )


def loading_lines(folder: Path | str, *, own_code: bool) -> list[str]:
    """How transformers loads a folder's model and its tokenizer.

    :param own_code: whether the folder brings the model's code. `AutoTokenizer` looks at the model's config first and
        asks whether to run that code (or, told not to, warns of the config's type); the tokenizer's class needs none.
    """
    code, tokenizer = (", trust_remote_code=True", "PreTrainedTokenizerFast") if own_code else ("", "AutoTokenizer")
    return [
        f'AutoModelForCausalLM.from_pretrained("{folder}"{code})',
        f'{tokenizer}.from_pretrained("{folder}")',
    ]


def _span(values: Sequence[Any]) -> str:
    """One value for all layers, or that of the first and the last."""
    return str(values[0]) if len(set(values)) == 1 else f"{values[0]} (first layer) to {values[-1]} (last)"


def _widths(d_ff: Sequence[int]) -> str:
    return f"{len(d_ff)} x {d_ff[0]}" if len(set(d_ff)) == 1 else " + ".join(map(str, d_ff))


def model_card(
    config: Mapping[str, Any], shape: ModelShape, origin: Origin, *, parameters: int, tokens: int, difference: float
) -> str:
    """Markdown with the header that model hubs read.

    :param config: the folder's `config.json`.
    :param tokens: how many the folder was compared with the OLMo model on.
    :param difference: of the logits, as in `Exported`.
    """
    own_code = config["model_type"] == "olmo_ext"
    seen = "" if origin.tokens is None else f", {format_count(origin.tokens)} tokens"
    ffn = [f"{layer.ffn.type} {_widths(layer.ffn.d_ff)}" for layer in shape.layers]
    attention = [
        f"{layer.attention.type} {layer.attention.n_heads} x {layer.attention.head_dim}" for layer in shape.layers
    ]
    classes = "AutoModelForCausalLM, " + ("PreTrainedTokenizerFast" if own_code else "AutoTokenizer")
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [olmo-ext]",
        "---",
        f"# {origin.run}",
        "",
        f"`{config['architectures'][0]}`, {parameters:,} parameters, written by `olmo-ext export` "
        f"{olmo_ext.__version__}.",
        "",
        "| | |",
        "|---|---|",
        f"| run, step | {origin.run}, {origin.step:,}{seen} |",
        f"| sha256 of the checkpoint's weights | {origin.checkpoint_sha256} |",
        f"| layers, d_model | {shape.n_layers}, {shape.d_model} |",
        f"| FFN, sub-MLPs x inner width | {_span(ffn)} |",
        f"| attention, heads x head_dim | {_span(attention)} |",
        f"| longest sequence in training | {shape.max_sequence_length:,} |",
        f"| verified | {tokens} tokens of real text: fp32 logits within {difference:.0e} of their scale of the OLMo "
        "model's; decoding with and without cache; saved and loaded again |",
        "",
        "```python",
        f"from transformers import {classes}",
        "",
        *loading_lines(".", own_code=own_code),
        "```",
    ]
    return "\n".join(lines) + "\n"
