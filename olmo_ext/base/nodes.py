"""Hardware facts by node type and by device name: package data, overlaid by the user's `slurm/nodes.yaml`. No torch."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, did_you_mean
from olmo_ext.base.quantities import parse_count, parse_number
from olmo_ext.base.yaml_tree import as_text, merge, parse_yaml, read_yaml

USER_FILE = Path("slurm/nodes.yaml")
"""The user's copy, relative to the working directory."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator; peaks are dense."""

    name: str
    device_names: tuple[str, ...]
    """What `torch.cuda.get_device_name()` answers."""

    memory: int
    """Bytes, as sold."""

    usable_memory: int
    """Bytes that a process can have."""

    peak_bf16: float
    """FLOP/s."""

    peak_fp8: float | None
    """FLOP/s, None where the hardware has no FP8."""

    bandwidth: float
    """Bytes/s of the GPU's memory."""

    interconnect: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node type of a cluster."""

    name: str
    gpu: GPU
    gpus_per_node: int
    cpus_per_node: int
    memory: int
    """Bytes of main memory."""

    mfu: float
    """Fraction of the peak that `plan` reckons hours with."""

    mfu_source: str
    source: str

    @property
    def cpus_per_gpu(self) -> int:
        return max(1, self.cpus_per_node // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Every known GPU and node type."""

    gpus: Mapping[str, GPU]
    nodes: Mapping[str, Node]

    def node(self, name: str, *, where: str | None = None) -> Node:
        """:raises InputError: for a name that is no node type."""
        if name not in self.nodes:
            known = f"known: {', '.join(sorted(self.nodes))}; add yours to {USER_FILE}"
            right = f"{did_you_mean(name, self.nodes, otherwise='')} {known}".lstrip()
            raise InputError(f"unknown node type {name!r}", where=where, right=right)
        return self.nodes[name]

    def gpu_of_device(self, device_name: str) -> GPU | None:
        """The GPU that a device name belongs to; None for an unknown one, MIG slices among them."""
        for gpu in self.gpus.values():
            if device_name.strip() in gpu.device_names:
                return gpu
        return None


class _Entry:
    """One mapping of the file, with errors that name the key."""

    def __init__(self, tree: Any, where: str) -> None:
        if not isinstance(tree, Mapping):
            raise InputError("holds no `key: value` lines", where=where, right="a mapping of keys and values")
        self._tree, self._where = tree, where

    def check_keys(self, known: tuple[str, ...]) -> None:
        for key in self._tree:
            if key not in known:
                right = did_you_mean(key, known, otherwise=f"known: {', '.join(known)}")
                raise InputError(f"unknown key {key!r}", where=f"{self._where}.{key}", right=right)

    def get(self, key: str) -> Any:
        if key not in self._tree:
            raise InputError(f"{key!r} is missing", where=self._where, right="as in the package's nodes.yaml")
        return self._tree[key]

    def positive(self, key: str, *, optional: bool = False) -> float | None:
        if optional and self._tree.get(key) is None:
            return None
        try:
            number = float(parse_number(self.get(key)))
        except ValueError as error:
            raise InputError(str(error), where=f"{self._where}.{key}") from None
        if number <= 0:
            raise InputError(f"{number:g} is not positive", where=f"{self._where}.{key}", right="more than 0")
        return number

    def number(self, key: str) -> float:
        value = self.positive(key)
        assert value is not None
        return value

    def count(self, key: str) -> int:
        self.positive(key)
        try:
            return parse_count(self.get(key))
        except ValueError as error:
            raise InputError(str(error), where=f"{self._where}.{key}") from None

    def text(self, key: str) -> str:
        return self._as_text(key, self.get(key))

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        return tuple(self._as_text(key, item) for item in (value if isinstance(value, list) else [value]))

    def _as_text(self, key: str, value: Any) -> str:
        try:
            return as_text(value)
        except ValueError as error:
            raise InputError(str(error), where=f"{self._where}.{key}") from None


