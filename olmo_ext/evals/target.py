"""What is evaluated: a run, or a Hugging Face folder, behind one small interface."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from olmo_ext.base.errors import InputError
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.sections import TrainConfig
from olmo_ext.data.tokenizer import Tokenizer, load_tokenizer
from olmo_ext.training.checkpoint import CheckpointStore, checkpoint_fingerprint


class EvaluatedModel:
    """A language model that gives logits.

    :param module: OLMo's model, a Hugging Face causal model, or anything callable with ids [batch, time] that returns
        logits [batch, time, vocabulary] or an object with `.logits`.
    :param max_sequence_length: the longest input, in tokens.
    :param precision: `fp32` or `bf16` (autocast).
    """

    def __init__(
        self,
        module: Any,
        *,
        max_sequence_length: int,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
    ) -> None:
        self.module = module
        self.max_sequence_length = max_sequence_length
        self.device = torch.device(device)
        self.precision = precision
        self._kind = _cache_kind(module)

    def _call(self, ids: torch.Tensor, **arguments: Any) -> Any:
        cast: Any = contextlib.nullcontext()
        if self.precision == "bf16":
            cast = torch.autocast(self.device.type, dtype=torch.bfloat16)
        with torch.inference_mode(), cast:
            return self.module(ids.to(self.device), **arguments)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [batch, time] -> logits [batch, time, vocabulary]."""
        output = self._call(ids)
        return output if isinstance(output, torch.Tensor) else output.logits

    def next_logits(self, ids: torch.Tensor, cache: Any = None, *, use_cache: bool = True) -> tuple[torch.Tensor, Any]:
        """Logits of the next token [batch, vocabulary] after `ids` [batch, time], and the cache for what follows.

        With a cache, `ids` holds the tokens that the cache has not seen yet.
        """
        if not use_cache or self._kind == "none":
            seen = ids if cache is None else torch.cat([cache, ids], dim=1)
            return self.logits(seen)[:, -1], seen
        if self._kind == "olmo":
            output = self._call(ids, past_key_values=cache, use_cache=True, last_logits_only=True)
            return output.logits[:, -1], output.attn_key_values
        output = self._call(ids, past_key_values=cache, use_cache=True)
        return output.logits[:, -1], output.past_key_values


def _cache_kind(module: Any) -> str:
    """How the module takes a key-value cache: OLMo's way, Hugging Face's, or not at all."""
    if not isinstance(module, torch.nn.Module):
        return "none"
    if hasattr(module, "transformer") and hasattr(module.transformer, "wte") and hasattr(module, "generate"):
        if not hasattr(module.config, "model_type"):
            return "olmo"
    return "hf" if hasattr(module, "prepare_inputs_for_generation") else "none"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One thing named on the command line, loaded."""

    name: str
    model: EvaluatedModel
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """What ends a generated text; a Hugging Face folder may name several."""

    step: int | None
    checkpoint_sha256: str
    run: RunDirectory | None
    """The run's folder, which the results go into; None for a Hugging Face model."""

    config: TrainConfig | None
    """The run's resolved config."""

    @property
    def title(self) -> str:
        """Name and step, for people."""
        return self.name if self.step is None else f"{self.name}, step {self.step}"


def _load_run(directory: Path, step: int | None, device: str, precision: str) -> Target:
    from olmo_ext.training.load_model import load_model_from_run

    run = RunDirectory(directory)
    run.read_config()
    store = CheckpointStore(run.checkpoints, report=lambda line: None)
    folder = store.folder(step) if step is not None else store.newest_complete(verify=False)
    if folder is None or not folder.is_dir():
        there = ", ".join(str(number) for number in store.steps()) or "none"
        raise InputError(
            "no complete checkpoint" if step is None else f"no checkpoint of step {step}",
            where=str(directory),
            right=f"steps there are: {there}",
        )
    chosen_step = int(folder.name.removeprefix("step"))
    module, config = load_model_from_run(directory, step=chosen_step, device=device)
    tokenizer = load_tokenizer(
        config.tokenizer.identifier,
        eos_token_id=config.model.eos_token_id,
        pad_token_id=config.model.pad_token_id,
    )
    return Target(
        name=run.name,
        model=EvaluatedModel(
            module.eval(), max_sequence_length=config.model.max_sequence_length, device=device, precision=precision
        ),
        tokenizer=tokenizer,
        stop_token_ids=(tokenizer.eos_token_id,),
        step=chosen_step,
        checkpoint_sha256=checkpoint_fingerprint(folder),
        run=run,
        config=config,
    )


