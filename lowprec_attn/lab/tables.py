"""The comparison of arms as Markdown tables."""

from collections.abc import Mapping, Sequence

import numpy as np

from lowprec_attn.lab.outcomes import ArmOutcome, undecided
from lowprec_attn.lab.records import ArmRecord

_COLUMNS = 7


def outcome_table(found: Sequence[ArmOutcome]) -> str:
    """One row an arm: how many seeds exploded and when, and what the loss was otherwise."""
    seeds = sorted({seed for outcome in found for seed in outcome.records})
    header = [
        "arm",
        "exploded",
        "95 % interval",
        "first step of each seed",
        "median",
        "scores ran away (step, layer)",
        "loss above the control",
    ]
    table = _table([header, *(_outcome_row(outcome, seeds) for outcome in found)])
    reasons = undecided(found)
    verdict = f"It decides nothing there: {'; '.join(reasons)}.\n\n" if reasons else ""
    listed = ", ".join(map(str, seeds))
    return (
        f"Exploded: the training loss, a mean of 50 steps, stayed 0.7 nats above its best for 100 "
        f"steps, or was not\nfinite. Seeds {listed}, in this order: the step, or *healthy* where "
        f"the run went on to 1.25 times the step of\nits seed's positive control, or *censored*. "
        f"Intervals are Wilson's, of the runs that are not censored.\n\n{table}\n{verdict}"
    )


def _outcome_row(outcome: ArmOutcome, seeds: Sequence[int]) -> list[str]:
    runs = [outcome.records[seed] for seed in seeds if seed in outcome.records]
    control = f" ({outcome.arm.control} control)" if outcome.arm.control else ""
    median = outcome.median_explosion
    return [
        f"{outcome.arm.title}{control}",
        f"{outcome.exploded} of {len(runs)}",
        "{:.0%} to {:.0%}".format(*outcome.interval),
        ", ".join(
            f"{outcome.records[seed].explosion:,}"
            if outcome.words[seed] == "exploded"
            else outcome.words[seed]
            for seed in seeds
            if seed in outcome.records
        ),
        "–" if median is None else f"{median:,.0f}",
        ", ".join(f"{r.runaway.step:,} in {r.runaway.layer}" if r.runaway else "–" for r in runs),
        ", ".join(
            f"{outcome.excess[seed]:+.3f}" if seed in outcome.excess else "–"
            for seed in seeds
            if seed in outcome.records
        ),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def score_table(
    records: Sequence[ArmRecord], layer: int, steps: Sequence[int] | None = None
) -> str:
    """One row a run: the largest |score| of a layer at some steps, and how the run ended.

    Args:
      records: of the arms.
      layer: counted from 0.
      steps: at which to look, None for seven of those that were recorded, evenly spread.
    """
    steps = _spread(records) if steps is None else steps
    seeds = len({record.seed for record in records}) > 1
    header = [
        "arm",
        *(["seed"] if seeds else []),
        *map(str, steps),
        "other layers",
        "W_Q norm",
        "validation loss",
        "its largest rise",
        "not finite at step",
    ]
    rows = []
    for record in records:
        title, *cells = _row(record, layer, steps)
        rows.append([title, *([str(record.seed)] if seeds else []), *cells])
    table = _table([header, *rows])
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
        f"{record.failure['step']}"
        if record.failure and "explosion" not in record.failure
        else "no",
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
