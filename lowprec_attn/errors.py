"""Errors that a user can mend. A message is one line that says what to do.

A command prints such an error without a traceback and ends with exit code 1. Anything else that is
raised is a fault of the program, and is shown whole.
"""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


class UserError(Exception):
    """An input, file or machine is unfit; the message names it and says what to do."""


class OneLineError(UserError):
    """An error whose message is one line, even if names in it come from a file."""

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


class RunError(UserError, RuntimeError):
    """A run cannot start or go on."""


def lacks_its_platform(error: BaseException) -> bool:
    """Whether the error says that a platform named in JAX_PLATFORMS is not available.

    JAX 0.10 raises a RuntimeError then, or fails an assertion without a word where the plugin of a
    platform is missing, and hides where; so it is asked once more.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(error, RuntimeError | AssertionError):
        return False
    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        return True
    return False


@contextlib.contextmanager
def reading_records(where: object) -> Iterator[None]:
    """Turns errors about records that this program did not write into one line.

    Raises:
      RunError: a field of a record at `where` has another type, or is not there.
    """
    try:
        yield
    except UserError:
        raise
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(
            f"{where} holds records that are damaged or of another version ({reason}); restore "
            "them from a copy (--debug shows where this was noticed)"
        ) from error


def printable(text: str) -> str:
    """A name from a file as one line of text, with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def unknown_field(path: str, known: Iterable[object]) -> str:
    """A message about an unknown field, with the nearest name and all names.

    Args:
      path: of the field, such as `config.optimizer.lr`.
      known: names that could stand in the place of the last one.
    """
    names = [str(name) for name in known]
    near = difflib.get_close_matches(path.rpartition(".")[2], names, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown field {path}{meant}; fields are {', '.join(names)}"
