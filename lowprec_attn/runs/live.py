"""Repeats an action while a run trains, for example drawing its metrics or copying it.

    with live.every(10, lambda: panel.update(draw(run_dir))):
        train(settings, config, workdir)

The run stays in the main thread, so that an interrupt stops it in order, with a checkpoint.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)


@contextmanager
def every(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Calls `action` every `seconds` in a thread while the body runs, and once after it.

    An error in the thread is logged and the next call tries again, because a network may be back by
    then and a plot that cannot be drawn must not end a run. The last call is made in the caller's
    thread, and its error is raised unless the body has raised one.

    Args:
      seconds: the time from the end of one call to the beginning of the next, > 0.
      action: the function to call. Two calls never overlap.

    Raises:
      ValueError: seconds is not positive.
      Exception: whatever the last call of `action` raises, if the body raised nothing.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")
    stop = threading.Event()

    def attempt() -> None:
        try:
            action()
        except Exception as error:
            _logger.warning("%s: %s; trying again", type(error).__name__, error)

    def repeat() -> None:
        while not stop.wait(seconds):
            attempt()

    thread = threading.Thread(target=repeat, name="lowprec-attn live", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        _join(stop, thread)
        attempt()
        raise
    _join(stop, thread)
    action()


def _join(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join()
