"""Record what a run was made with: code, packages, machine and data. Holds no secrets and imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import olmo_ext
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.secrecy import SECRET_VARIABLE, without_credentials
from olmo_ext.config.run_config import RunConfig

PACKAGES = ("ai2-olmo", "torch", "numpy", "omegaconf", "datasets", "safetensors", "tokenizers", "transformers", "wandb")


def _git(*arguments: str) -> str | None:
    folder = Path(olmo_ext.__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def code_revision() -> dict[str, Any]:
    """Version; git revision and a hash of the uncommitted changes where the package is a checkout."""
    frozen = Path(olmo_ext.__file__).parent.parent / "code.json"
    if frozen.is_file():  # a copy that `launch` made: olmo_ext.launch.freeze
        return json.loads(frozen.read_text())["code"]
    revision, digest = None, None
    # A checkout that merely contains an environment with the package says nothing about the package.
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        revision = (_git("rev-parse", "HEAD") or "").strip() or None
        diff = _git("diff", "HEAD", "--", ".")
        digest = hashlib.sha256(diff.encode()).hexdigest() if diff else None
    return {"version": olmo_ext.__version__, "revision": revision, "diff_sha256": digest}


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def command_line() -> list[str]:
    """The command, with passwords in addresses and the value of anything that is named like a secret left out."""
    arguments = []
    for argument in sys.argv:
        name, equals, _ = argument.partition("=")
        arguments.append(f"{name}=***" if equals and SECRET_VARIABLE.search(name) else without_credentials(argument))
    return arguments


def build_provenance(*, device: str, world_size: int, data: dict[str, Any]) -> dict[str, Any]:
    """What `provenance.json` holds.

    :param device: the name of the accelerator, or of the processor.
    :param data: fingerprints of training and evaluation data.
    """
    return {
        "code": code_revision(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": device,
        "world_size": world_size,
        "data": data,
        "command": command_line(),
        "slurm_job": slurm_job(),
    }


def slurm_job() -> str | None:
    """`JOB`, or `ARRAY_TASK` for an element of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def processor_name() -> str:
    """The CPU's model name."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def shape_json(config: RunConfig) -> dict[str, Any]:
    """What `shape.json` holds: widths per layer, counts by group, the budget and the deviation from it."""
    shape = config.shape
    layers = [
        {
            "ffn": {
                "type": layer.ffn.type,
                "d_ff": list(layer.ffn.d_ff),
                "activation": layer.ffn.activation,
                "options": dict(layer.ffn.options),
            },
            "attention": {
                "type": layer.attention.type,
                "n_heads": layer.attention.n_heads,
                "n_kv_heads": layer.attention.n_kv_heads,
                "head_dim": layer.attention.head_dim,
                "options": dict(layer.attention.options),
            },
        }
        for layer in shape.layers
    ]
    sizes = {"d_model": shape.d_model, "n_layers": shape.n_layers, "layers": layers}
    budget = config.budget_report.to_json() if config.budget_report is not None else None
    return {**sizes, **config.counts.to_json(), "budget": budget}


def describe_run(
    config: RunConfig,
    *,
    directory: RunDirectory,
    device: str,
    world_size: int,
    data: dict[str, Any],
    evaluation: dict[str, str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write config.yaml, shape.json and provenance.json; returns the last two's content, provenance first.

    :param data: the training data's fingerprint (`data_fingerprint`).
    :param evaluation: the validation sets' fingerprints by label.
    """
    about_data: dict[str, Any] = {
        name: data[name] for name in ("fingerprint", "source", "order_seed", "instances") if name in data
    }
    about_data |= {"tokenizer": config.tokenizer.identifier, "evaluation": evaluation}
    provenance = build_provenance(device=device, world_size=world_size, data=about_data)
    shape = shape_json(config)
    directory.write_config(config.plain())
    directory.write_shape(shape)
    directory.write_provenance(provenance)
    return provenance, shape
