"""Warnings that a run gives about its own losses and signals while it trains.

Each warning is printed on one line and recorded in `metrics.jsonl`. All warnings follow from what
the run has recorded. A resumed run therefore goes on as if it had not been interrupted, and repeats
no warning.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lowprec_attn import hosts
from lowprec_attn.diagnostics import onset
from lowprec_attn.runs import metrics
from lowprec_attn.runs.instability.explosion import LossWatch
from lowprec_attn.runs.instability.incidents import AT_ITS_BATCH, meets_rule, points_at_batch
from lowprec_attn.runs.instability.spikes import Event, SpikeEnd, Spikes
from lowprec_attn.runs.run_dir import RunDir

Write = Callable[[int, Mapping[str, Any]], None]
Say = Callable[[str], None]


class Watch:
    """Follows the losses and signals of a run.

    Args:
      recorded: records of `metrics.jsonl` for the steps before `start`. Of the records that hold
        signals, the last one suffices.
      start: the first step that this process takes.
      excess_limit: steps of excess loss that set `enough`, None to leave it unset.
      write: records something about a step.
      say: prints a line.

    Attributes:
      enough: the first step at which the loss had been in excess for `excess_limit` steps; None
        until then.
    """

    def __init__(
        self,
        recorded: Iterable[Mapping[str, Any]],
        start: int,
        excess_limit: int | None,
        write: Write,
        say: Say,
    ) -> None:
        recorded = list(recorded)
        self._write, self._say = write, say
        self._excess_limit = excess_limit
        self.enough: int | None = None
        self._spikes = Spikes()
        for record in recorded:
            if "loss" in record:
                self._follow(record["step"], record["loss"])
        measured = [record for record in recorded if "signals" in record][-1:]
        self._onsets = onset.Onsets(measured[0]["signals"] if measured else None)
        self._start = start
        self._diagnostics = [(r["step"], meets_rule(r["signals"])) for r in measured]

    @property
    def losses(self) -> LossWatch:
        """The watch that knows whether the loss is in excess, or has exploded."""
        return self._spikes.watch

    @property
    def onset(self) -> int | None:
        """See `Spikes.onset`."""
        return self._spikes.onset

    @property
    def explosion(self) -> int | None:
        """First step of the excess that lasted long enough; None if there was none."""
        if self.enough is None or self._excess_limit is None:
            return self.losses.explosion
        return self.enough + 1 - self._excess_limit

    def add_loss(self, step: int, loss: float) -> None:
        """Takes the training loss of a step, in nats per token."""
        for event in self._follow(step, loss):
            self._write(step, event.record())
            kind = "note" if isinstance(event, SpikeEnd) else "warning"
            self._say(f"{kind}: step {step:,}: {event}{self._pointer(event)}")

    def _pointer(self, event: Event) -> str:
        """Returns what a spike that is over points at, or an empty text if that is not known.

        A resumed run knows only the last diagnostics before its start. It therefore says nothing
        of a spike that began before it.
        """
        if not isinstance(event, SpikeEnd) or event.begin < self._start:
            return ""
        return f"; {AT_ITS_BATCH}" if points_at_batch(event, self._diagnostics) else ""

    def _follow(self, step: int, loss: float) -> list[Event]:
        events = self._spikes.add(step, loss)
        limit = self._excess_limit
        if limit is not None and self.enough is None and self.losses.excess_steps >= limit:
            self.enough = step
        return events

    def add_signals(self, step: int, signals: Mapping[str, Any]) -> None:
        """Takes the signals of a step, by layer."""
        self._diagnostics.append((step, meets_rule(signals)))
        found = self._onsets.add(signals)
        if found:
            self._write(step, {"warnings": onset.as_record(found)})
        for alarm in found:
            self._say(f"warning: step {step:,}, {alarm}")


def kept_records(run_dir: RunDir, start: int) -> list[dict[str, Any]]:
    """Returns the records of all losses and of the last signals before step `start`."""

    def read() -> list[dict[str, Any]]:
        if not run_dir.metrics.exists():
            return []
        kept = [record for record in metrics.read(run_dir.metrics) if record["step"] < start]
        losses = [{k: r[k] for k in ("step", "loss")} for r in kept if "loss" in r]
        return losses + [r for r in kept if "signals" in r][-1:]

    return hosts.from_first(read)
