"""FFN types, attention types and taper schedules by name: the place where a new shape is plugged in.

A type is a class without torch at import: it answers what `plan` and `solve` ask (matrix sizes, state, options) and
builds its module on demand. Adding one is one file and its test:

    @register_ffn
    class MyFFN(FFNType):
        name = "mine"
        def matrices(self, d_model, d_ff, spec): return [(d_ff, d_model), (d_model, d_ff)]
        def build(self, d_model, d_ff, spec, config): import torch; return ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from olmo_ext.base.registry import Registry
from olmo_ext.shapes.layers import AttentionSpec, FFNSpec

Matrix = tuple[int, int]
"""Rows (outputs) and columns (inputs) of one weight matrix applied once per token."""


@dataclass(frozen=True)
class ExportedModule:
    """One module of a layer and what holds its weights in an exported Hugging Face model."""

    ours: str
    """Its name in the mixer, or in a sub-MLP."""

    theirs: tuple[tuple[str, int | None], ...]
    """Names and rows of the matrices that lie one above the other in it; one of them without rows is the whole."""

    @classmethod
    def whole(cls, ours: str, theirs: str | None = None) -> ExportedModule:
        return cls(ours, ((theirs or ours, None),))


def whatever_the_widths(check: Callable) -> Callable:
    """Marks an FFN type's `check` that looks at options and the number of sub-MLPs alone: `solve`, which has millions
    of widths to ask about, then asks once for each number."""
    check.whatever_the_widths = True  # type: ignore[attr-defined]
    return check


def built_in_module(self: Any, *sizes: Any, **named: Any) -> Any:
    """The `build` of a built-in type, which knows no torch: `olmo_ext/blocks/modules.py` finds its module by class."""
    return None


class FFNType(ABC):
    """One kind of feed-forward part.

    A layer holds `num_sub_mlps` sub-MLPs; the block gives each its own norm, residual and dropout, so a type only
    says what one sub-MLP computes from its normed input (pre-norm), or from the residual stream (`norm_after`).
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """Extra keys under `model.ffn` and their defaults."""

    single: ClassVar[bool] = False
    """Whether a layer has exactly one sub-MLP."""

    def is_parallel(self, spec: FFNSpec) -> bool:
        """Whether all sub-MLPs read what attention has left, instead of one after the other."""
        return False

    def update_periods(self, spec: FFNSpec) -> tuple[int, ...]:
        """Optimizer steps between two updates of each sub-MLP and its norm."""
        return (1,) * spec.num_sub_mlps

    def check(self, spec: FFNSpec, d_model: int) -> str | None:
        """What is wrong with these widths or options, in words, or None."""
        return None

    @abstractmethod
    def matrices(self, d_model: int, d_ff: int, spec: FFNSpec) -> list[Matrix]:
        """The weight matrices of one sub-MLP: they make the parameter count and the FLOPs."""

    def vector_parameters(self, d_model: int, d_ff: int, spec: FFNSpec) -> int:
        """Parameters beside matrices and biases (scales, say) of one sub-MLP."""
        return 0

    def activation_elements(self, d_model: int, d_ff: int, spec: FFNSpec) -> int:
        """Elements per token that one sub-MLP keeps for the backward pass, its input not counted."""
        return sum(rows for rows, _ in self.matrices(d_model, d_ff, spec))

    def exported_modules(self, d_ff: int, spec: FFNSpec) -> list[ExportedModule] | None:
        """The modules of one sub-MLP by the names of `OlmoExtMLP` (`olmo_ext/hf/modeling_olmo_ext.py`).

        None where that class does not compute this type: then it is not exported.
        """
        return None

    def exported_config(self, spec: FFNSpec) -> dict[str, Any]:
        """What `OlmoExtConfig` is told about it."""
        return {}

    @abstractmethod
    def build(self, d_model: int, d_ff: int, spec: FFNSpec, config: Any) -> Any:
        """A `torch.nn.Module` mapping [batch, time, d_model] to an update of the same shape.

        :param config: OLMo's ModelConfig (bias, init, activation, init_device).
        Modules named `ff_out` (or with `_is_residual = True`) are initialised as residual projections, other
        `nn.Linear`s as input projections, by OLMo's `init_fn`; a module with its own `reset_parameters(config,
        layer_id)` initialises itself.
        """


