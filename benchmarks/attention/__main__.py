"""Times attention, forward and forward + backward, as ratios within one run.

    python -m benchmarks.attention --out results/bench.jsonl --plot docs/images/bench
    python -m benchmarks.attention --memory --out results/memory.jsonl
    python -m benchmarks.attention --read results/bench.jsonl --require

On a GPU, the first command times the named shapes and a sweep of T from 512 to 32768, which takes
some minutes; elsewhere it times one small shape. The last command prints earlier records again, and
fails if a target is missed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.attention import memory, table, targets
from benchmarks.attention.candidates import baseline, candidates, for_shape, select
from benchmarks.attention.measure import measure
from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, add_ratios, environment, read, write
from benchmarks.attention.timing import JaxCandidate
from benchmarks.shapes import SHAPES, SWEEP
from lowprec_attn.errors import RunError

_DTYPES = ("bfloat16", "float16", "float32")
_SHAPES = {"gpu": [*targets.SHAPES, "sweep"]}


def main() -> int:
    """Measures or reads, prints, writes and draws; returns the exit code."""
    args = _arguments()
    try:
        records: list[Record] = []
        for part in _parts(args):
            records += part
            if args.out:
                write(args.out, records)  # a run that is stopped leaves what it has measured
        _report(records)
        if args.plot:
            _draw(records, args.plot)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.require and not targets.all_met(list(targets.outcomes(records))):
        print(f"a target is missed or not timed on {', '.join(targets.SHAPES)}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--shapes", nargs="+", choices=[*SHAPES, "sweep"], metavar="SHAPE")
    what.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    what.add_argument("--only", nargs="+", metavar="PATTERN", help="candidates, such as 'gpu *'")
    what.add_argument("--points", action="store_true", help="also flash with each point rounded")
    what.add_argument("--rounds", type=int, default=11, help="samples of each; half on the sweep")
    what.add_argument("--baseline", metavar="PATTERN", help="ratios to the fastest that matches")
    what.add_argument("--memory", action="store_true", help="memory against T instead of time")
    what.add_argument("--lengths", nargs="+", type=int, default=memory.LENGTHS, metavar="T")
    what.add_argument("--read", type=Path, help="records of an earlier run instead of a new one")
    result = parser.add_argument_group("what is done with it")
    result.add_argument("--out", type=Path, help="JSON lines file to write")
    result.add_argument("--plot", type=Path, help="figures to write: PLOT_shapes.png, ...")
    result.add_argument("--require", action="store_true", help="fail where a target is missed")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    args.lengths = sorted(set(args.lengths))
    if args.lengths[0] < 1:
        parser.error(f"--lengths must be at least 1, got {args.lengths[0]}")
    return args


def _parts(args: argparse.Namespace) -> Iterator[list[Record]]:
    """Yields the records in parts, as they come."""
    if args.read:
        yield read(args.read)
        return
    yield [environment()]
    if args.memory:
        yield _measure_memory(args)
    else:
        yield from _measure_times(args)


def _measure_memory(args: argparse.Namespace) -> list[Record]:
    found = candidates(jax.default_backend())
    chosen = [c for c in select(found, args.only or memory.PATTERNS) if isinstance(c, JaxCandidate)]
    return memory.memory(chosen, args.lengths, args.dtype)


def _measure_times(args: argparse.Namespace) -> Iterator[list[Record]]:
    """Yields the records of one shape and pass at a time."""
    platform = jax.default_backend()
    found = candidates(platform, points=args.points)
    if args.only:
        found = select(found, args.only)
    if not found:
        raise RunError(f"no candidate on {platform} matches {' '.join(args.only)}")
    for name in _shape_names(args.shapes or _SHAPES.get(platform, ["cpu1k"])):
        rounds = (args.rounds + 1) // 2 if name in SWEEP else args.rounds
        for backward in (False, True):
            start = time.perf_counter()
            problem = Problem(name, SHAPES[name], args.dtype, backward)
            rows = measure(problem, for_shape(found, name), rounds)
            add_ratios(rows, args.baseline or baseline(platform))
            seconds = time.perf_counter() - start
            print(f"{name} {problem.pass_name}: {seconds:.0f} s", file=sys.stderr, flush=True)
            yield rows


def _shape_names(given: Sequence[str]) -> list[str]:
    """Returns the names, with `sweep` replaced by all shapes of the sweep."""
    expanded = (SWEEP if name == "sweep" else (name,) for name in given)
    return list(itertools.chain.from_iterable(expanded))


def _report(records: list[Record]) -> None:
    for record in records:
        if record["kind"] == "environment":
            print(table.environment_line(record))
    for line in itertools.chain(
        table.time_lines(records),
        table.target_lines(list(targets.outcomes(records))),
        table.memory_lines(records),
    ):
        print(line)


def _draw(records: list[Record], prefix: Path) -> None:
    try:
        from benchmarks.attention import plot
    except ImportError as error:
        raise RunError(f"--plot needs matplotlib (pip install matplotlib): {error}") from error
    for path in plot.save(records, prefix):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
