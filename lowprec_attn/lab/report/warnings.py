"""Counts what warnings were worth: of rules, of the gradient's norm and of losses.

The rules are in `diagnostics.rules`, the other two kinds of warning in `runs.instability`.
"""

import collections
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lowprec_attn.diagnostics.rules import RULES, Rule, Signals, alarms
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.runs.instability.gradient_norm import RISE, first_rise
from lowprec_attn.runs.instability.spikes import Divergence, Spike, Spikes
from lowprec_attn.tables import with_legend


class Tally(NamedTuple):
    """The counts of a warning over some runs.

    Attributes:
      leads: for each run that exploded after an alarm, the steps from its first alarm to the
        explosion, sorted.
      missed: the number of runs that exploded without an alarm before.
      false_alarms: the number of runs that held and had an alarm.
      quiet: the number of runs that held and had no alarm.
      not_finite: the number of runs without an explosion that ended at a value that was not finite
        and had an alarm before.
      not_finite_missed: the number of such runs without an alarm before.
    """

    leads: tuple[int, ...]
    missed: int
    false_alarms: int
    quiet: int
    not_finite: int = 0
    not_finite_missed: int = 0


class Reading(NamedTuple):
    """A kind of warning that is counted.

    Attributes:
      label: the label of its row.
      first: returns the first recorded step at which a run has the warning, or None.
      is_recorded: returns whether a run recorded what the warning looks at.
    """

    label: str
    first: Callable[[ArmRecord], int | None]
    is_recorded: Callable[[ArmRecord], bool]


def of_rule(rule: Rule, label: str, *, warns: bool) -> Reading:
    """Returns the reading of a rule.

    Args:
      rule: the rule.
      label: the label of its row.
      warns: whether to count layers that warn by the rule, or all layers that meet it.
    """

    def has_it(layer: Signals) -> bool:
        # A rule that warns by itself warns wherever it is met, whatever the other rules say.
        if rule.only_with is None or not warns:
            return rule.is_met(layer)
        return any(alarm.rule is rule for alarm in alarms(layer))

    def first(record: ArmRecord) -> int | None:
        for step in sorted(record.signals):
            if any(map(has_it, record.signals[step])):
                return step
        return None

    return Reading(label, first, lambda record: rule.is_recorded(record.signals))


def tally(first: Iterable[tuple[ArmRecord, int | None]]) -> Tally:
    """Counts a warning over runs.

    Args:
      first: runs that recorded what the warning looks at, and the first step at which each has it.
    """
    leads = []
    counts: collections.Counter[str] = collections.Counter()
    for record, alarm in first:
        if record.held:
            counts["quiet" if alarm is None else "false"] += 1
        elif record.explosion is None:
            assert record.not_finite is not None
            warned = alarm is not None and alarm <= record.not_finite
            counts["not finite" if warned else "not finite, missed"] += 1
        elif alarm is None or alarm > record.explosion:
            counts["missed"] += 1
        else:
            leads.append(record.explosion - alarm)
    names = ("missed", "false", "quiet", "not finite", "not finite, missed")
    return Tally(tuple(sorted(leads)), *(counts[name] for name in names))


def warning_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str | None:
    """Returns a Markdown table with a row per warning and experiment, or None if it has no rows.

    A rule that warns only together with another one has two rows: one for where it was met, and
    one for where it warned.

    Args:
      experiments: the records of runs by the name of their experiment. The name is left out if
        there is only one experiment. A run that did not record what a warning looks at is not
        counted for it.
    """
    rows = []
    for reading in _readings():
        for name, records in experiments.items():
            counted = [record for record in records if reading.is_recorded(record)]
            if counted:
                names = [name] if len(experiments) > 1 else []
                rows.append([reading.label, *names, *_cells(counted, reading)])
    if not rows:
        return None
    legend = (
        "Alarms: the first recorded step at which a head of some layer meets a rule of "
        "`lowprec_attn.diagnostics.rules`; a rule in brackets is no warning by itself. The rule of "
        "the gradient's norm stands in `lowprec_attn.runs.instability.gradient_norm`. Lead: steps "
        "from the alarm to the explosion, median and smallest. Not finite: runs that ended at a "
        "value that was not finite, with an alarm before. False: alarms in runs that held, by arm."
    )
    header = [
        "rule",
        *(["experiment"] if len(experiments) > 1 else []),
        "exploded, alarm before",
        "lead",
        "not finite, alarm before",
        "false",
        "in which arms",
    ]
    return with_legend(legend, header, rows)


