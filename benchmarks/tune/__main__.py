"""Times tiles of each GPU kernel on this device; the tables of `block_sizes` come from here.

    python -m benchmarks.tune --shapes gpt2 long64 long128 --presets flash exact --out FILE
    python -m benchmarks.tune --implementation hopper --shapes gpt2 long64 long128 --out FILE
    python -m benchmarks.tune --implementation hopper --unordered --shapes gpt2 long64 long128
    python -m benchmarks.tune --implementation hopper --rules dynamic_max --vary tests_ties

Each kernel is timed alone, with all its tiles in turn, round after round. The fastest tiles of each
kernel are printed, together with the table's own tile. The records hold every tile. A tile that the
compiler refuses, or whose results differ from those of the table's tile, is recorded with the
reason.

Every preset is tried with the first rule, and the first preset with every rule. A kernel is timed
again only if it sees a difference. For example, the kernel of dK and dV sees no row-max rule.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.attention.records import Record, environment, write
from benchmarks.shapes import SHAPES
from benchmarks.tune.sweep import IMPLEMENTATIONS, KERNELS, Call, differing, sweep
from lowprec_attn.errors import RunError, UserError
from lowprec_attn.numerics import PRESETS, ROW_MAX_RULES
from lowprec_attn.tables import columns

_PROGRAM = "python -m benchmarks.tune"

# Presets that need random bits are left out, since the kernels here take no random bits as input.
_PRESETS = [name for name, n in PRESETS.items() if not (n.normalize_probs or n.needs_bits)]


def main() -> int:
    """Times the tiles, prints tables and writes records; returns the exit code."""
    args = _arguments()
    try:
        _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="gpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2"], metavar="SHAPE")
    parser.add_argument("--presets", nargs="+", choices=_PRESETS, metavar="PRESET")
    parser.add_argument("--rules", nargs="+", choices=ROW_MAX_RULES, help="of the row maximum")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument(
        "--unordered", action="store_true", help="hopper's one kernel of dQ, dK and dV instead"
    )
    parser.add_argument("--stages", nargs="+", type=_positive, metavar="N", help="of a tile")
    parser.add_argument(
        "--vary", nargs="+", metavar="FIELD", help="of a tile; all others as in the table"
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="samples of each tile")
    parser.add_argument("--shown", type=_positive, default=3, help="tiles printed per kernel")
    parser.add_argument("--out", type=Path, help="JSON lines file to write")
    args = parser.parse_args()
    if args.unordered:
        if args.implementation != "hopper":
            parser.error(f"--unordered is of hopper, got --implementation {args.implementation}")
        if args.presets not in (None, ["flash"]):
            parser.error(f"--unordered times a kernel that sees no preset, got {args.presets}")
        args.kernels, args.presets, args.rules = ["key_gradients"], ["flash"], ["standard"]
    module = IMPLEMENTATIONS[args.implementation]
    kinds = dict.fromkeys(module.TILES[name] for name in args.kernels)
    fields = list(dict.fromkeys(x.name for kind in kinds for x in dataclasses.fields(kind)))
    if unknown := set(args.vary or ()).difference(fields):
        parser.error(f"--vary takes {', '.join(fields)}, got {', '.join(sorted(unknown))}")
    args.presets = args.presets or module.PRESETS
    args.rules = args.rules or module.RULES
    args.stages = args.stages or module.STAGES
    return args


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _run(args: argparse.Namespace) -> None:
    if jax.default_backend() != "gpu":
        raise RunError("tiles are timed on a GPU, and JAX finds none here")
    calls = list(_calls(args))
    for call in calls:  # all calls are checked before the first is timed
        call.check()
    records: list[Record] = [environment(_PROGRAM)]
    for call, kernels in differing(calls, args.kernels):
        for part in sweep(call, kernels, args.stages, args.rounds, args.vary):
            print(table(part, args.shown), flush=True)
            records += part
            if args.out:
                write(args.out, records)  # a run that is stopped leaves what it has measured


def _calls(args: argparse.Namespace) -> Iterator[Call]:
    """Yields calls of every preset with the first rule, and of the first preset with every rule."""
    pairs = [(preset, args.rules[0]) for preset in args.presets]
    pairs += [(args.presets[0], rule) for rule in args.rules[1:]]
    for shape, (preset, rule) in itertools.product(args.shapes, pairs):
        yield Call(
            implementation=args.implementation,
            shape=shape,
            preset=preset,
            row_max=rule,
            unordered=args.unordered,
        )


def table(records: Sequence[Record], shown: int) -> str:
    """Returns a table of the fastest tiles of one kernel, and of the tile in `block_sizes`."""
    tile = IMPLEMENTATIONS[records[0]["implementation"]].TILES[records[0]["kernel"]]
    fields = [field.name for field in dataclasses.fields(tile)]
    named = ("shape", "preset", "row_max", "kernel")
    rows = [(*named, *fields, "µs", "")]
    for place, record in enumerate(records):
        if place < shown or record["table"]:
            took = f"{1e6 * record['seconds']:.1f}" if "seconds" in record else "refused"
            cells = (str(record[name]) for name in (*named, *fields))
            rows.append((*cells, took, "table" if record["table"] else ""))
    return columns(rows, "<" * len(named) + ">" * len(fields) + "><")


if __name__ == "__main__":
    sys.exit(main())