def _ids(value: Any) -> list[int]:
    """Token ids of a config's entry: one, a list, or none."""
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def load_hugging_face(folder: Path, *, device: str = "cpu", precision: str = "fp32", trust: bool = False) -> Target:
    """A causal language model from a local Hugging Face folder, in fp32, without touching the network.

    :param trust: whether modelling code inside the folder may run.
    :raises InputError: if transformers cannot load it, its length is not known, or its tokenizer has ids beyond it.
    """
    import transformers

    from olmo_ext.hf import register

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register()
    try:
        module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust, dtype=torch.float32
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        hint = (
            "the folder brings its own code: --trust-remote-code runs it" if "trust_remote_code" in str(error) else None
        )
        raise InputError(f"transformers cannot load it ({reason})", where=str(folder), right=hint) from None
    config = module.config
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if length is None:
        raise InputError(
            "config.json does not say how long an input may be", where=str(folder), right="max_position_embeddings"
        )
    eos = config.eos_token_id
    named = getattr(module.generation_config, "eos_token_id", None)
    pad = config.pad_token_id
    # Some folders say -1 for none.
    tokenizer = load_tokenizer(
        folder, eos_token_id=next(iter(_ids(eos)), None), pad_token_id=None if pad is None or pad < 0 else pad
    )
    embeddings: Any = module.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model {rows:,}",
            where=str(folder),
            right="the tokenizer that the model was trained with",
        )
    return Target(
        name=folder.name,
        model=EvaluatedModel(module.eval().to(device), max_sequence_length=length, device=device, precision=precision),
        tokenizer=tokenizer,
        stop_token_ids=tuple(dict.fromkeys([tokenizer.eos_token_id, *_ids(eos), *_ids(named)])),
        step=None,
        checkpoint_sha256=checkpoint_fingerprint(folder),
        run=None,
        config=None,
    )


def load_target(
    path: Path | str,
    *,
    step: int | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    trust_remote_code: bool = False,
) -> Target:
    """A run's folder, one of its `checkpoints/step<N>` folders, or a Hugging Face folder.

    :raises InputError: if it is none of them.
    """
    path = Path(path)
    if RunDirectory(path).exists():
        if not (path / "complete.json").is_file():
            return _load_run(path, step, device, precision)
    resolved = path.resolve()
    match = re.fullmatch(r"step(\d+)", resolved.name)
    if match and resolved.parent.name == "checkpoints":
        if step not in (None, int(match[1])):
            raise InputError(f"--step {step} and a checkpoint of step {match[1]}", where=str(path), right="one of them")
        return _load_run(resolved.parent.parent, int(match[1]), device, precision)
    if (path / "config.json").is_file():
        if step is not None:
            raise InputError("--step goes with a run", where=str(path))
        return load_hugging_face(path, device=device, precision=precision, trust=trust_remote_code)
    raise InputError(
        "neither a run nor a Hugging Face model",
        where=str(path),
        right="a folder with config.yaml and checkpoints/, a checkpoints/step<N> folder, or one with config.json",
    )


@dataclass(frozen=True, kw_only=True)
class Share:
    """This process' part of the items: every `number`-th from `rank` on."""

    rank: int = 0
    number: int = 1

    @classmethod
    def current(cls) -> Share:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(rank=torch.distributed.get_rank(), number=torch.distributed.get_world_size())
        return cls()

    def of(self, number_of_items: int) -> range:
        return range(self.rank, number_of_items, self.number)

    def gather(self, values: dict[int, Any]) -> dict[int, Any]:
        """Item -> value of all processes together, in order of the items, the same everywhere."""
        if self.number > 1:
            parts: list[dict[int, Any] | None] = [None] * self.number
            torch.distributed.all_gather_object(parts, values)
            values = {item: value for part in parts for item, value in (part or {}).items()}
        return dict(sorted(values.items()))


def batches_by_length(lengths: Sequence[int], items: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Items in batches of similar length, each at most `tokens_per_batch` padded tokens (or one item)."""
    batch: list[int] = []
    longest = 0
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        longest = max(longest, lengths[item])
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch, longest = [], lengths[item]
        batch.append(item)
    if batch:
        yield batch
