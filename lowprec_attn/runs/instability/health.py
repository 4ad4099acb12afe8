"""Judges whether a run is healthy, from its loss and the rules of `diagnostics.rules`.

The states, the worst first:

  broken   the loss exploded, or a value was not finite
  warned   a rule warned, the run went back to an earlier step, or the loss has been in excess for
           too few steps to tell
  unknown  none of these, but too little was recorded to see them
  healthy  none of these in at least 100 steps, with signals recorded at two or more of them

A single run has no control to compare it with. Experiments have controls, and call fewer runs
healthy (docs/lab.md).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from lowprec_attn.counts import many
from lowprec_attn.diagnostics import rules
from lowprec_attn.diagnostics.rules import RULES, Alarm
from lowprec_attn.runs.history import History, Layer
from lowprec_attn.runs.instability.explosion import (
    EXCESS_NATS,
    LASTING_STEPS,
    SMOOTHED_STEPS,
    LossWatch,
    explosion,
)
from lowprec_attn.runs.instability.rollbacks import Rollback

_LEAST_DIAGNOSTICS = 2

State = Literal["broken", "warned", "unknown", "healthy"]


class RuleMet(NamedTuple):
    """A rule that a run has met, and where it met the rule first.

    Attributes:
      step: the step of the first diagnostics at which a layer met the rule.
      layer: the worst layer at that step, counted from 0.
      alarm: the rule, and the worst head of that layer with its value.
      times: the number of diagnostics at which a layer met the rule.
      at_last: whether a layer met the rule at the last diagnostics.
    """

    step: int
    layer: int
    alarm: Alarm
    times: int
    at_last: bool

    def __str__(self) -> str:
        return f"at step {self.step:,} in layer {self.layer}, {self.alarm}"


class Health(NamedTuple):
    """The outcome of a run so far.

    Attributes:
      state: the state of the run in one word.
      sentence: the state and its reasons.
      explosion: the step at which the loss exploded, or None.
      not_finite: the step at which a value was not finite, or None.
      met: the rules that were met and warn, the earliest first.
      noted: the rules that were met without a warning, the earliest first; see
        `rules.Rule.only_with`.
    """

    state: State
    sentence: str
    explosion: int | None
    not_finite: int | None
    met: tuple[RuleMet, ...]
    noted: tuple[RuleMet, ...]


def judge(history: History) -> Health:
    """Returns the health of a run, finished or not."""
    watch = LossWatch(sorted(history.losses.items()))
    exploded = explosion(watch, history.failure)
    not_finite = _not_finite(history)
    met = tuple(_met(history.signals, rules.alarms))
    noted = tuple(_met(history.signals, _silent))
    broken = list(_breaks(history, watch, exploded, not_finite))
    warnings = list(_warnings(history.rollbacks, met, watch))
    state: State = "healthy"
    if broken:
        state = "broken"
        sentence = f"Not healthy: {', and '.join(broken)}; {_lead(met, noted, history)}"
    elif warnings:
        state = "warned"
        sentence = f"Warned: the loss has not exploded in {many(history.own_steps, 'step')}, but "
        sentence += ", and ".join(warnings)
    elif missing := list(_missing(history)):
        state = "unknown"
        sentence = f"Too little was recorded to tell: {', and '.join(missing)}"
    else:
        so_far = "" if history.ended else " so far"
        sentence = (
            f"Healthy{so_far}: the loss has not exploded in {many(history.own_steps, 'step')}, and "
            f"no rule {'warned' if noted else 'was met'} at "
            f"{many(len(history.signals), 'diagnostic')}{_aside(noted)}"
            f"{_unmeasured(history.signals)}"
        )
    return Health(state, f"{sentence}.", exploded, not_finite, met, noted)


def _not_finite(history: History) -> int | None:
    if history.failure and "explosion" not in history.failure:
        return int(history.failure["step"])
    return next((s for s, loss in sorted(history.losses.items()) if not math.isfinite(loss)), None)


def _breaks(
    history: History, watch: LossWatch, exploded: int | None, not_finite: int | None
) -> Iterator[str]:
    if exploded is not None:
        yield (
            f"the loss exploded at step {exploded:,} (its mean of {SMOOTHED_STEPS} steps stayed "
            f"more than {EXCESS_NATS} nats above its best)"
        )
        if not_finite is None and watch.explosion is not None and not watch.excess_steps:
            yield "has since come back"
    if not_finite is not None:
        message = history.failure.get("message") if "explosion" not in history.failure else None
        yield f"step {not_finite:,} was not finite, {message or 'its loss was not'}"


def _lead(met: Sequence[RuleMet], noted: Sequence[RuleMet], history: History) -> str:
    if met:
        return f"rule {met[0].alarm.rule.name} was met first {met[0]}"
    if noted:
        return f"no rule warned{_aside(noted)}"
    return "no rule was met" if history.signals else "there are no signals to apply rules to"


def _aside(noted: Sequence[RuleMet]) -> str:
    if not noted:
        return ""
    told = (f"{met.alarm.rule.name} was met at {many(met.times, 'diagnostic')}" for met in noted)
    return f" ({', '.join(told)}, from step {noted[0].step:,} on, which alone is no warning)"


def _warnings(
    rollbacks: Sequence[Rollback], met: Sequence[RuleMet], watch: LossWatch
) -> Iterator[str]:
    if rollbacks:
        times = "once" if len(rollbacks) == 1 else f"{len(rollbacks)} times, first"
        yield f"only since the run went back {times} to step {rollbacks[0].to:,}"
    if met:
        more = f" (and {len(met) - 1} more, below)" if len(met) > 1 else ""
        yield f"rule {met[0].alarm.rule.name} was met first {met[0]}{more}"
    if watch.excess_steps:
        yield (
            f"it has been more than {EXCESS_NATS} nats above its best for the last "
            f"{many(watch.excess_steps, 'step')}; an explosion takes {LASTING_STEPS}"
        )


def _missing(history: History) -> Iterator[str]:
    """Yields what is missing to call a run without an alarm healthy."""
    if history.own_steps < LASTING_STEPS:
        were = "was" if history.own_steps == 1 else "were"
        taken = f"{many(history.own_steps, 'step')} {were} taken"
        yield f"{taken}, and an explosion shows after {LASTING_STEPS}"
    if not history.signals:
        yield "no signals were recorded (diagnostics_every=0), so no rule could be applied"
    elif len(history.signals) < _LEAST_DIAGNOSTICS:
        (step,) = history.signals
        yield f"signals were recorded at one step only, {step:,}"
    elif not any(rule.is_recorded(history.signals) for rule in RULES):
        yield "none of the signals that rules look at was recorded"


def _unmeasured(signals: Mapping[int, Sequence[Layer]]) -> str:
    lacking = [rule.name for rule in RULES if not rule.is_recorded(signals)]
    return f" (not applied, since not recorded: {', '.join(lacking)})" if lacking else ""


def _silent(layer: Layer) -> list[Alarm]:
    """Returns alarms of the rules that a layer meets without a warning."""
    warned = rules.alarms(layer)
    return [alarm for alarm in rules.met(layer) if alarm not in warned]


def _met(
    signals: Mapping[int, Sequence[Layer]], find: Callable[[Layer], Sequence[Alarm]]
) -> Iterator[RuleMet]:
    """Yields every rule that some layer meets, the earliest first.

    Args:
      signals: by step, the signals of every layer.
      find: returns the alarms of a layer.
    """
    found: dict[str, dict[int, tuple[int, Alarm]]] = {}
    for step, layers in sorted(signals.items()):
        for i, layer in enumerate(layers):
            for alarm in find(layer) if layer else ():
                by_step = found.setdefault(alarm.rule.name, {})
                if step not in by_step or alarm.value > by_step[step][1].value:
                    by_step[step] = (i, alarm)
    firsts = []
    for by_step in found.values():
        first = min(by_step)
        layer_index, alarm = by_step[first]
        at_last = max(by_step) == max(signals)
        firsts.append(RuleMet(first, layer_index, alarm, len(by_step), at_last))
    yield from sorted(firsts, key=lambda rule_met: rule_met.step)
