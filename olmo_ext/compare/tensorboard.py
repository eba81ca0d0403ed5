"""Event files for TensorBoard: every metric with tokens as the step, and the shapes as hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from olmo_ext.base.errors import InputError
from olmo_ext.compare.collect import RecordedSweep, Run
from olmo_ext.compare.features import features


def _writer_class() -> Any:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise InputError("--tensorboard needs tensorboard", right="pip install 'olmo-ext[tensorboard]'") from None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter


def write_events(sweep: RecordedSweep, folder: Path) -> int:
    """One sub-folder a run; the number of runs written.

    :raises InputError: without tensorboard, or where a run's folder already holds event files: a second set beside them
        would be drawn over the first.
    """
    writer_class = _writer_class()
    runs = [run for run in sweep.runs if run.series]
    for run in runs:
        if any((folder / run.name).glob("events.out.tfevents.*")):
            raise InputError("has event files already", where=str(folder / run.name), right="name an empty folder")
    for run in runs:
        writer = writer_class(str(folder / run.name))
        try:
            for name, series in run.series.items():
                for tokens, value in zip(series.tokens.tolist(), series.value.tolist(), strict=True):
                    writer.add_scalar(name, value, global_step=tokens)
            _add_hyperparameters(writer, run)
        finally:
            writer.close()
    return len(runs)


def _add_hyperparameters(writer: Any, run: Run) -> None:
    from torch.utils.tensorboard.summary import hparams

    shape = features(run)
    values: dict[str, Any] = {
        "group": run.group,
        "family": shape.family,
        "seed": run.seed if run.seed is not None else -1,
        "d_model": shape.d_model or 0,
        "n_layers": shape.n_layers or 0,
        "num_sub_mlps": shape.num_sub_mlps or 0,
        "ffn_ratio": shape.ratio or 0.0,
        "non_embedding": shape.non_embedding or 0,
        "training_flops_per_token": shape.flops_per_token or 0.0,
    }
    values |= {
        key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in run.axes.items()
    }
    last = {
        f"final/{name}": float(series.value[-1])
        for name, series in run.series.items()
        if name.startswith("eval/") and np.isfinite(series.value[-1])
    }
    # `add_hparams` would open a second event file with its own clock: its parts go into this run's file.
    for summary in hparams(values, last):
        writer._get_file_writer().add_summary(summary)
    tokens = run.progress()[1]
    for name, value in last.items():
        writer.add_scalar(name, value, global_step=tokens)
