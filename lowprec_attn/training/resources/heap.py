"""Makes Python's garbage collector stop the host as rarely as possible while a run trains.

Tracing and compiling a step leaves a million objects that are never freed. A full collection visits
all of them and finds nothing. During training it takes half a second at an unpredictable step, and
the device runs out of work. Before the first step, some ten full collections take an eighth of the
time.
"""

import contextlib
import gc
from collections.abc import Iterator

# Allocations before a collection of the youngest generation, and how many collections of one
# generation precede a collection of the next older one. CPython 3.12 has 700, 10 and 10.
_THRESHOLDS = (50_000, 20, 20)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """Collects garbage rarely within the block; afterwards as before, with nothing frozen."""
    before = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # the run's objects are garbage if the process goes on


def release() -> None:
    """Collects the objects that have become garbage since `settle` froze them."""
    gc.unfreeze()
    gc.collect()


def settle() -> None:
    """Collects all garbage and freezes the rest, which later collections do not visit.

    Leaving `rarely_collected` unfreezes it.
    """
    gc.collect()
    gc.freeze()
