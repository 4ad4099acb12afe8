"""`lowprec-attn report`: the report of a run directory, or a comparison of several."""

import argparse
from pathlib import Path

from lowprec_attn.errors import reading_records
from lowprec_attn.files import require_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a run directory, finished or not; several are compared",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="where the page goes (default: report.html in the run directory; of several runs "
        "comparison.html here)",
    )


def run(args: argparse.Namespace) -> None:
    """Writes `report.html` of a run directory anew, or compares several.

    Raises:
      UserError: one is no run directory, its records cannot be read, or the page would replace one
        of them.
    """
    # The trainer's packages, which --help does without.
    from lowprec_attn.runs.pages.comparison import write_comparison
    from lowprec_attn.runs.pages.run import write_run_page
    from lowprec_attn.runs.run_dir import RunDir
    from lowprec_attn.training.resources.efficiency import efficiency

    run_dirs = [RunDir(path) for path in args.run_dirs]
    if args.html is not None:
        require_output(args.html, args.run_dirs)
    with reading_records(", ".join(map(str, args.run_dirs))):
        if len(run_dirs) > 1:
            print(write_comparison(run_dirs, args.html or Path("comparison.html")))
            return
        print(write_run_page(run_dirs[0], efficiency, args.html))
