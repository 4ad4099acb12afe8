"""`lowprec-attn compile`: tells whether a training step fits a TPU slice; needs no TPU."""

import argparse
import os

from lowprec_attn.commands import config

# libtpu reads these variables when it is loaded. They keep it from looking for a TPU, and let other
# processes load it at the same time.
COMPILER_HOST = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = (
        "Compiles one training step with the TPU's compiler and prints its memory and operations "
        "per device. --config.NAME=VALUE sets a field of the config, as for train.py."
    )
    parser.epilog = "Exit code 0: the step fits, 1: it does not, or bad input."
    parser.add_argument(
        "--topology", required=True, help="GENERATION:SHAPE, such as v5e:16x16, v4:2x2x1, v5e:1x1"
    )
    parser.add_argument("--config", required=True, help="NAME or FILE, with :VARIANT")
    parser.set_defaults(config_flags=[])


def run(args: argparse.Namespace) -> int:
    """Compiles the training step and returns 0, or 1 if the step does not fit.

    Raises:
      UserError: the config, slice, batch or attention is unusable.
    """
    os.environ.update(COMPILER_HOST)  # before the imports below load JAX
    from lowprec_attn.training.config import train_settings
    from lowprec_attn.training.resources.fit import compile_for

    settings = train_settings(config.load(args.config, args.config_flags))
    return compile_for(args.topology, settings)
