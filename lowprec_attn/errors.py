"""Errors that a user can mend. Each message is one line that says what to do.

A command prints such an error without a traceback and exits with code 1. Any other exception is a
bug in the program, and is shown with its traceback.
"""

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Iterator

EXIT_INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


class UserError(Exception):
    """An input, a file or the machine cannot be used; the message names it and says what to do."""


class OneLineError(UserError):
    """An error whose message is always one line, even if it quotes names from a file."""

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


class RunError(UserError, RuntimeError):
    """A run cannot start or continue."""


def lacks_its_platform(error: BaseException) -> bool:
    """Whether the error means that a platform named in JAX_PLATFORMS is not available.

    In that case JAX 0.10 raises a RuntimeError, or an AssertionError without a message if the
    platform's plugin is missing. Neither reveals its origin, so this function asks JAX for its
    devices again and sees whether the call fails.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(error, RuntimeError | AssertionError):
        return False
    try:
        jax.devices()
    except (RuntimeError, AssertionError):
        return True
    return False


def missing_platform(reason: str) -> str:
    """Returns a message about the platform in JAX_PLATFORMS, with JAX's reason if it has one."""
    return (
        f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} names a platform that is not "
        f"here{f' ({reason})' if reason else ''}; unset it, or set it to cpu"
    )


@contextlib.contextmanager
def reading_records(where: object) -> Iterator[None]:
    """Turns errors from malformed records into a `RunError` of one line.

    Args:
      where: the file or directory that holds the records, for the message.

    Raises:
      RunError: a record at `where` lacks a field, or a field has the wrong type or value.
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
    """Returns the text as one line, with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return printable(f"{type(error).__name__}: {lines[0]}"[:200])


def unknown_field(path: str, known: Iterable[object]) -> str:
    """Returns a message about an unknown field, with the nearest known name and all known names.

    Args:
      path: the dotted path of the field, such as `config.optimizer.lr`.
      known: the valid names for the last part of the path.
    """
    names = [str(name) for name in known]
    near = difflib.get_close_matches(path.rpartition(".")[2], names, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown field {path}{meant}; fields are {', '.join(names)}"
