"""Run directories as training leaves them, with made-up losses and signals."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny import tiny_config

from lowprec_attn.runs.metrics import MetricsWriter
from lowprec_attn.runs.run_dir import RunDir

HEADS = 2
QUIET = {
    "score_maximum": 5.0,
    "query_weight_gradient_error_relative": 0.01,
    "p_row_sum_error_rms": 1e-6,
    "query_weight_norm": 1.5,
    "repeated_maxima": 0.01,
    "output_error_coherence": 1.0,
    "delta_error_coherence": 1.0,
    "output_error_mean": 1e-6,
}


def layers(*changes: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """The signals of `len(changes)` layers at one step; each change replaces signals, per head."""
    quiet = {name: [value] * HEADS for name, value in QUIET.items()}
    return {f"layer_{i}": quiet | change for i, change in enumerate(changes)}


def record_run(
    path: Path,
    losses: Sequence[float],
    signals: Mapping[int, Mapping[str, Any]],
    val_losses: Mapping[int, float] | None = None,
    summary: Mapping[str, float] | None = None,
    failure: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunDir:
    """Writes a run directory; `changes` name config fields with dots, as in `tiny_config`."""
    with RunDir.open(path, tiny_config(**changes)) as run_dir:
        with MetricsWriter(run_dir, 0) as writer:
            for step in range(max(len(losses), *signals, -1, 0) + 1):
                if step in signals:
                    writer.write(step, {"signals": signals[step]})
                if step in (val_losses or {}):
                    writer.write(step, {"val_loss": val_losses[step]})
                if step < len(losses):
                    writer.write(step, {"loss": losses[step], "grad_norm": 1.0, "lr": 1e-3})
                    writer.write_throughput(step, 0.5 if step else 9.0, 256)
        for where, value in ((run_dir.summary, summary), (run_dir.failure, failure)):
            if value is not None:
                where.write_text(json.dumps(value))
    return run_dir
