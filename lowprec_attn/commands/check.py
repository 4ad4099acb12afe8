"""`lowprec-attn check TARGET`: is a kernel's gradient right, and which arithmetic is it?

The command runs an attention function of any library forward and backward on hard inputs, and
compares it with float64 and with emulations of named arithmetics. It reports one of three states:
right, with the arithmetic; a risk, with the cure; or a bug, with the smallest case that shows it.
See `lowprec_attn.check`.

Exit codes: 0 right; 3 a risk; 4 a bug; 1 an unusable target or option.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from lowprec_attn import check
from lowprec_attn.check.problems import DTYPES
from lowprec_attn.check.targets import KNOWN
from lowprec_attn.files import require_outputs, writing

EXIT_CODES = {"right": 0, "risk": 3, "bug": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = (
        "Runs an attention function forward and backward on hard inputs and says whether its "
        "gradient is right, and which arithmetic it is."
    )
    parser.epilog = "Exit code 0: right, 3: a risk, 4: a bug, 1: bad input."
    add = parser.add_argument
    add("target", metavar="TARGET", help=KNOWN)
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="dtype of q, k, v and dO")
    add("--seed", type=int, default=0, help="seed of the inputs")
    add("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    add("--html", type=Path, metavar="FILE", help="also write the report as one HTML page")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path(),
        help="where the smallest case of a bug and its script go (default: the current directory)",
    )
    add(
        "--numerics",
        metavar="PRESET",
        help="arithmetic of lowprec_attn's own implementations (default: flash)",
    )
    add(
        "--window",
        type=_window,
        metavar="LEFT,RIGHT",
        help="row t sees only the keys t − LEFT to t + RIGHT; one number for both",
    )
    add("--soft-cap", type=float, metavar="C", help="scores are C tanh(q kᵀ · scale / C)")
    add("--sinks", action="store_true", help="one more score per head, and its gradient")
    add("--bias", action="store_true", help="a bias added to the scores, and its gradient")
    add(
        "--lse-gradient",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to check the gradient of a returned lse",
    )
    add("--tokens", type=int, help="queries and keys of most problems (default: 160)")
    add("--head-size", type=int, help="head size (default: 64)")
    own = parser.add_argument_group(
        "a function of your own", "MODULE:FUNCTION takes q, k and v and returns O, or O and lse"
    )
    add = own.add_argument
    add("--framework", choices=("jax", "torch"), help="library whose arrays the function takes")
    add("--layout", choices=("BTNH", "BNTH"), help="order of the axes (default: BTNH)")
    add("--causal", action=argparse.BooleanOptionalAction, help="whether the function is causal")
    add(
        "--keyword",
        action="append",
        default=[],
        metavar="NAME=KEYWORD",
        help=(
            "its keyword for causal, scale, mask (True: seen), window (a pair), soft_cap, sinks or "
            "bias, as in causal=is_causal; repeatable"
        ),
    )
    add("--scale", type=float, help="its factor of q kᵀ (default: 1/√H)")
    add(
        "--groups",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether it takes fewer key heads than query heads",
    )
    add(
        "--backward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether it has a backward pass; if not, O and a returned lse alone are checked",
    )
    add(
        "--alignment",
        choices=("start", "end"),
        help="end of the causal diagonal if lengths differ (default: found from O)",
    )


def _window(word: str) -> tuple[int, ...]:
    """Parses `LEFT,RIGHT` or one number for both sides; `check` validates the values later."""
    sides = tuple(int(side) for side in word.split(","))
    return sides * 2 if len(sides) == 1 else sides


def run(args: argparse.Namespace) -> int:
    """Checks the target, prints and writes the report, and returns the exit code.

    Raises:
      UserError: the target cannot be loaded or called, an option is unusable, or a file cannot be
        written.
    """
    target = check.find(args.target, _options(args))
    _require_outputs(args)
    report = check.check(target, args.dtype, seed=args.seed, out=args.out)
    print("\n".join(check.lines(report)))
    check.write(report, args.json, args.html)
    return EXIT_CODES[report.state]


def _require_outputs(args: argparse.Namespace) -> None:
    """Checks that the outputs can be written and would not overwrite the target's own module."""
    file = getattr(sys.modules.get(args.target.partition(":")[0]), "__file__", None)
    reads = [] if file is None else [Path(file)]
    require_outputs({"--json": args.json, "--html": args.html}, reads)
    with writing(args.out):
        args.out.mkdir(parents=True, exist_ok=True)


def _options(args: argparse.Namespace) -> check.Options:
    library = args.target.partition(":")[0]
    if args.numerics is not None and library != "lowprec_attn":
        raise check.TargetError(f"--numerics goes with lowprec_attn; leave it out for {library}")
    keywords: dict[str, str] = {}
    for word in args.keyword:
        name, _, keyword = word.partition("=")
        if not keyword.isidentifier():
            raise check.TargetError(f"--keyword {word}: say NAME=KEYWORD, as in causal=is_causal")
        if name in keywords:
            raise check.TargetError(f"--keyword {word}: {name} is {keywords[name]} already")
        keywords[name] = keyword
    names = {field.name for field in dataclasses.fields(check.Options)} - {"keywords"}
    given = {name: x for name, x in vars(args).items() if name in names and x is not None}
    return check.Options(keywords=keywords, **given)
