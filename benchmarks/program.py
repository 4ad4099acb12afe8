"""Shared by the programs here: the command line, and how an error that a user can mend is shown."""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from lowprec_attn.errors import UserError


def name() -> str:
    """Returns the command of the running program, for example `python -m benchmarks.fidelity`."""
    return f"python -m benchmarks.{Path(sys.argv[0]).stem}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Makes the running program's parser; `doc`, its docstring, is printed unchanged as help."""
    return argparse.ArgumentParser(
        prog=name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def recording_parser(doc: str | None) -> argparse.ArgumentParser:
    """Makes the running program's parser, with `--out` and `--read`, one of which is required."""
    made = parser(doc)
    files = made.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="JSON lines, appended to")
    files.add_argument("--read", type=Path, help="such a file, as it is or .xz: prints its tables")
    return made


def told(main: Callable[[], int | None]) -> Callable[[], int]:
    """Makes `main` report a UserError or OSError as one line on standard error and exit code 1."""

    @functools.wraps(main)
    def run() -> int:
        try:
            return main() or 0
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run
