"""The `lowprec-attn` command: data, diagnosis, experiments, compilation for TPUs, reports."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from lowprec_attn.errors import RunError

EXIT_BAD_INPUT = 1

# Each module has add_arguments(parser) and run(args). They are imported when asked for:
# `diagnose` needs the core install alone, the others the trainer's packages.
_COMMANDS = {
    "compile": ("lowprec_attn.gpt2.compile", "does a training step fit a TPU slice? without a TPU"),
    "diagnose": ("lowprec_attn.diagnose", "what low precision does to your own q, k, v (and dO)"),
    "lab": ("lowprec_attn.lab.command", "run and compare sets of training runs"),
    "prepare": ("lowprec_attn.gpt2.prepare", "make token files from text or a data set"),
    "report": ("lowprec_attn.gpt2.report", "redraw the report of a run directory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 0, 1 for input that cannot serve."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="lowprec-attn", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked_for = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked_for:
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                return _fail(f"{error}; pip install 'lowprec-attn[train,data]'")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args, rest = parser.parse_known_args(arguments)
    if hasattr(args, "config_flags"):  # handed on to train.py
        args.config_flags = [flag for flag in rest if flag.startswith("--config.")]
        rest = [flag for flag in rest if flag not in args.config_flags]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.run(args) or 0
    except (ValueError, RunError) as error:
        return _fail(error)


def _fail(error: object) -> int:
    print(f"error: {error}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
