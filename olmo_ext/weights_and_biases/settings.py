"""What a run tells W&B about itself: names within W&B's limits, a flat bounded config, the mode, the stable id.

Pure and torch-free, so that `launch` refuses a bad name at submit and not in a job hours later.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from olmo_ext.base.errors import InputError
from olmo_ext.base.files import write_atomically
from olmo_ext.base.run_directory import RunDirectory
from olmo_ext.base.secrecy import SECRET_KEY, netrc_login, without_credentials
from olmo_ext.base.sweep_directory import SweepDirectory

MAX_NAME = 128
"""Longest project, entity, group and run name (characters)."""

MAX_TAG = 64
MAX_LIST = 64
"""A longer list in the config becomes its length and its sha256."""

MAX_TEXT = 4096
MAX_CONFIG_BYTES = 1 << 20
"""Size of the whole config as JSON; W&B becomes slow with more and refuses about 10 times that."""

FORBIDDEN_IN_PROJECT = "/\\#?%:"
DEFAULT_SERVER = "https://api.wandb.ai"
ID_FILE = "wandb_run_id"


def is_configured(config_values: Mapping[str, Any]) -> bool:
    """Whether the config has a `wandb` section at all; without one nothing is logged there."""
    return bool(config_values.get("wandb"))


def cancel_check_wanted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the user asked for runs to stop when they get the tag `cancel` on the server.

    Upstream asks the server at every check as soon as there is an API key, all ranks waiting. We ask only with
    OLMO_EXT_WANDB_CANCEL=1, and never from the training process.
    """
    environment = os.environ if environment is None else environment
    return environment.get("OLMO_EXT_WANDB_CANCEL", "").lower() in ("1", "true", "yes")


def _too_long(value: str, limit: int) -> str:
    return f"{len(value)} characters ({value[:24]}...), W&B takes at most {limit}"


def check_names(config_values: Mapping[str, Any], *, sweep: str | None = None, run: str | None = None) -> None:
    """Check everything that becomes a name on the W&B server. A config without a `wandb` section passes.

    :param sweep: the sweep's name, which becomes the W&B group when the config names none.
    :param run: the run's name, which becomes the W&B run name when the config names none.
    :raises InputError: naming the key, its length or character, and the limit.
    """
    if not is_configured(config_values):
        return
    section = config_values["wandb"]
    if not (section.get("project") or os.environ.get("WANDB_PROJECT")):
        raise InputError("no project", where="wandb.project", right="name the W&B project, or drop the wandb section")
    names = {
        "wandb.project": section.get("project") or os.environ.get("WANDB_PROJECT"),
        "wandb.entity": section.get("entity"),
        "wandb.group" if section.get("group") or not sweep else "the sweep's name (the W&B group)": (
            section.get("group") or sweep
        ),
        "wandb.name" if section.get("name") else "run_name": section.get("name")
        or run
        or config_values.get("run_name"),
    }
    for key, value in names.items():
        if value is not None and len(str(value)) > MAX_NAME:
            raise InputError(_too_long(str(value), MAX_NAME), where=key, right="a shorter name")
        if value is not None and not str(value).strip():
            raise InputError("an empty name", where=key, right="a name or null")
    if bad := sorted(set(FORBIDDEN_IN_PROJECT) & set(names["wandb.project"] or "")):
        what = f"{' '.join(bad)} in a W&B project name"
        raise InputError(what, where="wandb.project", right="letters, digits, - _ .")
    tags = section.get("tags") or []
    for index, tag in enumerate(tags):
        if not 1 <= len(str(tag)) <= MAX_TAG:
            what = _too_long(str(tag), MAX_TAG) if tag else "an empty tag"
            raise InputError(what, where=f"wandb.tags[{index}]", right=f"1 to {MAX_TAG} characters")
    interval = section.get("log_interval", 1)
    if not isinstance(interval, int) or interval < 1:
        raise InputError(f"{interval!r}", where="wandb.log_interval", right="a number of steps, at least 1")


def wanted(step: int, values: Mapping[str, Any], log_interval: int) -> bool:
    """Whether a row goes to W&B: every `log_interval` steps, and every evaluation."""
    return step % max(log_interval, 1) == 0 or any(name.startswith("eval/") for name in values)


def server_url(environment: Mapping[str, str] | None = None) -> str:
    """The W&B server in use: WANDB_BASE_URL or the public one."""
    environment = os.environ if environment is None else environment
    return (environment.get("WANDB_BASE_URL") or DEFAULT_SERVER).rstrip("/")


def has_key(environment: Mapping[str, str] | None = None) -> bool:
    """Whether there is a login for the server: WANDB_API_KEY, an identity token file, or an entry in netrc."""
    environment = os.environ if environment is None else environment
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return netrc_login(urlsplit(server_url(environment)).netloc, environment) is not None


