"""What a user can mend: one family of errors, each message one line that says what to do.

A command prints such an error without a traceback and ends with exit code 1. Anything else that is
raised is a fault of the program, and is shown whole.
"""

import difflib
from collections.abc import Iterable

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


class UserError(Exception):
    """An input, file or machine cannot serve; the message names it and what to do."""


class RunError(UserError, RuntimeError):
    """A run cannot start or go on."""


def unknown_field(path: str, known: Iterable[object]) -> str:
    """A line for a field that is not there, with the nearest name and all of them.

    Args:
      path: of the field, such as `config.optimizer.lr`.
      known: names that could stand in the place of the last one.
    """
    names = [str(name) for name in known]
    near = difflib.get_close_matches(path.rpartition(".")[2], names, n=1, cutoff=0.4)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown field {path}{meant}; fields are {', '.join(names)}"
