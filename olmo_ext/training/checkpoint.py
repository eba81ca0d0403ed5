"""Write, check, list and remove the checkpoints of a run; a checkpoint is complete or absent.

    checkpoints/step<N>/model.safetensors  optimizer.safetensors  rng.safetensors  train_state.json  config.yaml
                        complete.json      (written last: every file's size and sha256)
    checkpoints/latest -> step<N>

A checkpoint is written in a folder aside, fsynced, marked and renamed; `latest` is replaced atomically; older
checkpoints are removed only afterwards. Nothing is pickled, and nothing depends on the number of ranks.

safetensors is imported late: it loads torch, and `launch` imports this file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_ext.base.errors import InputError, WorkError
from olmo_ext.base.files import folder_aside, link_atomically, put_in_place, set_aside, sha256_of_file, sync_file
from olmo_ext.base.quantities import format_bytes
from olmo_ext.base.sections import TrainConfig
from olmo_ext.shapes.counts import count, count_layers
from olmo_ext.shapes.layers import ModelShape

MODEL, OPTIMIZER, RNG = "model.safetensors", "optimizer.safetensors", "rng.safetensors"
TRAIN_STATE, CONFIG, MARKER = "train_state.json", "config.yaml", "complete.json"
FORMAT = 1
STEP_NAME = re.compile(r"step(\d+)")
ASIDE_NAME = re.compile(r"step\d+([.-])(aside|replaced)\1.+|\.latest\..+\.aside")
"""Names of folders that an interrupted save leaves behind. Older run folders have dots in these names."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a checkpoint of one step holds, in main memory."""

    step: int
    tensors: Mapping[str, Mapping[str, Any]]
    """File name -> tensor name -> CPU tensor."""

    texts: Mapping[str, str]
    """File name -> content."""


def incomplete_because(path: Path, *, verify: bool) -> str | None:
    """Why a checkpoint folder cannot be used, in words, or None.

    :param verify: whether every file's sha256 is compared too, not its size alone.
    """
    try:
        marker = json.loads((path / MARKER).read_text())
        files = {name: (entry["size"], entry["sha256"]) for name, entry in marker["files"].items()}
    except FileNotFoundError:
        return f"no {MARKER}: the save did not end"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{MARKER} is torn"
    for needed in (MODEL, OPTIMIZER, TRAIN_STATE):
        if needed not in files:
            return f"{MARKER} does not list {needed}"
    for name, (size, digest) in files.items():
        try:
            actual_size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual_size != size:
            return f"{name} has {actual_size} bytes of {size}"
        try:
            if verify and sha256_of_file(path / name) != digest:
                return f"{name} is damaged: its sha256 differs"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _fingerprint(files: Sequence[Path]) -> str:
    return hashlib.sha256("".join(f"{path.name} {sha256_of_file(path)}\n" for path in files).encode()).hexdigest()


def checkpoint_fingerprint(folder: Path) -> str:
    """The sha256 of a checkpoint's weights: from its marker where one lists it, else from the files.

    :raises InputError: if there are no weights.
    """
    marker = folder / MARKER
    try:
        return json.loads(marker.read_text())["files"][MODEL]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    weights = sorted(path for pattern in ("*.safetensors", "*.bin", "model.pt") for path in folder.glob(pattern))
    if not weights:
        raise InputError("no weights here", where=str(folder), right="a run, a checkpoint or a Hugging Face folder")
    return sha256_of_file(weights[0]) if len(weights) == 1 else _fingerprint(weights)


def require_complete(path: Path) -> None:
    """:raises InputError: if `path` is no complete checkpoint of ours."""
    reason = incomplete_because(path, verify=True) if path.is_dir() else "no such folder"
    if reason:
        raise InputError(reason, where=str(path), right="name a checkpoints/step<N> folder of a run")


def read_train_state(path: Path) -> dict[str, Any]:
    """The trainer's position (step, epoch, seen instances) as a complete checkpoint stores it.

    :raises InputError: if it has another format than this version's.
    """
    state = json.loads((path / TRAIN_STATE).read_text())
    if state.get("format") != FORMAT:
        raise InputError(f"checkpoint format {state.get('format')}", where=str(path), right=f"format {FORMAT}")
    return state


def load_model_state(path: Path) -> dict[str, Any]:
    """The model's tensors of a complete checkpoint, on the CPU, by OLMo's parameter names."""
    from safetensors.torch import load_file

    return load_file(path / MODEL)


def load_optimizer_state(path: Path) -> dict[str, dict[str, Any]]:
    """Parameter name -> state name (`exp_avg`, `exp_avg_sq`, `step` ...) -> CPU tensor."""
    from safetensors.torch import load_file

    state: dict[str, dict[str, Any]] = {}
    for key, tensor in load_file(path / OPTIMIZER).items():
        kind, _, name = key.partition("/")
        state.setdefault(name, {})[kind] = tensor
    return state


