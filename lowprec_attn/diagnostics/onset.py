"""Reports a warning of a run's layers once, when it begins, and not at every measurement."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lowprec_attn.diagnostics.rules import Alarm, Signals, alarms


class LayerAlarm(NamedTuple):
    """An alarm and the number of its layer, from 0."""

    layer: int
    alarm: Alarm

    def __str__(self) -> str:
        return f"layer {self.layer}, {self.alarm}"


class Onsets:
    """Follows the alarms of every layer from one measurement to the next.

    An alarm that lasts is reported once. It is reported again only after a measurement without it.
    A change of the worst head is no new alarm.

    Args:
      signals: the measurement before the first that will be added; None where there is none.
    """

    def __init__(self, signals: Mapping[str, Signals] | None = None) -> None:
        self._met: set[tuple[int, str]] = set()
        if signals is not None:
            self.add(signals)

    def add(self, signals: Mapping[str, Signals]) -> list[LayerAlarm]:
        """Returns the alarms that begin with this measurement, in the order of the layers.

        Args:
          signals: the signals of every layer, `{layer_0: {name: one number per head}, …}`.
        """
        found = [
            LayerAlarm(layer, alarm)
            for layer in range(len(signals))
            for alarm in alarms(signals[f"layer_{layer}"])
        ]
        before, self._met = self._met, {(a.layer, a.alarm.rule.name) for a in found}
        return [a for a in found if (a.layer, a.alarm.rule.name) not in before]


def as_record(found: list[LayerAlarm]) -> dict[str, Any]:
    """Returns alarms as `{layer_3: {scores: {head, value}}}`, for `metrics.jsonl`."""
    record: dict[str, Any] = {}
    for layer, alarm in found:
        of_layer = record.setdefault(f"layer_{layer}", {})
        of_layer[alarm.rule.name] = {"head": alarm.head, "value": alarm.value}
    return record
