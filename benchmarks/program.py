"""What the programs here share: their command line, and an error that a user can mend."""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from lowprec_attn.errors import UserError


def name() -> str:
    """Such as `python -m benchmarks.fidelity`."""
    return f"python -m benchmarks.{Path(sys.argv[0]).stem}"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of the program that runs; `doc`, its docstring, is printed as it stands."""
    return argparse.ArgumentParser(
        prog=name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def recording_parser(doc: str | None) -> argparse.ArgumentParser:
    """Likewise, with `--out` for records or `--read`, of which one is needed."""
    made = parser(doc)
    files = made.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="JSON lines, appended to")
    files.add_argument("--read", type=Path, help="such a file, as it is or .xz: prints its tables")
    return made


def told(main: Callable[[], int | None]) -> Callable[[], int]:
    """A `main` whose UserError or OSError is one line on the standard error, and exit code 1."""

    @functools.wraps(main)
    def run() -> int:
        try:
            return main() or 0
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run
