"""What `lowprec-attn check` makes of planted bugs, planted arithmetics and correct libraries.

    python -m benchmarks.check_confusion --out results/check/confusion.jsonl
    python -m benchmarks.check_confusion --read results/check/confusion.jsonl

Every planted bug sits in a planted arithmetic drawn at random; tiles, the direction of the walk
over the keys, lengths, head sizes, formats and seeds are drawn as well. Correct libraries are
checked at random lengths, head sizes, formats and seeds: a bug found there is a false one. `--read`
prints the tables that docs/check.md counts.
"""

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted import ARITHMETICS, BUGS, Asked, Planted
from lowprec_attn import check
from lowprec_attn.check.measure import Found, as_rows
from lowprec_attn.check.problems import Problem
from lowprec_attn.check.target import ABILITIES
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line, complete_lines
from lowprec_attn.tables import markdown

_SHAPES = ((64, 32), (96, 64))  # tokens and head size
_TILES = (16, 32, 48, 64, 80, 128)
# The unfused one has no online softmax to be wrong.
_WITH_BUGS = [name for name, fields in ARITHMETICS.items() if "normalize" not in fields]
_LIBRARIES = (
    "jax.nn",
    "lowprec_attn:tiled",
    "lowprec_attn:dense",
    "torch.sdpa:math",
    "torch.sdpa:flash",
)


