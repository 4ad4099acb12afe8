"""What happened in a run, one line each, from its records: warnings, spikes, divergence, jumps."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.runs.rollbacks import Rollback
from lowprec_attn.runs.spikes import RESUMED_LOSSES

_INDICES_SHOWN = 3


class Incident(NamedTuple):
    """Something that happened at a step.

    Attributes:
      step: at which it was noticed.
      text: what it was, short.
      loss: the training loss of a spike, None of anything else.
    """

    step: int
    text: str
    loss: float | None = None

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.text}"


def incidents(
    records: Sequence[Mapping[str, Any]],
    data_order: Path,
    rollbacks: Sequence[Rollback] = (),
) -> list[Incident]:
    """All of a run, in the order of their steps.

    Args:
      records: of `metrics.jsonl`.
      data_order: the run's record of its batches, which names the windows of a spike's batch.
      rollbacks: of the run.
    """
    ends = {r["spike_end"]["begin"]: r for r in records if "spike_end" in r}
    found = [Incident(rollback.to, f"rollback: {rollback}") for rollback in rollbacks]
    for record in records:
        step = record["step"]
        if "warnings" in record:
            found += [Incident(step, text) for text in _warnings(record["warnings"])]
        if "spike" in record:
            spike, windows = record["spike"], _windows(data_order, step)
            text = (
                f"spike to {spike['loss']:.3f}, {spike['score']:.1f} spreads above "
                f"{spike['median']:.3f}, {_recovery(ends.get(step))}; windows {windows}"
            )
            found.append(Incident(step, text, spike["loss"]))
        if "divergence" in record:
            smoothed, best = (record["divergence"][name] for name in ("smoothed", "best"))
            text = f"divergence without a spike, smoothed loss {smoothed - best:.2f} above its best"
            found.append(Incident(step, text))
        if "resume_jump" in record:
            jump = record["resume_jump"]
            text = (
                f"the {RESUMED_LOSSES} losses from step {jump['resumed']:,}, where the run was "
                f"resumed, have the median {jump['median']:.3f}, far above those before"
            )
            found.append(Incident(step, text))
    return sorted(found, key=lambda incident: incident.step)


def _warnings(layers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for layer in sorted(layers, key=lambda name: int(name.removeprefix("layer_"))):
        for rule, alarm in layers[layer].items():
            number = layer.removeprefix("layer_")
            yield f"layer {number}, head {alarm['head']}: {rule} {alarm['value']:.3g}"


def _recovery(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "not over yet"
    steps = end["step"] - end["spike_end"]["begin"]
    recovery = end["spike_end"]["recovery"]
    return (
        f"not recovered in {steps} steps"
        if recovery == "none"
        else f"recovered in {steps} steps ({recovery})"
    )


def _windows(data_order: Path, step: int) -> str:
    """The first start indices of a step's batch, and where the others stand."""
    where = f"line {step + 1:,} of {data_order.name}"
    if not data_order.exists():
        return where
    with data_order.open() as file:
        indices = next(itertools.islice(file, step, None), "").strip().split(",")
    shown = ", ".join(indices[:_INDICES_SHOWN])
    more = ", …" if len(indices) > _INDICES_SHOWN else ""
    return f"{shown}{more} ({where})"
