"""What warnings were worth: those of `diagnostics.rules`, and those of losses (`runs.spikes`)."""

import collections
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lowprec_attn.diagnostics.rules import RULES, Alarm, Rule, Signals, alarms, met
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.runs.spikes import Divergence, Spike, Spikes
from lowprec_attn.tables import markdown


class Tally(NamedTuple):
    """A rule over the runs of an arm.

    Attributes:
      leads: of the runs that exploded after an alarm: steps from the first alarm to the explosion.
      missed: runs that exploded with no alarm before.
      false_alarms: runs that did not explode, and had one.
      quiet: runs that did not explode, and had none.
    """

    leads: tuple[int, ...]
    missed: int
    false_alarms: int
    quiet: int

    @property
    def median_lead(self) -> float | None:
        """In steps; None where nothing was hit."""
        return statistics.median(self.leads) if self.leads else None


Found = Callable[[Signals], Sequence[Alarm]]
"""`rules.alarms`, or `rules.met` for those too that do not warn."""


def first_alarm(record: ArmRecord, rule: Rule, found: Found = alarms) -> int | None:
    """The first recorded step at which a layer warns by the rule; None where none does.

    It is None too where the record holds none of the rule's signals: see `is_recorded`.
    """
    for step in sorted(record.signals):
        for layer in record.signals[step]:
            if any(alarm.rule is rule for alarm in found(layer)):
                return step
    return None


def is_recorded(record: ArmRecord, rule: Rule) -> bool:
    """Whether the record holds a signal that the rule looks at."""
    layers = next(iter(record.signals.values()), [])
    return any(name in layer for layer in layers for name in rule.signals)


def tally(records: Iterable[ArmRecord], rule: Rule, found: Found = alarms) -> Tally:
    """Counts a rule over runs that recorded its signal."""
    leads = []
    counts: collections.Counter[str] = collections.Counter()
    for record in records:
        alarm = first_alarm(record, rule, found)
        if record.explosion is None:
            counts["quiet" if alarm is None else "false"] += 1
        elif alarm is None or alarm > record.explosion:
            counts["missed"] += 1
        else:
            leads.append(record.explosion - alarm)
    return Tally(tuple(sorted(leads)), counts["missed"], counts["false"], counts["quiet"])


def warning_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str | None:
    """One row a rule and experiment, as Markdown; None where no record holds a rule's signal.

    A rule that warns only beside another one has two: where it was met, and where it warned.

    Args:
      experiments: runs by the name of their experiment, which is left out where there is one. A
        run that lacks a rule's signal is not counted for it.
    """
    rows = []
    for label, rule, found in _readings():
        for name, records in experiments.items():
            counted = [record for record in records if is_recorded(record, rule)]
            if counted:
                names = [name] if len(experiments) > 1 else []
                rows.append([label, *names, *_cells(counted, rule, found)])
    if not rows:
        return None
    legend = (
        "Alarms: the first recorded step at which a head of some layer meets a rule of "
        "`lowprec_attn.diagnostics.rules`; one in brackets is no warning by itself. Lead: steps "
        "from there to the explosion, median and smallest. False: alarms in runs that did not "
        "explode, by arm."
    )
    header = [
        "rule",
        *(["experiment"] if len(experiments) > 1 else []),
        "exploded, alarm before",
        "lead",
        "false",
        "in which arms",
    ]
    return f"{textwrap.fill(legend, 100)}\n\n{markdown(header, rows)}"


def _readings() -> Iterator[tuple[str, Rule, Found]]:
    for rule in RULES:
        label = f"{rule.name} ≥ {rule.threshold:g}"
        if rule.only_with is None:
            yield label, rule, alarms
        else:
            yield f"({label})", rule, met
            yield f"{label}, with {rule.only_with}", rule, alarms


def _cells(records: Sequence[ArmRecord], rule: Rule, found: Found) -> list[str]:
    counts = tally(records, rule, found)
    healthy = [record for record in records if record.explosion is None]
    firsts = ((record.arm.name, first_alarm(record, rule, found)) for record in healthy)
    arms = collections.Counter(arm for arm, first in firsts if first is not None)
    lead = "–" if not counts.leads else f"{counts.median_lead:,.0f}, from {min(counts.leads):,} on"
    return [
        f"{len(counts.leads)} of {len(counts.leads) + counts.missed}",
        lead,
        f"{counts.false_alarms} of {len(healthy)}",
        ", ".join(f"{arm} {count}" for arm, count in sorted(arms.items())) or "–",
    ]


class LossEvents(NamedTuple):
    """The first steps at which a record's losses spike, diverge and explode; None for never."""

    spike: int | None
    divergence: int | None
    explosion: int | None

    @property
    def first(self) -> int | None:
        """Of spike and divergence the earlier one."""
        return min((step for step in self[:2] if step is not None), default=None)


def loss_events(record: ArmRecord) -> LossEvents:
    """What `runs.spikes` says of the losses that a record keeps.

    The explosion is that of the same losses; where every tenth does not show it, that of all.
    """
    found: dict[type, int] = {}
    spikes = Spikes()
    for step, loss in sorted(record.losses.items()):
        for event in spikes.add(step, loss):
            found.setdefault(type(event), step)
    explosion = record.explosion if spikes.watch.explosion is None else spikes.watch.explosion
    return LossEvents(found.get(Spike), found.get(Divergence), explosion)


def loss_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """One row an experiment, and one of all, as Markdown.

    Args:
      experiments: runs by the name of their experiment.
    """
    rows = [[name, *_loss_cells(records)] for name, records in experiments.items()]
    rows.append(["all", *_loss_cells([r for records in experiments.values() for r in records])])
    legend = (
        "Spike and divergence are those of `lowprec_attn.runs.spikes`, of the losses that records "
        "keep, every tenth. Before: at the step of the explosion or earlier. A run that ended in "
        "an update that was not finite, with a finite loss, may have neither."
    )
    header = ["experiment", "exploded, spike before", "spike or divergence before"]
    header += ["held, spike", "held, divergence"]
    return f"{textwrap.fill(legend, 100)}\n\n{markdown(header, rows)}"


def _loss_cells(records: Iterable[ArmRecord]) -> list[str]:
    exploded: list[LossEvents] = []
    held: list[LossEvents] = []
    for record in records:
        (held if record.explosion is None else exploded).append(loss_events(record))

    def before(step: int | None, events: LossEvents) -> bool:
        return step is not None and events.explosion is not None and step <= events.explosion

    return [
        f"{sum(before(events.spike, events) for events in exploded)} of {len(exploded)}",
        f"{sum(before(events.first, events) for events in exploded)} of {len(exploded)}",
        f"{sum(events.spike is not None for events in held)} of {len(held)}",
        f"{sum(events.divergence is not None for events in held)} of {len(held)}",
    ]
