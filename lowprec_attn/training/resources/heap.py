"""Python's heap while a run trains: its garbage collector hardly ever stops the host.

A traced and compiled step leaves a million objects for good. A full collection looks at all of them
and finds nothing: half a second in which the device runs out of work, at a step that nobody can
foresee, and an eighth of the time before the first step, where some ten of them come.
"""

import contextlib
import gc
from collections.abc import Iterator

# Objects that are allocated before the youngest are looked through, and how many such collections
# come before one of those older: 700, 10 and 10 in CPython 3.12.
_THRESHOLDS = (50_000, 20, 20)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Garbage is looked for less often within; then as before, with nothing frozen."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # what a run leaves is garbage in a process that goes on


def release() -> None:
    """Collects what has become garbage since `settle` froze it."""
    gc.unfreeze()
    gc.collect()


def settle() -> None:
    """Collects all garbage; what is left is looked through no more, within `rarely_collected`."""
    gc.collect()
    gc.freeze()