GPU_KEYS = ("device_names", "memory", "usable_memory", "peak_bf16", "peak_fp8", "bandwidth", "interconnect", "source")
NODE_KEYS = ("gpu", "gpus_per_node", "cpus_per_node", "memory", "mfu", "mfu_source", "source")


def _gpu(name: str, tree: Any, file: str) -> GPU:
    entry = _Entry(tree, f"{file}, gpus.{name}")
    entry.check_keys(GPU_KEYS)
    return GPU(
        name=name,
        device_names=entry.texts("device_names"),
        memory=entry.count("memory"),
        usable_memory=entry.count("usable_memory"),
        peak_bf16=entry.number("peak_bf16"),
        peak_fp8=entry.positive("peak_fp8", optional=True),
        bandwidth=entry.number("bandwidth"),
        interconnect=entry.text("interconnect"),
        source=entry.text("source"),
    )


def _node(name: str, tree: Any, gpus: Mapping[str, GPU], file: str) -> Node:
    entry = _Entry(tree, f"{file}, nodes.{name}")
    entry.check_keys(NODE_KEYS)
    gpu = entry.text("gpu")
    if gpu not in gpus:
        raise InputError(
            f"unknown GPU {gpu!r}", where=f"{file}, nodes.{name}.gpu", right=f"known: {', '.join(sorted(gpus))}"
        )
    if not (mfu := entry.number("mfu")) <= 1:
        raise InputError(
            f"mfu {mfu:g} is a fraction of the peak", where=f"{file}, nodes.{name}.mfu", right="0.35 for 35 %"
        )
    return Node(
        name=name,
        gpu=gpus[gpu],
        gpus_per_node=entry.count("gpus_per_node"),
        cpus_per_node=entry.count("cpus_per_node"),
        memory=entry.count("memory"),
        mfu=mfu,
        mfu_source=entry.text("mfu_source"),
        source=entry.text("source"),
    )


@functools.cache
def _packaged() -> str:
    return importlib.resources.files("olmo_ext.resources").joinpath("nodes.yaml").read_text(encoding="utf-8")


def _section(tree: Mapping[str, Any], key: str, file: str) -> list[tuple[str, Any]]:
    if not isinstance(tree[key], Mapping):
        raise InputError("holds no `name: {...}` lines", where=f"{file}, {key}", right="as in the package's nodes.yaml")
    return list(tree[key].items())


def load_hardware(user_file: Path | None = None) -> Hardware:
    """The package's facts with the user's on top, key by key.

    :param user_file: `slurm/nodes.yaml` of the working directory by default, where there is one.
    :raises InputError: naming the file and key of what is missing, unknown or no number.
    """
    tree = parse_yaml(_packaged(), name="nodes.yaml")
    path = USER_FILE if user_file is None else user_file
    file = "nodes.yaml"
    if user_file is not None or path.exists():
        # A section whose lines are all comments is null, and adds nothing.
        own = {key: value for key, value in read_yaml(path).items() if value is not None}
        tree, file = merge(tree, own), str(path)
    _Entry(tree, file).check_keys(("gpus", "nodes"))
    gpus = {name: _gpu(name, entry, file) for name, entry in _section(tree, "gpus", file)}
    nodes = {name: _node(name, entry, gpus, file) for name, entry in _section(tree, "nodes", file)}
    return Hardware(gpus=gpus, nodes=nodes)


def peak_flops_of_device(device_name: str, *, node: str | None = None) -> float | None:
    """Dense bf16 FLOP/s of a device, for MFU: by its name, else by the node type that a config declares; else None."""
    hardware = load_hardware()
    gpu = hardware.gpu_of_device(device_name)
    if gpu is None and node is not None:
        gpu = hardware.node(node, where="node").gpu
    return None if gpu is None else gpu.peak_bf16
