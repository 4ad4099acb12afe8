"""The comparison of arms as a Markdown table."""

from collections.abc import Mapping, Sequence

import numpy as np

from lowprec_attn.lab.records import ArmRecord

_COLUMNS = 7


def markdown(records: Sequence[ArmRecord], layer: int, steps: Sequence[int] | None = None) -> str:
    """One row an arm: the largest |score| of a layer at some steps, and how the arm ended.

    Args:
      records: of the arms.
      layer: counted from 0.
      steps: at which to look, None for seven of those that were recorded, evenly spread.
    """
    steps = _spread(records) if steps is None else steps
    header = [
        "arm",
        *map(str, steps),
        "other layers",
        "W_Q norm",
        "validation loss",
        "its largest rise",
        "not finite at step",
    ]
    rows = [header, ["---"] * len(header), *(_row(record, layer, steps) for record in records)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return (
        f"Largest |score| of layer {layer} by step (layers count from 0); then, at an arm's last "
        f"recorded step: the largest |score| of\nany other layer, the largest spectral norm of a "
        f"head's W_Q in layer {layer}, the validation loss and the most by which it exceeded an "
        f"earlier one.\n\n{table}"
    )


def _spread(records: Sequence[ArmRecord]) -> list[int]:
    """About seven recorded steps, the last one included, step 0 left out unless it is the only."""
    recorded = sorted({step for record in records for step in record.signals})
    wanted = np.linspace(recorded[-1] / _COLUMNS, recorded[-1], _COLUMNS)
    return sorted({min(recorded, key=lambda step: abs(step - x)) for x in wanted})


def _row(record: ArmRecord, layer: int, steps: Sequence[int]) -> list[str]:
    last = max(record.signals)
    others = [
        record.largest("score_maximum", last, i)
        for i in range(len(record.signals[last]))
        if i != layer
    ]
    losses = record.val_losses
    return [
        record.arm.title,
        *(
            _number(record.largest("score_maximum", step, layer)) if step in record.signals else "–"
            for step in steps
        ),
        _number(max(others)) if others else "–",
        f"{record.largest('query_weight_norm', last, layer):.1f}",
        f"{losses[max(losses)]:.3f}" if losses else "–",
        _largest_rise(losses),
        f"{record.failure['step']}" if record.failure else "no",
    ]


def _largest_rise(losses: Mapping[int, float]) -> str:
    """How far a loss lies above the smallest before it, and at which step that is most."""
    steps = sorted(losses)
    if len(steps) < 2:
        return "–"
    values = np.array([losses[step] for step in steps])
    rises = values - np.minimum.accumulate(values)
    last = int(np.argmax(rises))
    return "none" if rises[last] == 0 else f"{rises[last]:.2f} at {steps[last]}"


def _number(x: float) -> str:
    """Whole, or with two digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"
