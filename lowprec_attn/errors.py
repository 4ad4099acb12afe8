"""The error that every part of a run shares."""


class RunError(RuntimeError):
    """A run cannot start or go on; the message is one line that says what to do."""
