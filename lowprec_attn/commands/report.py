"""`lowprec-attn report`: writes the report of one or more run directories."""

import argparse
from pathlib import Path

from lowprec_attn.errors import UserError, reading_records
from lowprec_attn.files import require_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument(
        "run_dirs", type=Path, nargs="+", metavar="RUN", help="a run directory, finished or not"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="where the page of one run goes (default: report.html in the run directory)",
    )


def run(args: argparse.Namespace) -> None:
    """Writes the page of every run directory anew.

    Raises:
      UserError: a path is not a run directory, its records cannot be read, the page would replace
        one of them, or `--html` is given for several runs.
    """
    # These import the trainer's packages, which --help does not need.
    from lowprec_attn.runs.pages.run import write_run_page
    from lowprec_attn.runs.run_dir import RunDir
    from lowprec_attn.training.resources.efficiency import efficiency

    if args.html is not None:
        if len(args.run_dirs) > 1:
            raise UserError(f"--html {args.html} takes the page of one run; leave it out")
        require_output(args.html, args.run_dirs)
    for path in args.run_dirs:
        with reading_records(path):
            print(write_run_page(RunDir(path), efficiency, args.html))
