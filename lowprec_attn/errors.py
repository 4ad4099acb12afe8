"""What a user can mend: one family of errors, each message one line that says what to do.

A command prints such an error without a traceback and ends with exit code 1. Anything else that is
raised is a fault of the program, and is shown whole.
"""


class UserError(Exception):
    """An input, file or machine cannot serve; the message names it and what to do."""


class RunError(UserError, RuntimeError):
    """A run cannot start or go on."""
