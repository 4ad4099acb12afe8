"""Collects the runs of an experiment into records that are small enough to be committed.

A record keeps the run's definition, config, environment and outcome, and all validation losses. It
keeps the training loss (six digits) and the gradient's norm (four digits) of every tenth step and
of the last ten steps. Of the signals it keeps those named in `SIGNALS`, with four digits, per layer
and head.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowprec_attn.files import read_record, sha256
from lowprec_attn.lab import archive
from lowprec_attn.lab.archive import Number, RecordError, StoredRun
from lowprec_attn.lab.workdir import ArmRun
from lowprec_attn.runs import metrics
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.instability.explosion import LossWatch, explosion

SIGNALS = (
    "score_maximum",
    "score_level_rms",
    "score_spread_mean",
    "score_spread_max",
    "repeated_maxima",
    "rounded_to_one",
    "delta_error_mean",
    "delta_error_coherence",
    "delta_error_cumulative",
    "ds_row_sum_mean",
    "ds_row_sum_rms",
    "ds_row_sum_coherence",
    "rounded_ds_row_sum_rms",
    "rounded_ds_row_sum_coherence",
    "p_row_sum_error_mean",
    "p_row_sum_error_rms",
    "vanished_rows",
    "query_gradient_error_relative",
    "query_weight_gradient_exact",
    "query_weight_gradient_error_relative",
    "query_weight_gradient_error_from_scores",
    "query_weight_gradient_error_from_lse",
    "query_weight_gradient_error_from_exponent",
    "query_weight_gradient_error_from_p",
    "query_weight_gradient_error_from_dp",
    "query_weight_gradient_error_from_delta",
    "query_weight_gradient_error_from_ds",
    "query_weight_gradient_error_from_total",
    "query_weight_gradient_error_measured",
    "query_weight_gradient_error_first_share",
    "outer_product_similarity",
    "outer_product_similarity_across_steps",
    "common_direction_across_steps",
    "query_weight_norm",
)
_LOSS_EVERY = 10
_LOSS_DIGITS, _DIGITS = 6, 4


def collect(runs: Iterable[ArmRun], directory: Path) -> Path:
    """Adds runs, finished or not, to the records in a directory and returns the records' path.

    A run that is already in the records is replaced. All other runs remain.

    Args:
      runs: runs of one experiment.
      directory: the directory of the records.

    Raises:
      RunError: a file of a run, or the records file, is damaged.
      DiskError: the records cannot be written.
    """
    stored = {run.name: run for run in archive.read(directory)}
    stored |= {run.name: _stored(run) for run in runs}
    return archive.write(directory, stored.values())


def _stored(run: ArmRun) -> StoredRun:
    run_dir, trial = run.run_dir, run.trial
    rows = list(metrics.read_encoded(run_dir.metrics)) if run_dir.metrics.exists() else []
    losses = {row["step"]: float(row["loss"]) for row in rows if "loss" in row}
    if not losses:
        raise RecordError(f"{run_dir.metrics} holds no step; restore it, or remove {run_dir.path}")
    failure = run.failure
    header = {
        "arm": trial.arm.name,
        "control": trial.arm.control,
        "seed": trial.seed,
        "overrides": dict(trial.arm.overrides),
        "steps": max(losses) + 1,
        "explosion": explosion(LossWatch(losses.items()), failure or {}),
        "runaway_rule": run.runaway._asdict(),
        "config": read_record(run_dir.config),
        "environment": run_dir.starts(),
        "data_order_sha256": sha256(run_dir.data_order),
        "failure": failure,
        "rollbacks": [rollback._asdict() for rollback in rollbacks.read(run_dir.rollbacks)],
    }
    return StoredRun.from_rows(header, _compact(rows, max(losses)))


def _compact(rows: Iterable[Mapping[str, Any]], last: int) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        step = row["step"]
        if "signals" in row:
            layers = row["signals"].items()
            kept = {layer: _selected(values) for layer, values in layers}
            yield {"step": step, "signals": kept}
        elif "val_loss" in row:
            yield row
        elif step % _LOSS_EVERY == 0 or step > last - _LOSS_EVERY:
            digits = {"loss": _LOSS_DIGITS, "grad_norm": _DIGITS}
            columns = {n: _rounded(row[n], count) for n, count in digits.items() if n in row}
            yield {"step": step, **columns}


def _selected(layer: Mapping[str, Any]) -> dict[str, list[Number]]:
    """Returns the signals to keep; a run of an earlier version lacks some of them."""
    kept = (name for name in SIGNALS if name in layer)
    return {name: [_rounded(value, _DIGITS) for value in layer[name]] for name in kept}


def _rounded(value: Number, digits: int) -> Number:
    return value if isinstance(value, str) else float(f"{value:.{digits}g}")
