"""Bringing a trainer to where a checkpoint left it: the run's own, another run's, or OLMo's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from olmo.torch_util import seed_all

from olmo_ext.config import RunConfig
from olmo_ext.data.loader import compare_fingerprints
from olmo_ext.errors import InputError
from olmo_ext.training import checkpoint as files
from olmo_ext.training.distributed import Ranks, agree
from olmo_ext.training.state import (
    OptimizerState,
    Tensors,
    check_fits,
    load_model,
    load_optimizer,
    restore_random_state,
)
from olmo_ext.upstream.training import RunTrainer


def own_checkpoint(store: files.CheckpointStore, data: Mapping[str, Any], ranks: Ranks) -> Path | None:
    """The newest complete checkpoint of a run, made from the same data.

    :param data: the fingerprint of the data that is there now.
    :raises InputError: if the data has changed since.
    """
    own = None
    if ranks.is_first:
        store.remove_leftovers()
        own = store.newest_complete()
    own = agree(own, ranks)
    if own is not None and (differences := compare_fingerprints(files.read_train_state(own)["data"], data)):
        raise InputError(
            f"the data is not what this run was trained on: {'; '.join(differences)}",
            where=str(own),
            right="files may move, but their content, their order and the settings must stay",
        )
    return own


class Restorer:
    """:param trainer: at step 0, with its initial weights."""

    def __init__(self, trainer: RunTrainer, *, config: RunConfig, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.trainer, self.config, self.values, self.ranks, self.say = trainer, config, config.values, ranks, say

    def fresh(self) -> None:
        """Begin at step 0."""
        trainer = self.trainer
        trainer.epoch = self.values["epoch"] or 0
        self._skip_batches()
        self._place_data()

    def from_own(self, path: Path) -> dict[str, Any]:
        """Continue the run from its own checkpoint; returns its train_state."""
        state = files.read_train_state(path)
        self._load_weights(files.load_model_state(path), str(path))
        self._load_moments(files.load_optimizer_state(path), str(path))
        self._set_position(state)
        trainer = self.trainer
        trainer.seconds = state["seconds"]
        trainer.first_step = state["first_step"]
        if state["bolt_on_warmup"]:
            trainer.set_bolt_on_warmup(*state["bolt_on_warmup"])
        self._place_data()
        self._restore_random(path, state)
        self.say(f"continuing from {path}")
        return state

    def from_elsewhere(self, load_path: str) -> None:
        """Warm start from `load_path`: a checkpoint of ours or OLMo's unsharded one."""
        from olmo_ext.training.foreign import load_foreign

        trainer = self.trainer
        where = f"load_path {load_path}"
        new_optimizer, new_position = self.values["reset_optimizer_state"], self.values["reset_trainer_state"]
        found = load_foreign(
            load_path,
            model=self.values["model"],
            shape=self.config.shape,
            with_optimizer=not new_optimizer,
            with_position=not new_position,
        )
        self._load_weights(found.weights, where)
        if not new_optimizer:
            assert found.moments is not None
            self._load_moments(found.moments, where)
        trainer.epoch = self.values["epoch"] or 0
        if not new_position and self.values["restore_dataloader"]:
            assert found.state is not None
            self._set_position(found.state)
            if new_optimizer:
                start = trainer.global_step
                trainer.set_bolt_on_warmup(start, start + int(self.values["scheduler"]["t_warmup"]))
        trainer.first_step = trainer.global_step
        self._skip_batches()
        self._place_data()
        self.say(
            f"weights from {load_path}; optimizer {'new' if new_optimizer else 'from there'};"
            f" step {trainer.global_step}"
        )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _renamed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Names for this model's block grouping."""
        renamed, _ = self.trainer.model._make_state_dict_compatible(dict(tensors))
        return renamed

    def _load_weights(self, weights: Tensors, where: str) -> None:
        weights = self._renamed(weights)
        check_fits(self._shapes(), weights, where)
        load_model(self.trainer.dist_model, weights)

    def _load_moments(self, moments: OptimizerState, where: str) -> None:
        moments = self._renamed(moments)
        # A level that waits for its first update has a sum of gradients and no moments yet.
        known = {key: next(t for t in own.values() if t.dim()) for key, own in moments.items() if own}
        missing = sorted(set(self._shapes()) - set(known))
        # Before the first step there is no state at all.
        if moments and missing:
            raise InputError(f"no optimizer state for {missing[0]}", where=where, right="reset_optimizer_state: true")
        if moments:
            check_fits(self._shapes(), known, where)
        load_optimizer(self.trainer.dist_model, self.trainer.optim, moments)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the model's parameters, whatever a wrapper holds of them."""
        if not hasattr(self, "_full_shapes"):
            import dataclasses

            from olmo.model import OLMo

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

    def _skip_batches(self) -> None:
        """`fast_forward_batches`, once: upstream applies it again at every restart."""
        if skipped := self.values["fast_forward_batches"]:
            self.trainer.global_train_examples_seen_this_epoch += skipped * self.values["global_train_batch_size"]

    def _place_data(self) -> None:
        trainer = self.trainer
        epoch, seen = trainer.epoch or 0, trainer.global_train_examples_seen_this_epoch
        size = trainer.batches_per_epoch * self.values["global_train_batch_size"]
        if seen >= size:
            # Also at the exact end of an epoch: the next step begins the next one.
            epoch, seen = epoch + seen // size, seen % size
        trainer.epoch, trainer.global_train_examples_seen_this_epoch = epoch, seen
        if trainer.dataset.epoch != epoch:
            trainer.dataset.reshuffle(epoch)
        trainer.dataset.start_index = seen

    def _restore_random(self, path: Path, state: Mapping[str, Any]) -> None:
        from safetensors.torch import load_file

        same = state["world_size"] == self.ranks.world_size
        if same and restore_random_state(load_file(path / files.RNG), self.ranks.rank):
            return
        # Other ranks than before: a stream of their own that depends on seed, step and rank alone.
        seed_all(random.Random(f"{self.values['seed']}/{state['step']}/{self.ranks.rank}").randrange(2**32))
