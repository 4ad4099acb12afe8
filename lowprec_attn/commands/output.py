"""Standard output and error that cannot fail a command: closed, full, or in any encoding.

A command continues to its results when its output can no longer be written, for example because
`| head -1` has closed the pipe or the disk is full. Characters that the encoding lacks, such as Ō,
are written as escapes.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Control and bidirectional-formatting characters, which a user's name or text may contain. Line
# feeds and tabs are not among them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Stream:
    """A text stream that drops all output from its first failure on, instead of raising an error.

    Args:
      stream: the stream to write to.
      plain: whether to escape control characters. A stream with a progress bar, which moves the
        cursor, is not plain.

    Attributes:
      failure: the error that ended the output, or None.
    """

    def __init__(self, stream: TextIO, plain: bool) -> None:
        self._stream, self._plain = stream, plain
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Writes text, or drops it if the output has ended.

        If the stream is `plain`, control characters are written as escapes.
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
        """Flushes the stream."""
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
        # The stream still buffers the text, and Python would try to write it again at exit. So its
        # descriptor is redirected to the null device.
        with contextlib.suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


@contextlib.contextmanager
def surviving() -> Iterator[Stream]:
    """Replaces standard output and error by `Stream`s in the body; yields the one for output."""
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
    """Returns a standard stream, or one to the null device if it is closed (`>&-`)."""
    # The null device takes the free descriptor number. Otherwise the next file to be opened would
    # get it, and would receive what libraries write to the standard stream.
    return streams.enter_context(open(os.devnull, "w")) if stream is None else stream