class CheckpointStore:
    """The `checkpoints` folder of one run.

    :param report: called with one line for everything that is skipped or removed.
    """

    def __init__(self, path: Path, *, report: Callable[[str], None] = print) -> None:
        self.path = path
        self._report = report

    def folder(self, step: int) -> Path:
        return self.path / f"step{step}"

    def steps(self) -> list[int]:
        """Steps of all folders, complete or not, in ascending order."""
        if not self.path.is_dir():
            return []
        matches = [STEP_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if not entry.is_symlink()]
        return sorted(int(match[1]) for match in matches if match)

    def newest_complete(self, *, verify: bool = True) -> Path | None:
        """The newest usable checkpoint; every newer folder that is skipped is reported with the reason."""
        for step in reversed(self.steps()):
            reason = incomplete_because(self.folder(step), verify=verify)
            if reason is None:
                return self.folder(step)
            self._report(f"skipping checkpoint {self.folder(step)}: {reason}")
        return None

    def remove_leftovers(self) -> None:
        """Remove the folders of interrupted saves; they are never checkpoints."""
        if not self.path.is_dir():
            return
        for entry in sorted(self.path.iterdir()):
            if ASIDE_NAME.fullmatch(entry.name):
                self._report(f"removing {entry}: a save that did not end")
                if entry.is_symlink() or entry.is_file():
                    entry.unlink()
                else:
                    shutil.rmtree(entry)

    def write(self, snapshot: Snapshot) -> int:
        """Write one checkpoint and point `latest` at it; returns its bytes.

        :raises WorkError: if it cannot be written; what was there before is untouched.
        """
        target = self.folder(snapshot.step)
        try:
            with folder_aside(target) as aside:
                size = _write_files(aside, snapshot)
                # A folder is there only after falling back behind this step: torn, or a repeat of what is written now.
                put_in_place(aside, target, replace=True)
            link_atomically(self.path / "latest", target.name)
        except Exception as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
            if not full and not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
                raise
            free = f", {format_bytes(shutil.disk_usage(self.path).free)} free" if self.path.is_dir() else ""
            reason = f"the disk is full{free}" if full else str(error)
            raise WorkError(
                f"{target}: the checkpoint of step {snapshot.step} could not be written: {reason};"
                " the older checkpoints are untouched"
            ) from None
        return size

    def retain(self, *, written: int, permanent: Callable[[int], bool], keep: int) -> None:
        """Remove checkpoints that retention does not name. Call it after a complete write only. What cannot be removed
        (a network disk keeps files that somebody reads) is reported and stays: it is no reason to stop.

        The newest complete one is always kept. Of the others, those at `permanent` steps are kept: all of them for
        `keep` -1, else the newest `keep` (the newest complete one counts if it is permanent).

        :param written: the step that was just written. Folders beyond it are what the run has fallen back behind: they
            look whole and may be damaged, so they neither count nor go.
        """
        steps = [step for step in self.steps() if step <= written]
        complete = [step for step in steps if incomplete_because(self.folder(step), verify=False) is None]
        if not complete:
            return
        permanents = [step for step in complete if permanent(step)]
        kept = {complete[-1], *(permanents if keep < 0 else permanents[len(permanents) - keep :] if keep else [])}
        for step in complete:
            if step not in kept:
                try:
                    shutil.rmtree(set_aside(self.folder(step)))
                except OSError as error:
                    self._report(f"checkpoint {self.folder(step)} could not be removed ({error.strerror})")


def _write_files(folder: Path, snapshot: Snapshot) -> int:
    """Write and fsync every file, then the marker; each file is hashed while the next is written."""
    from safetensors.torch import save_file

    with ThreadPoolExecutor(max_workers=1) as hasher:
        digests: dict[str, Future[str]] = {}
        for name, tensors in snapshot.tensors.items():
            path = folder / name
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
            digests[name] = hasher.submit(sha256_of_file, path)
            sync_file(path)
        for name, text in snapshot.texts.items():
            path = folder / name
            path.write_text(text)
            sync_file(path)
            digests[name] = hasher.submit(sha256_of_file, path)
        files = {
            name: {"size": (folder / name).stat().st_size, "sha256": digest.result()}
            for name, digest in digests.items()
        }
    marker = folder / MARKER
    marker.write_text(json.dumps({"format": FORMAT, "step": snapshot.step, "files": files}, indent=1) + "\n")
    sync_file(marker)
    for name in snapshot.tensors:
        shutil.copymode(marker, folder / name)  # safetensors makes files that only their owner can read
    return sum((folder / name).stat().st_size for name in files)


def estimated_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Size of one checkpoint in bytes: fp32 weights, the optimizer's fp32 moments, and the summed gradients of levels
    that wait for their update.

    :param config: the run's resolved config.
    """
    layers = count_layers(shape)
    moments = 1 if config.optimizer.name == "lionw" else 2
    return 4 * (count(shape).total * (1 + moments) + sum(layer.waiting for layer in layers))


def check_space(path: Path, *, size: int, kept: int | None) -> str | None:
    """Compare what the run will write with the free space.

    :param size: bytes of one checkpoint.
    :param kept: checkpoints that are kept at the end, or None for all of an unknown number.
    :returns: a warning, or None.
    :raises InputError: if not even one checkpoint and the next one beside it fit.
    """
    probe = path
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    already = sum(file.stat().st_size for file in path.glob("step*/*") if file.is_file()) if path.is_dir() else 0
    least = max(2 * size - already, size)
    if free < least:
        raise InputError(
            f"a checkpoint takes {format_bytes(size)}, the next one is written beside it, and"
            f" {format_bytes(free)} are free",
            where=str(probe),
            right="free space, or another run directory",
        )
    if kept is not None and (kept + 1) * size - already > free:
        return (
            f"{kept} checkpoints of {format_bytes(size)} will not fit into the {format_bytes(free)} free in {probe}:"
            " lower save_num_checkpoints_to_keep or raise save_interval"
        )
    return None