def _readings() -> Iterator[Reading]:
    for rule in RULES:
        label = f"{rule.name} ≥ {rule.threshold:g}"
        if rule.only_with is None:
            yield of_rule(rule, label, warns=True)
        else:
            yield of_rule(rule, f"({label})", warns=False)
            yield of_rule(rule, f"{label}, with {rule.only_with}", warns=True)
    yield Reading(
        f"gradient's norm ≥ {RISE:g} × its least",
        lambda record: first_rise(record.gradient_norms, record.warmup_steps),
        lambda record: bool(record.gradient_norms),
    )


def _cells(records: Sequence[ArmRecord], reading: Reading) -> list[str]:
    first = [(record, reading.first(record)) for record in records]
    counts = tally(first)
    held = [(record, alarm) for record, alarm in first if record.held]
    arms = collections.Counter(run.arm.name for run, alarm in held if alarm is not None)
    lead = "–"
    if counts.leads:
        lead = f"{statistics.median(counts.leads):,.0f}, from {min(counts.leads):,} on"
    return [
        _of(len(counts.leads), len(counts.leads) + counts.missed),
        lead,
        _of(counts.not_finite, counts.not_finite + counts.not_finite_missed),
        _of(counts.false_alarms, len(held)),
        ", ".join(f"{arm} {count}" for arm, count in sorted(arms.items())) or "–",
    ]


def _of(count: int, runs: int) -> str:
    return f"{count} of {runs}" if runs else "–"


class LossEvents(NamedTuple):
    """The first steps at which a record's losses spike and diverge, and at which the run broke.

    A step is None if that never happened.
    """

    spike: int | None
    divergence: int | None
    end: int | None

    @property
    def first(self) -> int | None:
        """The step of the spike or of the divergence, whichever is earlier, or None."""
        return min((step for step in self[:2] if step is not None), default=None)


def loss_events(record: ArmRecord) -> LossEvents:
    """Returns what `runs.instability.spikes` finds in the losses that a record keeps.

    The run broke where these losses exploded. If they show no explosion, because only every tenth
    is kept, it broke where all losses exploded or a value was not finite.
    """
    found: dict[type, int] = {}
    spikes = Spikes()
    for step, loss in sorted(record.losses.items()):
        for event in spikes.add(step, loss):
            found.setdefault(type(event), step)
    end = record.broke if spikes.watch.explosion is None else spikes.watch.explosion
    return LossEvents(found.get(Spike), found.get(Divergence), end)


def loss_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """Returns a Markdown table of spikes and divergences, with a row per experiment and one of all.

    Args:
      experiments: the records of runs by the name of their experiment.
    """
    rows = [[name, *_loss_cells(records)] for name, records in experiments.items()]
    rows.append(["all", *_loss_cells([r for records in experiments.values() for r in records])])
    legend = (
        "Spike and divergence are those of `lowprec_attn.runs.instability.spikes`, of the losses "
        "that records keep, every tenth. Before: at the step of the explosion, or of the value "
        "that was not finite, or earlier. A run that ended in an update that was not finite, with "
        "a finite loss, may have neither."
    )
    header = ["experiment", "exploded, spike before", "spike or divergence before"]
    header += ["not finite, spike before", "spike or divergence before"]
    header += ["held, spike", "held, divergence"]
    return with_legend(legend, header, rows)


def _loss_cells(records: Iterable[ArmRecord]) -> list[str]:
    exploded: list[LossEvents] = []
    not_finite: list[LossEvents] = []
    held: list[LossEvents] = []
    for record in records:
        of_broken = not_finite if record.explosion is None else exploded
        (held if record.held else of_broken).append(loss_events(record))
    return [
        *_before(exploded),
        *_before(not_finite),
        _of(sum(events.spike is not None for events in held), len(held)),
        _of(sum(events.divergence is not None for events in held), len(held)),
    ]


def _before(broken: Sequence[LossEvents]) -> list[str]:
    """Returns how many runs had a spike, and how many either event, before they broke."""

    def count(steps: Iterable[tuple[int | None, int | None]]) -> str:
        hits = [step is not None and end is not None and step <= end for step, end in steps]
        return _of(sum(hits), len(hits))

    return [
        count((events.spike, events.end) for events in broken),
        count((events.first, events.end) for events in broken),
    ]
