"""The progress bar: step, loss, tokens per second, time left."""

import collections
import time

from tqdm import tqdm

from lowprec_attn import hosts
from lowprec_attn.training.settings import TrainSettings

_STEPS_OF_RATE = 20


class Progress:
    """A context manager around the bar; call `advance` after every finished step."""

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
        # The rate shown averages the last steps. The time of a single step misleads, because it may
        # include diagnostics, or because the step ran while the loop waited for something else.
        self._finished = collections.deque([time.perf_counter()], maxlen=_STEPS_OF_RATE + 1)

    def advance(self, loss: float) -> tuple[float, int]:
        """Counts one step; returns the seconds it took and its tokens."""
        last = self._finished[-1]
        self._finished.append(time.perf_counter())
        steps, span = len(self._finished) - 1, self._finished[-1] - self._finished[0]
        rate = steps * self._tokens_per_step / span
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update()
        return self._finished[-1] - last, self._tokens_per_step

    def say(self, text: str) -> None:
        """Prints a line above the bar and flushes it, also into a pipe."""
        with self._bar.external_write_mode():
            hosts.say(text)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
