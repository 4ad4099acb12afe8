"""`lowprec-attn report`: redraw the report of a run directory."""

import argparse
from pathlib import Path

from lowprec_attn.errors import RunError
from lowprec_attn.runs.report import write_report
from lowprec_attn.runs.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument("run_dir", type=Path, help="a run directory, finished or not")


def run(args: argparse.Namespace) -> None:
    """Redraws `report.png` of a run directory.

    Raises:
      RunError: it is not one, or its metrics cannot be read.
    """
    run_dir = RunDir(args.run_dir)
    if not run_dir.metrics.exists():
        raise RunError(f"{args.run_dir} is not a run directory: it has no metrics.jsonl")
    print(write_report(run_dir))
