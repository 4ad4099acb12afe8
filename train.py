"""Trains GPT-2 with a named choice of attention arithmetic.

    python train.py --config=configs/gpt2_bf16.py
    python train.py --config=configs/gpt2_bf16.py:full --config.data.path=DIR
    python train.py --config=configs/gpt2_bf16.py --config.attention.row_max=dynamic_max
    python train.py --config=configs/gpt2_bf16.py --profile=DIR
    python train.py --config=configs/gpt2_bf16.py:full --distributed --workdir=DIR

The same command resumes an interrupted run. Exit codes: 0 done, or stopped by SIGTERM after a
checkpoint; 1 a config, file or directory that cannot serve; 3 a loss that was not finite. With
--distributed the same command runs on every host of a TPU slice or GPU cluster.
"""

import hashlib
import json
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from lowprec_attn.errors import RunError
from lowprec_attn.gpt2.settings import TrainSettings
from lowprec_attn.run_config import train_settings

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file, FILE[:VARIANT].")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run directory; by default runs/NAME-VARIANT-HASH of the config."
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "Times steps on random tokens instead of training; writes into this directory."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Several processes, usually one per host, train together."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT of process 0, where the cluster does not tell it."
)
_PROCESSES = flags.DEFINE_integer("num_processes", None, "Likewise: how many there are.")
_PROCESS = flags.DEFINE_integer("process_id", None, "Likewise: which of them this one is.")
_COMPILE = flags.DEFINE_string(
    "compile", None, "Compiles for this TPU slice instead of training; see `lowprec-attn compile`."
)
_RECORD = flags.DEFINE_string("record", None, "With --compile: append a line of JSON to this file.")
EXIT_BAD_INPUT = 1


def main(argv: list[str]) -> int:
    """Parses, builds, runs."""
    if len(argv) > 1:
        return _fail(f"unexpected argument {argv[1]!r}; fields are set as --config.FIELD=VALUE")
    if _CONFIG.value is None:
        return _fail("no config; pass --config=configs/gpt2_bf16.py")
    logging.set_verbosity(logging.WARNING)  # Orbax logs pages at INFO
    config = _CONFIG.value.to_dict()
    try:
        settings = train_settings(config)
        # Only now: a wrong config is told before JAX takes its seconds to start.
        if _DISTRIBUTED.value:
            from lowprec_attn.gpt2 import hosts

            hosts.connect(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
        if _COMPILE.value is not None:
            from lowprec_attn.gpt2.compile import compile_for

            return compile_for(_COMPILE.value, settings, _RECORD.value and Path(_RECORD.value))
        if _PROFILE.value is not None:
            from lowprec_attn.gpt2.profile import profile

            return profile(settings, Path(_PROFILE.value))
        from lowprec_attn.gpt2.training import train

        return train(settings, config, Path(_WORKDIR.value or _default_workdir(settings, config)))
    except (ValueError, NotImplementedError, RunError) as error:
        return _fail(error)


def _default_workdir(settings: TrainSettings, config: dict) -> str:
    """One directory per config, so that the same command finds its run again."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    return f"runs/{settings.name}-{settings.variant}-{digest}"


def _fail(error: object) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _parse(argv: list[str]) -> list[str]:
    """absl's parser, with one line instead of a traceback where a flag cannot be taken."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = str(cause).strip().splitlines()[-1].strip()
        sys.exit(_fail(f"cannot parse {' '.join(argv[1:])}: {reason}"))


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
