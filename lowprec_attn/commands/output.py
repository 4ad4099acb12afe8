"""Standard output and error that a command survives: closed, full, or in an encoding without Ō.

A command goes on to its results when nobody can read what it says: `| head -1` closes the pipe, a
disk may be full. Letters that the encoding lacks are written as escapes.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# All but the ends of lines and tabulators: a name or a text of the user's may hold them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Stream:
    """A text stream whose first failure ends its output, and nothing else.

    Args:
      stream: to write to.
      plain: whether nothing but text is written to it: no bar of progress, which moves the cursor.

    Attributes:
      failure: the error that ended it, None so far.
    """

    def __init__(self, stream: TextIO, plain: bool) -> None:
        self._stream, self._plain = stream, plain
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Writes text, or drops it if the output has ended.

        What a terminal would obey is written as an escape, where the stream is to be `plain`.
        """
        if self._plain:
            text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
        if self.failure is None:
            try:
                self._write(text)
            except OSError as error:
                self._end(error)
        return len(text)

    def flush(self) -> None:
        """Brings out what was written."""
        if self.failure is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._end(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _end(self, error: OSError) -> None:
        self.failure = error
        # The stream still holds the text, and Python would try again at its end.
        with contextlib.suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def surviving() -> Iterator[Stream]:
    """Replaces standard output and error while the body runs; yields the former."""
    with contextlib.ExitStack() as streams:
        out, err = (
            Stream(_given(stream, streams), plain)
            for stream, plain in ((sys.stdout, True), (sys.stderr, False))
        )
        streams.enter_context(contextlib.redirect_stdout(out))
        streams.enter_context(contextlib.redirect_stderr(err))
        try:
            yield out
        finally:
            out.flush()
            err.flush()


def _given(stream: TextIO | None, streams: contextlib.ExitStack) -> TextIO:
    """A standard stream, or where it is closed (`>&-`) one to nowhere that takes its descriptor."""
    # Another file would be opened under the free number, and get what libraries write there.
    return streams.enter_context(open(os.devnull, "w")) if stream is None else stream