def choose_mode(environment: Mapping[str, str] | None = None) -> str:
    """`online`, `offline` or `disabled`: WANDB_MODE if set, else online exactly when there is a login."""
    environment = os.environ if environment is None else environment
    if environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    mode = environment.get("WANDB_MODE", "").lower()
    if mode in ("disabled", "offline"):
        return mode
    if mode in ("dryrun",):
        return "offline"
    # Online without a login would ask for one on a terminal that nobody watches.
    return "online" if has_key(environment) else "offline"


def run_id(run_directory: RunDirectory) -> str:
    """The run's W&B id, the same for all attempts; made and kept in the run directory at the first call."""
    path = run_directory.path / ID_FILE
    try:
        if text := path.read_text().strip():
            return text
    except FileNotFoundError:
        pass
    run_directory.path.mkdir(parents=True, exist_ok=True)
    made = secrets.token_hex(6)
    write_atomically(path, made + "\n")
    return made


def bounded(value: Any, key: str = "") -> Any:
    """A copy that W&B can take: long lists become `{count, sha256}`, long texts are cut with their sha256, passwords
    in URLs and values under secret-sounding keys are left out."""
    if isinstance(value, Mapping):
        return {str(name): bounded(item, str(name)) for name, item in value.items()}
    if isinstance(value, str):
        if SECRET_KEY.search(key) and value:
            return "(left out: the key sounds like a secret)"
        value = without_credentials(value)
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}... sha256 {_digest(value)}"
    if isinstance(value, Sequence):
        if len(value) > MAX_LIST:
            return {"count": len(value), "sha256": _digest(value)}
        return [bounded(item, key) for item in value]
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def shape_keys(shape: Mapping[str, Any]) -> dict[str, Any]:
    """`shape.json` as scalars that W&B can group, filter and plot by.

    Top-level keys joined by an underscore: W&B asks for names without dots, and it spells a nested key differently in
    groups (`shape.value.x`) and in filters (`shape.x`).
    """
    layers = shape.get("layers") or []

    def kinds(part: str, name: str) -> str:
        return "+".join(dict.fromkeys(str(layer[part].get(name)) for layer in layers if part in layer))

    widths = [sum(layer["ffn"]["d_ff"]) for layer in layers if layer.get("ffn", {}).get("d_ff")]
    d_model, n_layers = shape.get("d_model"), shape.get("n_layers")
    keys: dict[str, Any] = {"shape_d_model": d_model, "shape_n_layers": n_layers}
    if d_model and n_layers:
        keys["shape_aspect"] = round(d_model / n_layers, 4)
    if layers:
        keys["shape_ffn"] = kinds("ffn", "type")
        keys["shape_attention"] = kinds("attention", "type")
        keys["shape_n_heads"] = kinds("attention", "n_heads")
        keys["shape_head_dim"] = kinds("attention", "head_dim")
        keys["shape_num_sub_mlps"] = max(len(layer["ffn"].get("d_ff") or [0]) for layer in layers)
    if widths:
        keys["shape_d_ff_first"], keys["shape_d_ff_last"] = widths[0], widths[-1]
        keys["shape_d_ff_mean"] = round(sum(widths) / len(widths), 2)
        if d_model:
            keys["shape_d_ff_ratio"] = round(sum(widths) / len(widths) / d_model, 4)
    parameters = shape.get("parameters") or {}
    keys.update({f"parameters_{name}": number for name, number in parameters.items()})
    keys.update({f"flops_per_token_{name}": number for name, number in (shape.get("flops_per_token") or {}).items()})
    if ffn := parameters.get("ffn"):
        keys["shape_ffn_share"] = round(ffn / max(parameters.get("non_embedding", ffn), 1), 4)
    return keys


def wandb_config(
    config_values: Mapping[str, Any],
    *,
    shape: Mapping[str, Any],
    provenance: Mapping[str, Any],
    sweep: str | None,
    shape_name: str,
    run_name: str,
) -> dict[str, Any]:
    """The config that a run carries on W&B: OLMo's own keys (nested, as upstream logs them), `shape.*` in full, and
    flat keys to group and plot by (`shape_name`, `shape_d_model`, ..., `parameters_non_embedding`)."""
    config: dict[str, Any] = bounded({k: v for k, v in config_values.items() if k != "wandb"})
    config["shape"] = bounded(shape)
    config["provenance"] = bounded(provenance)
    config.update(shape_keys(shape))
    config.update({"sweep_name": sweep, "shape_name": shape_name, "run": run_name})
    # Whatever is still too large goes as its hash, the largest section first; the flat keys are always small.
    while len(json.dumps(config, default=str)) > MAX_CONFIG_BYTES:
        largest = max(config, key=lambda key: len(json.dumps(config[key], default=str)))
        size = len(json.dumps(config[largest], default=str))
        config[largest] = {"bytes": size, "sha256": _digest(config[largest])}
    return config


def group_of_run(run_directory: RunDirectory) -> str:
    """The run's group in its sweep (its name without the seed part); the run's own name outside a sweep."""
    try:
        for run in SweepDirectory(run_directory.path.parent).read_description()["runs"]:
            if run["name"] == run_directory.name:
                return str(run["group"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return run_directory.name
