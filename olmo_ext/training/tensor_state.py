"""Model, optimizer and random state between a (wrapped) model and plain named CPU tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from olmo_ext.base.errors import InputError
from olmo_ext.training.update_periods import equal_entries
from olmo_ext.upstream.parameter_names import clean_name

Tensors = dict[str, torch.Tensor]
OptimizerState = dict[str, Tensors]
"""Parameter name -> state name -> tensor."""


def _full_state(model: FSDP) -> Any:
    # Offloading crashes where the parameters are on the CPU already (torch 2.13).
    on_device = next(model.parameters()).device.type != "cpu"
    return FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=on_device),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=on_device),
    )


def gather(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensors, OptimizerState]:
    """The full model and optimizer state on the CPU of rank 0; empty on other ranks. All ranks take part.

    :param model: the DDP or FSDP wrapper.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    if isinstance(model, FSDP):
        with _full_state(model), equal_entries(optimizer) as superfluous:
            weights = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
            moments = FSDP.optim_state_dict(model, optimizer)
        if not first:
            return {}, {}
        states = {clean_name(name): dict(state) for name, state in moments["state"].items()}
        for name, key in superfluous:
            states[name].pop(key, None)
    else:
        if not first:
            return {}, {}
        weights = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
        states = {
            name: dict(optimizer.state[parameter])
            for name, parameter in _named_parameters(optimizer)
            if parameter in optimizer.state
        }
    return (
        {name: tensor.detach().cpu() for name, tensor in weights.items()},
        {name: {key: _on_cpu(value) for key, value in state.items()} for name, state in states.items()},
    )


def _on_cpu(value: Any) -> torch.Tensor:
    """An optimizer's entry. A scalar is copied wherever it is: AdamW counts its steps in a tensor on the CPU, in place,
    while a thread still writes what was gathered from a GPU."""
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.cpu() if tensor.dim() else tensor.clone().cpu()


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (clean_name(name), parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def check_fits(ours: Mapping[str, Any], theirs: Mapping[str, torch.Tensor], where: str) -> None:
    """Names and shapes of a checkpoint against the model's.

    :param ours: parameter name -> tensor or shape of the model.
    :raises InputError: naming the first difference.
    """
    shapes = {name: tuple(getattr(value, "shape", value)) for name, value in ours.items()}
    for name in sorted(shapes.keys() | theirs.keys()):
        if name not in theirs:
            raise InputError(f"no tensor {name} in the checkpoint, the model has one", where=where)
        if name not in shapes:
            raise InputError(f"the checkpoint's tensor {name} has no place in the model", where=where)
        if shapes[name] != tuple(theirs[name].shape):
            raise InputError(
                f"{name} is {list(theirs[name].shape)} in the checkpoint and {list(shapes[name])} in the model",
                where=where,
                right="the same shape, or another load_path",
            )


def load_model(model: torch.nn.Module, weights: Tensors) -> None:
    """Put full tensors, present on every rank, into the wrapped model."""
    if isinstance(model, FSDP):
        on_device = next(model.parameters()).device.type != "cpu"
        config = FullStateDictConfig(rank0_only=False, offload_to_cpu=on_device)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            model.load_state_dict(weights)
        return
    inner: Any = getattr(model, "module", model)
    inner.load_state_dict(weights)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, states: OptimizerState) -> None:
    """Put full optimizer state, present on every rank, into the optimizer; its param groups stay the config's."""
    if isinstance(model, FSDP):
        names = {clean_name(name) for name, _ in model.named_parameters()}
        groups = [
            {**group, "params": [clean_name(name) for name in group["param_names"]]} for group in optimizer.param_groups
        ]
        full = {
            "state": {name: dict(state) for name, state in states.items() if name in names},
            "param_groups": groups,
        }
        config = FullOptimStateDictConfig(rank0_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            local = FSDP.optim_state_dict_to_load(model, optimizer, full)
        optimizer.load_state_dict(_keep_groups(optimizer, local))
        return
    for name, parameter in _named_parameters(optimizer):
        if name not in states:
            continue
        optimizer.state[parameter] = {
            # The step counter stays on the CPU, where torch's AdamW keeps it unless it is fused or capturable.
            key: tensor.clone() if key == "step" else tensor.to(parameter.device, parameter.dtype, copy=True)
            for key, tensor in states[name].items()
        }


def _keep_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict whose param groups are the optimizer's own: learning rate and decay follow the config."""
    return {"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]}


def gather_random_state() -> Tensors:
    """Python's, numpy's and torch's generators of every rank, on rank 0. All ranks take part."""
    state: Any = _random_state()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        states = [state]
    else:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
    return {f"rank{rank}/{name}": tensor for rank, own in enumerate(states) for name, tensor in own.items()}


def _random_state() -> Tensors:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert version == 3 and name == "MT19937"
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(states: Tensors, rank: int) -> bool:
    """Set this rank's generators; False if the checkpoint holds none for this rank."""
    own = {name.partition("/")[2]: tensor for name, tensor in states.items() if name.startswith(f"rank{rank}/")}
    if not own:
        return False
    gauss = own["python_gauss"].item()
    random.setstate((3, tuple(own["python"].tolist()), None if gauss != gauss else gauss))
    position, has_gauss, cached = own["numpy_rest"].tolist()
    np.random.set_state(
        ("MT19937", own["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), float(cached))
    )
    torch.set_rng_state(own["torch"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    return True
