"""What happened in a run, one line each, from its records: warnings, spikes, divergence, jumps."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.diagnostics import rules
from lowprec_attn.diagnostics.rules import Signals
from lowprec_attn.runs.instability.rollbacks import Rollback
from lowprec_attn.runs.instability.spikes import RESUMED_LOSSES

# Of a spike that recovers fast while no rule is met.
AT_ITS_BATCH = "no rule was met, which points at its batch rather than at arithmetic"

_INDICES_SHOWN = 3


class Incident(NamedTuple):
    """Something that happened at a step.

    Attributes:
      step: at which it was noticed.
      text: what it was, short.
      loss: the training loss of a spike, None of anything else.
      at_batch: whether it is a spike that points at its batch; see `AT_ITS_BATCH`.
    """

    step: int
    text: str
    loss: float | None = None
    at_batch: bool = False

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
    diagnostics = [(r["step"], meets_rule(r["signals"])) for r in records if "signals" in r]
    found = [Incident(rollback.to, f"rollback: {rollback}") for rollback in rollbacks]
    for record in records:
        step = record["step"]
        if "warnings" in record:
            found += [Incident(step, text) for text in _warnings(record["warnings"])]
        if "spike" in record:
            spike, end = record["spike"], ends.get(step)
            at_batch = (
                end is not None
                and end["spike_end"]["recovery"] == "fast"
                and no_rule_met(diagnostics, step, end["step"])
            )
            text = (
                f"spike to {spike['loss']:.3f}, {spike['score']:.1f} spreads above "
                f"{spike['median']:.3f}, {_recovery(end)}"
                f"{f'; {AT_ITS_BATCH}' if at_batch else ''}; windows {_windows(data_order, step)}"
            )
            found.append(Incident(step, text, spike["loss"], at_batch))
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


def meets_rule(layers: Mapping[str, Signals]) -> bool:
    """Whether any layer meets a rule, be it one that alone is no warning."""
    return any(rules.met(signals) for signals in layers.values() if signals)


def no_rule_met(diagnostics: Iterable[tuple[int, bool]], begin: int, end: int) -> bool:
    """Whether the last diagnostics before `begin`, and all until `end`, were without a rule met.

    Args:
      diagnostics: their steps, and whether a rule was met there, in the order of the steps.
      begin: a step; where there were no diagnostics up to `end`, nothing can be said.
      end: a later step.
    """
    known = [pair for pair in diagnostics if pair[0] <= end]
    before = [pair for pair in known if pair[0] < begin][-1:]
    looked_at = [*before, *(pair for pair in known if pair[0] >= begin)]
    return bool(looked_at) and not any(met for _, met in looked_at)


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
    within = f"in {steps} step{'s' * (steps != 1)}"
    return f"not recovered {within}" if recovery == "none" else f"recovered {within} ({recovery})"


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
