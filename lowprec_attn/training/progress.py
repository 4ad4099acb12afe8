"""The progress bar: step, loss, tokens per second, time left; and how long the run will take."""

import collections
import itertools
import statistics
import time
from types import TracebackType

from tqdm import tqdm

from lowprec_attn import hosts
from lowprec_attn.training.settings import TrainSettings

_STEPS_OF_RATE = 20
# The time of a run is told after so many steps or seconds, the first step not counted: it compiles.
_STEPS_OF_ESTIMATE = 5
_SECONDS_OF_ESTIMATE = 10.0


class Progress:
    """A context manager around the bar; `advance` after every finished step.

    A line under the first ones of the run says how long it will take, as soon as steps are timed.
    """

    def __init__(self, settings: TrainSettings, start: int) -> None:
        self._tokens_per_step = settings.batch_size * settings.model.context
        # A pipe or a log file gets a line every ten seconds, a terminal a live bar.
        self._bar = tqdm(
            total=settings.steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=not hosts.is_first(),
        )
        if not self._bar.disable and not self._bar.fp.isatty():
            self._bar.mininterval = 10.0
        self._estimated = False
        # The rate shown is that of the last steps together: a single one may have waited for
        # diagnostics, or have been waited for.
        self._finished = collections.deque([time.perf_counter()], maxlen=_STEPS_OF_RATE + 1)

    def advance(self, loss: float) -> tuple[float, int]:
        """Counts one step; returns the seconds it took and its tokens."""
        last = self._finished[-1]
        self._finished.append(time.perf_counter())
        steps, span = len(self._finished) - 1, self._finished[-1] - self._finished[0]
        rate = steps * self._tokens_per_step / span
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update()
        if not self._estimated:
            self._estimate()
        return self._finished[-1] - last, self._tokens_per_step

    def say(self, text: str) -> None:
        """Prints a line above the bar, at once, also into a pipe."""
        with self._bar.external_write_mode():
            hosts.say(text)

    def _estimate(self) -> None:
        """Says how long the rest will take, if enough steps have been timed."""
        finished = list(self._finished)[1:]  # the first is the start, the second compiled
        timed, left = len(finished) - 1, self._bar.total - self._bar.n
        enough = timed >= _STEPS_OF_ESTIMATE or finished[-1] - finished[0] >= _SECONDS_OF_ESTIMATE
        if timed < 1 or not enough or not left or self._bar.disable:
            return
        self._estimated = True
        # A step may have waited for diagnostics, so the median.
        step = statistics.median(b - a for a, b in itertools.pairwise(finished))
        self._bar.write(
            f"time       about {_duration(left * step)} for the remaining {left:,} steps at "
            f"{self._tokens_per_step / step:,.0f} tokens/s; diagnostics, validation and "
            "checkpoints come on top"
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()


def _duration(seconds: float) -> str:
    """A length of time, in the unit in which it is at least 2."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} seconds"