def main() -> None:
    """Appends a line a check, or prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="JSON lines, appended to")
    files.add_argument("--read", type=Path, help="such a file: prints its tables")
    parser.add_argument("--draws", type=int, default=3, help="of every planted bug and arithmetic")
    parser.add_argument("--libraries", type=int, default=4, help="draws of every correct library")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        if args.read:
            records = [json.loads(line) for line in complete_lines(args.read)]
            print("\n".join(tables(records)), end="")
            return
        rng = np.random.default_rng(args.seed)
        for record in itertools.chain(_planted(rng, args.draws), _libraries(rng, args.libraries)):
            append_line(args.out, json.dumps(record))
            print(_line(record), flush=True)
    except UserError as error:
        sys.exit(f"error: {error}")


def _planted(rng: np.random.Generator, draws: int) -> Iterator[dict[str, Any]]:
    for _ in range(draws):
        for name in ARITHMETICS:
            yield _checked("arithmetic", name, None, rng)
        for bug in BUGS:
            yield _checked("bug", str(rng.choice(_WITH_BUGS)), bug, rng)


def _checked(
    kind: str, arithmetic: str, bug: str | None, rng: np.random.Generator
) -> dict[str, Any]:
    drawn = _drawn(rng)
    tile, backwards = int(rng.choice(_TILES)), bool(rng.random() < 0.5)
    fields = ARITHMETICS[arithmetic]
    kernel = Planted(tile=tile, backwards=backwards, bug=bug, rng=rng, **fields)
    started = time.monotonic()
    report = check.check(
        target(kernel, drawn["head_size"], drawn["tokens"]), drawn["dtype"], seed=drawn["seed"]
    )
    return {
        "kind": kind,
        "arithmetic": arithmetic,
        "bug": bug,
        "tile": tile,
        "backwards": backwards,
        **drawn,
        **_verdict(report),
        "seconds": round(time.monotonic() - started, 1),
    }


def target(kernel: Planted, head_size: int = 64, tokens: int = 160) -> check.Target:
    """A planted kernel as a target of `check`, aligned with the first row and key."""

    def call(problem: Problem) -> Found:
        masking = problem.masking
        asked = Asked(
            scale=problem.scale,
            is_causal=masking.is_causal,
            mask=masking.mask,
            window=masking.window,
            soft_cap=problem.soft_cap,
            bias=masking.bias,
            sinks=masking.sinks,
            dlse=problem.dlse,
        )
        return as_rows(kernel(*problem.arrays, asked))

    return check.Target(
        name="planted",
        call=call,
        can=frozenset(ABILITIES),
        script=lambda problem: ["found = []"],
        head_size=head_size,
        tokens=tokens,
    )


def _libraries(rng: np.random.Generator, draws: int) -> Iterator[dict[str, Any]]:
    for name in _LIBRARIES:
        if name.startswith("torch") and importlib.util.find_spec("torch") is None:
            continue
        for _ in range(draws):
            # On a CPU jax.nn declines float16.
            drawn = _drawn(rng, ("bfloat16",) if name == "jax.nn" else ("bfloat16", "float16"))
            started = time.monotonic()
            options = check.Options(head_size=drawn["head_size"], tokens=drawn["tokens"])
            report = check.check(check.find(name, options), drawn["dtype"], seed=drawn["seed"])
            yield {
                "kind": "library",
                "arithmetic": name,
                "bug": None,
                **drawn,
                **_verdict(report),
                "seconds": round(time.monotonic() - started, 1),
            }


def _drawn(
    rng: np.random.Generator, dtypes: Sequence[str] = ("bfloat16", "bfloat16", "float16")
) -> dict[str, Any]:
    tokens, head_size = _SHAPES[rng.integers(len(_SHAPES))]
    return {
        "dtype": str(rng.choice(dtypes)),
        "tokens": tokens,
        "head_size": head_size,
        "seed": int(rng.integers(1000)),
    }


def _verdict(report: check.Report) -> dict[str, Any]:
    found = report.arithmetic
    return {
        "state": report.state,
        "bugs": [bug.name for bug in report.bugs],
        "named": None if found is None else found.name,
        "alike": [] if found is None else list(found.alike),
        "calls": len(report.errors),
        "risks": list(report.risks),
    }


def outcome(record: dict[str, Any]) -> str:
    """What the verdict says of what was planted.

    `named`, `found`, `found, by another name`, `a risk` or `missed` of a bug; `named`, `among those
    not told apart`, the name of another arithmetic or `false bug` of an arithmetic.
    """
    bugs = record["bugs"]
    if record["kind"] == "bug":
        wanted = BUGS[record["bug"]]
        if not bugs:
            return "a risk" if any("two runs" in r for r in record["risks"]) else "missed"
        if wanted and any(wanted in bug.lower() for bug in bugs):
            return "named"
        is_named = any(not bug.startswith("an error") for bug in bugs)
        return "found, by another name" if wanted and is_named else "found"
    if bugs:
        return "false bug"
    if record["kind"] == "library":
        return f"{record['state']}, {record['named']}"
    name = record["arithmetic"]
    if record["dtype"] == "float16":
        name = name.replace("bfloat16", "float16")
    if record["named"] == name:
        return "named"
    return "not told apart" if name in record["alike"] else record["named"]


def tables(records: list[dict[str, Any]]) -> Iterator[str]:
    """In Markdown: bugs, arithmetics and correct libraries by outcome."""
    for kind, key, order in (
        ("bug", "bug", ["named", "found", "found, by another name", "missed"]),
        ("arithmetic", "arithmetic", ["named", "not told apart"]),
        ("library", "arithmetic", []),
    ):
        of_kind = [r for r in records if r["kind"] == kind]
        outcomes = Counter((r[key], outcome(r)) for r in of_kind)
        columns = list(dict.fromkeys([*order, *sorted({o for _, o in outcomes})]))
        names = list(dict.fromkeys(r[key] for r in of_kind))
        rows = [[name, *(str(outcomes[name, c] or "") for c in columns)] for name in names]
        rows.append(["all", *(str(sum(outcomes[n, c] for n in names)) for c in columns)])
        calls = sum(r["calls"] for r in of_kind)
        yield markdown([f"{kind} ({calls} calls)", *columns], rows)


def _line(record: dict[str, Any]) -> str:
    what = record["bug"] or record["arithmetic"]
    drawn = f"{record['seconds']:5.1f} s, {record['dtype']}, {record['tokens']} tokens"
    return f"{drawn}, {what}: {outcome(record)} ({'; '.join(record['bugs']) or record['named']})"


if __name__ == "__main__":
    main()
