"""`lowprec-attn compile`: whether a training step fits a TPU slice; needs no TPU."""

import argparse
import os
from pathlib import Path

from lowprec_attn.commands import config

# libtpu reads these when it is loaded. With them it does not look for a TPU, and runs beside other
# processes that have loaded it.
COMPILER_HOST = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# XLA's level below the usual one: https://openxla.org/xla/effort_levels
QUICK = {"JAX_OPTIMIZATION_LEVEL": "O1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = "Fields of the config are set by --config.NAME=VALUE, as for train.py."
    parser.add_argument(
        "--topology", required=True, help="GENERATION:SHAPE, such as v5e:16x16, v4:2x2x1, v5e:1x1"
    )
    parser.add_argument("--config", required=True, help="NAME or FILE, with :VARIANT")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile with less optimisation, in about half the time: it says whether the step "
        "fits where that is clear",
    )
    parser.add_argument("--record", type=Path, help="append a line of JSON to this file")
    parser.set_defaults(config_flags=[])


def run(args: argparse.Namespace) -> int:
    """Compiles; returns 0, or 1 where the step does not fit, or a quick look cannot tell.

    Raises:
      UserError: config, slice, batch or attention cannot serve.
    """
    os.environ.update(COMPILER_HOST | (QUICK if args.quick else {}))  # before JAX starts below
    from lowprec_attn.training.config import train_settings
    from lowprec_attn.training.fit import compile_for

    settings = train_settings(config.load(args.config, args.config_flags))
    return compile_for(args.topology, settings, args.record, args.quick)
