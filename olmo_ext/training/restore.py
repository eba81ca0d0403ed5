"""Load a checkpoint into a trainer: the run's own, another run's, or one that OLMo wrote."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from olmo.model import OLMo
from olmo.optim import LionW
from olmo.torch_util import seed_all
from safetensors.torch import load_file

from olmo_ext.base.errors import InputError
from olmo_ext.config.run_config import RunConfig
from olmo_ext.data.loader import compare_fingerprints
from olmo_ext.training import checkpoint
from olmo_ext.training.distributed import Ranks, agree
from olmo_ext.training.foreign import load_foreign
from olmo_ext.training.tensor_state import (
    OptimizerState,
    Tensors,
    check_fits,
    load_model,
    load_optimizer,
    restore_random_state,
)
from olmo_ext.upstream.trainer import RunTrainer


def own_checkpoint(store: checkpoint.CheckpointStore, data: Mapping[str, Any], ranks: Ranks) -> Path | None:
    """The newest complete checkpoint of a run, made from the same data.

    :param data: the fingerprint of the data that is there now.
    :returns: None if there is none.
    :raises InputError: if the data has changed since.
    """
    own = None
    if ranks.is_first:
        store.remove_leftovers()
        own = store.newest_complete()
    own = agree(own, ranks)
    if own is None:
        return None
    state = checkpoint.read_train_state(own)
    if "data" not in state:
        raise InputError(
            "an imported model, whose checkpoint holds weights only",
            where=str(own),
            right=f"another run with load_path: {own}, reset_optimizer_state: true and reset_trainer_state: true",
        )
    if differences := compare_fingerprints(state["data"], data):
        raise InputError(
            f"the data is not what this run was trained on: {'; '.join(differences)}",
            where=str(own),
            right="files may move, but their content, their order and the settings must stay",
        )
    return own


class Restorer:
    """:param trainer: a trainer at step 0, with its initial weights.
    :param steps: the step at which the run ends.
    """

    def __init__(
        self, trainer: RunTrainer, *, config: RunConfig, steps: int, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        self.trainer, self.config, self.ranks, self.say = trainer, config, ranks, say
        self.steps = steps

    def fresh(self) -> None:
        """Begin at step 0."""
        trainer = self.trainer
        trainer.epoch = self.config.epoch or 0
        self._skip_batches()
        self._place_data()

    def from_own(self, path: Path) -> dict[str, Any]:
        """Continue the run from its own checkpoint; returns its train_state."""
        state = checkpoint.read_train_state(path)
        self._load_weights(checkpoint.load_model_state(path), str(path))
        self._load_moments(checkpoint.load_optimizer_state(path), str(path))
        self._set_position(state)
        trainer = self.trainer
        trainer.seconds = state["seconds"]
        trainer.first_step = state["first_step"]
        if state.get("train_loss") is not None:
            trainer.cur_train_loss = state["train_loss"]
        else:  # A checkpoint from before this was saved: nothing to compare yet.
            trainer.min_train_loss = float("inf")
        if state["bolt_on_warmup"]:
            trainer.set_bolt_on_warmup(*state["bolt_on_warmup"])
        self._place_clipping()
        self._place_data()
        self._restore_random(path, state)
        self.say(f"continuing from {path}")
        return state

    def from_elsewhere(self, load_path: str) -> None:
        """Warm start from `load_path`: see `load_foreign` for what it may be, and for what is refused."""
        trainer = self.trainer
        where = f"load_path {load_path}"
        new_optimizer, new_position = self.config.reset_optimizer_state, self.config.reset_trainer_state
        content = load_foreign(
            load_path,
            model=self.config.model,
            shape=self.config.shape,
            with_optimizer=not new_optimizer,
            with_position=not new_position,
        )
        self._load_weights(content.weights, where)
        if not new_optimizer:
            assert content.moments is not None
            self._load_moments(content.moments, where)
        trainer.epoch = self.config.epoch or 0
        if not new_position and self.config.restore_dataloader:
            assert content.state is not None
            self._set_position(content.state)
            if self.config.epoch not in (None, trainer.epoch):
                trainer.epoch, trainer.global_train_examples_seen_this_epoch = self.config.epoch, 0
            self._place_clipping()
            if new_optimizer:
                # In the schedule's units, as the warm-up is: steps or tokens.
                start = trainer.scheduler_current
                trainer.set_bolt_on_warmup(start, start + int(self.config.scheduler.t_warmup))
        trainer.first_step = trainer.global_step
        self._skip_batches()
        self._place_data()
        self.say(
            f"weights from {load_path}; optimizer {'new' if new_optimizer else 'from there'};"
            f" step {trainer.global_step}"
        )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _renamed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors, renamed for this model's block grouping."""
        renamed, _ = self.trainer.model._make_state_dict_compatible(dict(tensors))
        return renamed

    def _load_weights(self, weights: Tensors, where: str) -> None:
        weights = self._renamed(weights)
        check_fits(self._shapes(), weights, where)
        load_model(self.trainer.dist_model, weights)

    def _load_moments(self, moments: OptimizerState, where: str) -> None:
        moments = self._renamed(moments)
        kinds = ["exp_avg"] if isinstance(self.trainer.optim, LionW) else ["exp_avg", "exp_avg_sq", "step"]
        for name in self._shapes():
            lacking = [kind for kind in kinds if kind not in moments.get(name, {})]
            if lacking:
                optimizer = self.config.optimizer.name
                raise InputError(
                    f"no {lacking[0]} of {name} in the checkpoint, which {optimizer} needs",
                    where=where,
                    right="reset_optimizer_state: true",
                )
        check_fits(self._shapes(), {name: own["exp_avg"] for name, own in moments.items() if own}, where)
        load_optimizer(self.trainer.dist_model, self.trainer.optim, moments)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the model's parameters, even where a wrapper holds only a shard of them."""
        if not hasattr(self, "_full_shapes"):
            with torch.random.fork_rng(devices=[]):
                bare = OLMo(dataclasses.replace(self.trainer.model.config, init_device="meta"))
            self._full_shapes = {name: tuple(tensor.shape) for name, tensor in bare.state_dict().items()}
        return self._full_shapes

    def _set_position(self, state: Mapping[str, Any]) -> None:
        trainer = self.trainer
        trainer.global_step = state["step"]
        trainer.global_train_tokens_seen = state["tokens"]
        trainer.global_train_examples_seen_this_epoch = state["examples_seen_this_epoch"]
        trainer.epoch = state["epoch"]
        if state.get("min_train_loss") is not None:
            trainer.min_train_loss = state["min_train_loss"]

    def _place_clipping(self) -> None:
        """The norm that the next step clips to: OLMo's step sets it for the step after it, where a clipping warm-up
        (`scheduler.grad_clip_warmup_steps`) makes it depend on the step."""
        trainer = self.trainer
        for group in trainer.optim.param_groups:
            for key in ("max_grad_norm", "max_grad_norm_ratio"):
                group[key] = trainer.scheduler.get_max_grad_norm(
                    getattr(trainer.cfg, key), trainer.scheduler_current, trainer.scheduler_max
                )

    def _skip_batches(self) -> None:
        """`fast_forward_batches`, once: upstream applies it again at every restart."""
        if skipped := self.config.fast_forward_batches:
            self.trainer.global_train_examples_seen_this_epoch += skipped * self.config.global_train_batch_size

    def _place_data(self) -> None:
        trainer, batch = self.trainer, self.config.global_train_batch_size
        epoch, seen = trainer.epoch or 0, trainer.global_train_examples_seen_this_epoch
        size = trainer.batches_per_epoch * batch
        if seen >= size:
            # Also at the exact end of an epoch: the next step begins the next one.
            epoch, seen = epoch + seen // size, seen % size
        trainer.epoch, trainer.global_train_examples_seen_this_epoch = epoch, seen
        if trainer.dataset.epoch != epoch:
            trainer.dataset.reshuffle(epoch)
        trainer.dataset.start_index = seen
        # A warm start from a run of another batch size stands where steps times batch does not tell.
        end = seen + (self.steps - trainer.global_step) * batch
        if end > size and seen % batch:
            raise InputError(
                f"load_path stands at instance {seen} of its epoch, which global_train_batch_size {batch} does not"
                f" divide, and the run goes beyond the epoch's {size}",
                where=f"load_path {self.config.load_path}",
                right="a batch size that divides it, a max_duration within the epoch, or reset_trainer_state: true",
            )
        trainer.dataset.needed = min(max(trainer.dataset.needed, end), trainer.dataset.total_size)

    def _restore_random(self, path: Path, state: Mapping[str, Any]) -> None:
        same = state["world_size"] == self.ranks.world_size
        if same and restore_random_state(load_file(path / checkpoint.RNG), self.ranks.rank):
            return
        # The number of ranks has changed: each rank draws from a stream that depends on seed, step and rank alone.
        seed_all(random.Random(f"{self.config.seed}/{state['step']}/{self.ranks.rank}").randrange(2**32))
