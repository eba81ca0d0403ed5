"""The sections of a run's config: OLMo's, with the keys and defaults of this package.

A class has the name of the OLMo class that it stands for. `olmo_ext.config.schema` fills them from YAML.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from olmo_ext.base import upstream_sections as upstream
from olmo_ext.base.quantities import EQUAL_WITHIN

CountOrList = Annotated[int | list[int], "count_or_list"]
TextOrList = Annotated[str | list[str], "text_or_list"]
Seconds = Annotated[float, "seconds"]
Fraction = Annotated[float, "fraction"]
Text = Annotated[str, "text"]
Loss = Annotated[Literal["full", "chunked"], "enum:Loss"]


@dataclass(frozen=True, kw_only=True)
class OpenSection:
    """A section that also takes the options of the type it names."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Written beside the other keys in YAML; typed like the defaults that the registered type gives them."""


@dataclass(frozen=True, kw_only=True)
class TaperSection(OpenSection):
    schedule: str | None = None
    start: float | None = None
    end: float | None = None
    groups: list[float] | None = None
    widths: list[int] | None = None
    multiple_of: int | None = None


@dataclass(frozen=True, kw_only=True)
class FFNSection(OpenSection):
    type: str = "conventional"
    d_ff: CountOrList | None = None
    ratio: float | None = None
    multiple_of: int | None = None
    num_sub_mlps: int = 1
    taper: TaperSection | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSection(OpenSection):
    type: TextOrList = "softmax"
    head_dim: int | None = None
    n_heads: CountOrList | None = None
    n_kv_heads: CountOrList | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetSection:
    non_embedding: int | None = None
    total: int | None = None
    training_flops_per_token: int | None = None
    tolerance: Fraction = EQUAL_WITHIN
    attention: Text | None = None
    """A count as its source prints it, such as `28.31M`."""

    ffn: Text | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(upstream.ModelConfig):
    # OLMo's defaults are GPT-2's: dropout of 0.1 everywhere, which no current recipe uses.
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    ffn: FFNSection = field(default_factory=FFNSection)
    attention: AttentionSection = field(default_factory=AttentionSection)


@dataclass(frozen=True, kw_only=True)
class DataConfig(upstream.DataConfig):
    subset: str | None = None
    corpus: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig(upstream.EvaluatorConfig):
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class WandbConfig(upstream.WandbConfig):
    # OLMo's default entity and tag are its authors' own.
    entity: str | None = None
    tags: list[str] | None = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(OpenSection, upstream.SchedulerConfig):
    # OLMo's enumeration; here a registry, which plugins extend.
    name: str = "cosine_with_warmup"  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(upstream.TrainConfig):
    """Every key of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluators: list[EvaluatorConfig] = field(default_factory=list)  # type: ignore[assignment]
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    wandb: WandbConfig | None = None
    distributed_strategy: upstream.DistributedStrategy | None = "ddp"
    time_limit: Seconds | None = None
    budget: BudgetSection | None = None
    plugins: list[str] = field(default_factory=list)
    node: str | None = None
    loss: Loss = "full"
    """`chunked` computes the same loss without holding the logits of more than a few tokens."""


def plain_section(section: Any) -> Any:
    """A section, or a value of one, as YAML holds it: dicts, lists and single values, all of them new."""
    if dataclasses.is_dataclass(section):
        content = {f.name: plain_section(getattr(section, f.name)) for f in dataclasses.fields(section)}
        return content | content.pop("options") if isinstance(section, OpenSection) else content
    if isinstance(section, Mapping):
        return {key: plain_section(value) for key, value in section.items()}
    return [plain_section(item) for item in section] if isinstance(section, (list, tuple)) else section
