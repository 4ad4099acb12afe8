"""The `lowprec-attn` command: training, text, diagnosis, experiments, compiling, reports."""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from lowprec_attn import __version__, installation
from lowprec_attn.commands.output import surviving
from lowprec_attn.errors import (
    EXIT_INTERRUPTED,
    UserError,
    lacks_its_platform,
    missing_platform,
    printable,
)

EXIT_BAD_INPUT = 1

_DESCRIPTION = (
    "Low-precision attention in JAX: examines a run or a kernel, trains GPT-2 and Llama-style "
    "models, and compares training runs."
)
_EPILOG = (
    "Has your run exploded? lowprec-attn diagnose step.npz. Do you write a kernel? lowprec-attn "
    "check MODULE:FUNCTION --causal. COMMAND --help has all options; docs/index.md of the "
    "repository has all pages."
)

# Each module has add_arguments(parser) and run(args). Only the requested one is imported, because
# `diagnose` needs only the core installation and the others need the trainer's packages.
_COMMANDS = {
    "train": "train GPT-2 or a Llama-style model with a named choice of attention arithmetic",
    "compile": "say whether a training step fits a TPU slice; this needs no TPU",
    "diagnose": "say whether low precision harms a run of this trainer, or your own arrays q, k, v "
    "and dO, the gradient of the loss by attention's output O",
    "check": "say whether an attention function's gradient is right, and which arithmetic it "
    "computes",
    "lab": "run and compare arms: training runs that differ in named settings",
    "prepare": "make token files from text or a data set",
    "report": "write report.html of a run again",
}

# Flags and commands of earlier checkouts, and what to use instead.
_GONE = {
    "deviation": "python -m benchmarks.deviation, in a checkout",
    "--profile": "jax.profiler.trace around a step shows its operations by part of the model",
    "--quick": "leave it out: the whole compilation takes one or two minutes",
    "--record": "leave it out, and keep what is printed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
      argv: the command's words; None takes those of the process.

    Returns:
      The exit code of the command. It is 1 after a `UserError`, a file that the system refuses, or
      output that a full disk refuses, each of which is printed as one line. It is 130 after Ctrl-C;
      from then on another Ctrl-C ends the process at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    with surviving() as output:
        try:
            code = _run(arguments, debug)
        except KeyboardInterrupt:
            if debug:
                raise
            code = EXIT_INTERRUPTED
            # Another Ctrl-C while Python waits for its threads would print their tracebacks.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        output.flush()
        refused = output.failure
        # A reader that closes the pipe early (`| head -1`) is not a failure.
        if refused is not None and refused.errno != errno.EPIPE:
            failed = _fail(f"cannot write to standard output: {refused.strerror}")
            return code or failed
        return code


def run_process(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `main` and ends the process with its exit code."""
    sys.unraisablehook = _not_dropped
    _settle_environment()
    code = main(argv)
    if code == EXIT_INTERRUPTED and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Ctrl-C interrupted the command. Compiler threads may still be running, and they would
        # crash during Python's shutdown (JAX 0.10), so the process skips the shutdown.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or full
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _settle_environment() -> None:
    """Sets variables that libraries read when imported; removes one that no command supports."""
    os.environ["MPLBACKEND"] = "agg"  # figures are only written to files
    # NumPy multiplies only small matrices, mostly in `check`, and idle OpenBLAS threads spin while
    # they wait for the next product. OpenBLAS reads this variable when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if os.environ.pop("JAX_ENABLE_X64", "0").lower() not in ("0", "false", "f", "no", "n", "off"):
        print(
            "note: JAX_ENABLE_X64 is ignored: this program computes in float32 and below",
            file=sys.stderr,
        )


def _not_dropped(dropped: "sys.UnraisableHookArgs") -> None:
    """Raises SIGINT again if Python has dropped a KeyboardInterrupt.

    Python drops one that arrives in a callback of its garbage collector, and JAX installs such a
    callback.
    """
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 1, as those of the commands are.

    It escapes control characters in its errors, which quote the user's words.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(_fail(f"{printable(message)}; see {self.prog} --help"))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        return _command([argument for argument in arguments if argument != "--debug"])
    except Exception as error:
        told = None if debug else _told(error)
        if told is None:
            raise
        return _fail(told)


def _command(arguments: list[str]) -> int:
    parser = _Parser(prog="lowprec-attn", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show where an error comes from, with any command"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked_for = next((word for word in arguments if not word.startswith("-")), None)
    if asked_for in _GONE:
        return _fail(f"{asked_for} is gone: {_GONE[asked_for]}")
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked_for:
            module = importlib.import_module(f"lowprec_attn.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    for word in arguments:
        if word.startswith("--") and word.endswith("=--"):  # argparse would parse an empty list
            parser.error(f"argument {word.removesuffix('=--')}: expected a value, got '--'")
    args, rest = parser.parse_known_args(arguments)
    if hasattr(args, "config_flags"):
        args.config_flags, rest = _config_flags(rest)
    for word in rest:
        if (flag := word.partition("=")[0]) in _GONE:
            return _fail(f"{flag} is gone: {_GONE[flag]}")
    if rest:
        fields = "; --config.NAME=VALUE sets a field" if hasattr(args, "config_flags") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{fields}")
    return args.run(args) or 0


def _told(error: Exception) -> str | None:
    """Returns words for a problem that the user can mend, or None if the error is a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        is_own = name in ("lowprec_attn", "pallas_kernels")
        return None if is_own else f"{error}; {installation.command_for(error.name or '')}"
    if isinstance(error, MemoryError):
        return f"this machine's memory does not suffice ({error or 'MemoryError'}); give less"
    if isinstance(error, OSError):
        if error.filename is not None:  # a case that no check covers, such as a name too long
            return f"{error.filename}: {error.strerror}"
        if error.errno == errno.ENOENT and not _has_directory():
            return "the current directory has been removed; change to one that is there"
        is_machine = error.errno in _OF_THE_MACHINE
        return f"{error.strerror}; mend that and repeat the command" if is_machine else None
    line = next(iter(str(error).splitlines()), "")
    if lacks_its_platform(error):
        return missing_platform(line)
    if line.startswith("RESOURCE_EXHAUSTED"):
        return f"the device's memory does not suffice ({line}); give less"
    return None


def _has_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


# Errors of the machine that concern no single file.
_OF_THE_MACHINE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EIO,
    errno.EAGAIN,
}


def _config_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits words into `--config.NAME=VALUE` flags, joined with their values, and the rest."""
    flags, others = [], []
    for i, word in enumerate(words):
        if word.startswith("--config."):
            value = words[i + 1] if "=" not in word and i + 1 < len(words) else None
            flags.append(word if value is None or value.startswith("--") else f"{word}={value}")
        elif not (i and words[i - 1].startswith("--config.") and "=" not in words[i - 1]):
            others.append(word)
    return flags, others


def _fail(error: str) -> int:
    # An error may have several lines, for example a list.
    print("\n".join(map(printable, f"error: {error}".split("\n"))), file=sys.stderr)
    return EXIT_BAD_INPUT