class AttentionType(ABC):
    """One kind of token mixer."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """Extra keys under `model.attention` and their defaults."""

    honours_document_masks: ClassVar[bool] = True
    """Whether `data.generate_doc_lengths` means something to it."""

    def check(self, spec: AttentionSpec, d_model: int) -> str | None:
        """What is wrong with these sizes or options, in words, or None."""
        return None

    def remarks(self, spec: AttentionSpec, sequence_length: int) -> list[str]:
        """What such sequences make of the options that their author may not have meant, in words."""
        return []

    @abstractmethod
    def matrices(self, d_model: int, spec: AttentionSpec) -> list[Matrix]:
        """The weight matrices of one layer's mixer, gates included."""

    def table_parameters(self, d_model: int, spec: AttentionSpec) -> int:
        """Learned inputs, such as persistent tokens: weights of the budget that no token is multiplied with."""
        return 0

    def vector_parameters(self, d_model: int, spec: AttentionSpec) -> int:
        """Parameters beside matrices, tables, biases and norms."""
        return 0

    def bias_parameters(self, d_model: int, spec: AttentionSpec, *, include_bias: bool) -> int:
        """Biases, where the model's `include_bias` asks for them."""
        return sum(rows for rows, _ in self.matrices(d_model, spec)) if include_bias else 0

    def norm_features(self, d_model: int, spec: AttentionSpec) -> int:
        """Features of the type's own affine norms, beside QK-norm."""
        return 0

    def qk_norm_features(self, spec: AttentionSpec) -> int:
        """Features that QK-norm acts on, where the model has it."""
        return spec.width + spec.kv_width

    def mixing_flops(self, d_model: int, spec: AttentionSpec, sequence_length: int, *, causal: bool = False) -> float:
        """Forward FLOPs per token that are no weight matrix: for softmax attention 4 heads head_dim S, half of it
        when causal positions alone are counted (PaLM, arXiv 2204.02311, appendix B)."""
        flops = 4.0 * spec.width * sequence_length
        return flops / 2 if causal else flops

    def cache_elements_per_token(self, spec: AttentionSpec) -> int:
        """Elements that decoding keeps per past token."""
        return 2 * spec.kv_width

    def state_elements(self, d_model: int, spec: AttentionSpec) -> int:
        """Elements that decoding keeps per sequence whatever its length."""
        return 0

    def activation_elements(self, d_model: int, spec: AttentionSpec) -> int:
        """Elements per token kept for the backward pass, the input not counted: q, k, v as projected, q and k as
        rotated, the mixed values (no score matrix: flash or SDPA). QK-norm's are counted beside it."""
        return (spec.width + 2 * spec.kv_width) + (spec.width + spec.kv_width) + spec.width

    def exported_modules(self, spec: AttentionSpec) -> list[ExportedModule] | None:
        """The mixer's modules by the names of the classes in `olmo_ext/hf/`; those that a config leaves out
        (QK-norm) are simply not met. None where there is no such class: then the type is not exported."""
        return None

    def exported_config(self, spec: AttentionSpec) -> dict[str, Any]:
        """What `OlmoExtConfig` is told about a layer: `attention_types` (which class it is), and that class's keys."""
        return {}

    def tokens_to_compare(self, spec: AttentionSpec, *, least: int, most: int) -> int:
        """A length in [least, most] at which a cache is to be tried, because something ends there (a chunk, say)."""
        return min(least, most)

    @abstractmethod
    def build(self, d_model: int, spec: AttentionSpec, config: Any, layer_id: int, cache: Any) -> Any:
        """A `torch.nn.Module` with OLMo's attention contract:

        forward(h, attention_bias=None, layer_past=None, use_cache=False, max_doc_len=None, cu_doc_lens=None)
        -> (update [batch, time, d_model], layer cache or None); `h` is the normed input (pre-norm) or the residual
        stream (`norm_after`). Norm, residual and dropout are the block's.
        """


class TaperSchedule(ABC):
    """How a layer's width falls with depth, from the multiple `start` at the first layer to `end` at the last."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """Extra keys under `model.ffn.taper` and their defaults."""

    def check(self, options: Mapping[str, Any]) -> str | None:
        """What is wrong with these options, in words, or None."""
        return None

    @abstractmethod
    def remaining(self, x: float, options: Mapping[str, Any]) -> float:
        """The share of the way from `start` to `end` that is still ahead: 1 at x = 0, never rising, 0 at x = 1.

        :param x: depth l / (L - 1) of layer l of L, in [0, 1]. A model of one layer asks for nothing.
        """


FFN_TYPES: Registry[FFNType] = Registry("FFN type", "model.ffn.type")
ATTENTION_TYPES: Registry[AttentionType] = Registry("attention type", "model.attention.type")
TAPER_SCHEDULES: Registry[TaperSchedule] = Registry("schedule", "model.ffn.taper.schedule")

register_ffn, register_attention, register_taper = FFN_TYPES.add, ATTENTION_TYPES.add, TAPER_SCHEDULES.add
"""Class decorators: make a type or a schedule known under its `name`."""
