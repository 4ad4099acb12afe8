"""`lowprec-attn train`: trains a model with a named choice of attention arithmetic.

    python train.py --config=configs/gpt2_bf16.py
    python train.py --config=configs/gpt2_bf16.py:full --config.data.path=DIR
    python train.py --config=configs/gpt2_bf16.py --config.attention.row_max=dynamic_max
    python train.py --config=configs/gpt2_bf16.py:full --distributed --workdir=DIR

The same command resumes an interrupted run. With --distributed it runs on every host of a TPU
slice or GPU cluster. Exit codes: 0 the run is done, or SIGTERM stopped it after a checkpoint; 1 a
config, file or directory is unfit; 3 the loss was not finite, or it exploded and
`stop_exploded_after` is set; 130 Ctrl-C stopped it after a checkpoint, or a second Ctrl-C at once.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowprec_attn.commands import config
from lowprec_attn.errors import UserError
from lowprec_attn.runs.earlier import flat
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.settings import TrainSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--config", help="NAME or FILE, with :VARIANT; --config.FIELD=VALUE sets a field")
    add("--workdir", type=Path, help="run directory (default: runs/NAME-VARIANT-HASH)")
    processes = parser.add_argument_group("several processes, usually one per host")
    add = processes.add_argument
    add(
        "--distributed",
        action="store_true",
        help="train together; most clusters need no other flag",
    )
    add("--coordinator_address", metavar="HOST:PORT", help="address of process 0")
    add("--num_processes", type=int, help="number of processes")
    add("--process_id", type=int, help="number of this process, from 0")
    parser.set_defaults(config_flags=[])


def run(args: argparse.Namespace) -> int:
    """Trains a model and returns the exit code.

    Raises:
      UserError: the config, data, directory or devices are unusable.
    """
    from absl import logging

    logging.set_verbosity(logging.WARNING)  # Orbax logs pages at INFO
    if args.config is None:
        raise UserError("no config; pass --config=configs/gpt2_bf16.py")
    values = config.load(args.config, args.config_flags)
    settings = train_settings(values)
    for name in ("coordinator_address", "num_processes", "process_id"):
        if getattr(args, name) is not None and not args.distributed:
            raise UserError(f"--{name} needs --distributed; add it, or leave --{name} out")
    # JAX takes seconds to start, so a wrong config is reported before.
    if args.distributed:
        from lowprec_attn import hosts

        hosts.connect(args.coordinator_address, args.num_processes, args.process_id)
    from lowprec_attn.training.run import train

    return train(settings, values, args.workdir or _default_workdir(settings, values))


def _default_workdir(settings: TrainSettings, values: Mapping[str, Any]) -> Path:
    """Returns the config's own run directory, in which the same command finds its run again."""
    defining = flat(values)
    try:
        text = json.dumps(defining, sort_keys=True)
    except TypeError:  # one mapping has both numbers and texts as keys, which cannot be sorted
        text = json.dumps(json.loads(json.dumps(defining)), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Path("runs", f"{settings.name}-{settings.variant}-{digest}")
