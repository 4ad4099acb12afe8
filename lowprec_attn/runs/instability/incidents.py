"""Lists what happened in a run, from its records: warnings, spikes, divergences, rollbacks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowprec_attn.diagnostics import rules
from lowprec_attn.diagnostics.rules import Signals
from lowprec_attn.runs.instability.rollbacks import Rollback
from lowprec_attn.runs.instability.spikes import Divergence, Spike, SpikeEnd

# Said of a spike that recovers fast while no rule is met.
AT_ITS_BATCH = "no rule was met, which points at its batch rather than at arithmetic"


class Incident(NamedTuple):
    """Something that happened at a step.

    Attributes:
      step: the step at which it was noticed; for a rollback, the step that the run went back to.
      text: a short description.
      loss: the training loss if the incident is a spike, else None.
      at_batch: whether it is a spike that points at its batch; see `AT_ITS_BATCH`.
    """

    step: int
    text: str
    loss: float | None = None
    at_batch: bool = False

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.text}"


def incidents(
    records: Sequence[Mapping[str, Any]], rollbacks: Sequence[Rollback] = ()
) -> list[Incident]:
    """Returns all incidents of a run, in the order of their steps.

    Args:
      records: the records of `metrics.jsonl`.
      rollbacks: the rollbacks of the run.
    """
    ends = {end.begin: end for end in (SpikeEnd.of(r) for r in records if "spike_end" in r)}
    diagnostics = [(r["step"], meets_rule(r["signals"])) for r in records if "signals" in r]
    found = [Incident(rollback.to, f"rollback: {rollback}") for rollback in rollbacks]
    for record in records:
        step = record["step"]
        if "warnings" in record:
            found += [Incident(step, text) for text in _warnings(record["warnings"])]
        if "spike" in record:
            spike, end = Spike.of(record), ends.get(step)
            at_batch = end is not None and points_at_batch(end, diagnostics)
            parts = [str(spike), "it is not over yet" if end is None else str(end)]
            text = "; ".join([*parts, AT_ITS_BATCH] if at_batch else parts)
            found.append(Incident(step, text, spike.loss, at_batch))
        if "divergence" in record:
            found.append(Incident(step, str(Divergence.of(record))))
    return sorted(found, key=lambda incident: incident.step)


def meets_rule(layers: Mapping[str, Signals]) -> bool:
    """Whether any layer meets a rule, even one that does not warn by itself."""
    return any(rules.met(signals) for signals in layers.values() if signals)


def points_at_batch(spike: SpikeEnd, diagnostics: Iterable[tuple[int, bool]]) -> bool:
    """Whether a spike recovered fast while no rule was met, which points at its batch.

    The last diagnostics before the spike count, and all during it. Without any of these nothing is
    known, and the result is False.

    Args:
      spike: the spike, at its end.
      diagnostics: the step of each diagnostics and whether a rule was met there, in order of steps.
    """
    known = [pair for pair in diagnostics if pair[0] <= spike.step]
    before = [pair for pair in known if pair[0] < spike.begin][-1:]
    looked_at = [*before, *(pair for pair in known if pair[0] >= spike.begin)]
    quiet = bool(looked_at) and not any(met for _, met in looked_at)
    return spike.recovery == "fast" and quiet


def _warnings(layers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for layer in sorted(layers, key=lambda name: int(name.removeprefix("layer_"))):
        for rule, alarm in layers[layer].items():
            number = layer.removeprefix("layer_")
            yield f"layer {number}, head {alarm['head']}: {rule} {alarm['value']:.3g}"
