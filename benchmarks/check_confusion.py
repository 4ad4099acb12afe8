"""Tries `lowprec-attn check` on planted bugs, planted arithmetics and correct libraries.

    python -m benchmarks.check_confusion --out results/check/confusion.jsonl
    python -m benchmarks.check_confusion --out FILE --only tokamax    # one library
    python -m benchmarks.check_confusion --read results/check/confusion.jsonl

Every planted bug sits in a planted arithmetic that is drawn at random. Tiles, the direction of the
loop over the keys, causality, lengths, head sizes, formats and seeds are drawn as well. In half of
the checks, every problem also has a window, a soft cap, sinks, a bias, or all of them. Correct
libraries are checked at random lengths, head sizes, formats and seeds, with those of these features
that they have. A bug that is found in a correct library is a false one. `--read` prints the tables
that docs/check.md counts.
"""

import functools
import importlib.util
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import fidelity, program
from benchmarks.planted import (
    ARITHMETICS,
    BUGS,
    NOT_WITH,
    OF_CAUSAL,
    OF_FULL,
    ONLY_WITH,
    Planted,
)
from lowprec_attn import check
from lowprec_attn.check.measure import as_rows
from lowprec_attn.check.target import ABILITIES, Setting
from lowprec_attn.files import append_line
from lowprec_attn.tables import markdown

_SHAPES = ((64, 32), (96, 64))  # tokens and head size
_TILES = (16, 32, 48, 64, 80, 128)
# No bugs are planted in the unfused arithmetic, because some of them need an online softmax.
_WITH_BUGS = [name for name, fields in ARITHMETICS.items() if "normalize" not in fields]
_BESIDE = ("window", "soft_cap", "sinks", "bias")
# tokamax adds the bias before the soft cap, so it has no combination of the two.
_OF_TOKAMAX = ((), ("window",), ("soft_cap",), ("bias",), ("window", "bias"))
# The combinations of `_BESIDE` that each library is checked with.
_LIBRARIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "jax.nn": ((), ("window",), ("bias",), ("window", "bias")),
    "lowprec_attn:tiled": ((), *((name,) for name in _BESIDE), _BESIDE),
    "lowprec_attn:dense": ((), *((name,) for name in _BESIDE), _BESIDE),
    "tokamax:xla": _OF_TOKAMAX,
    "tokamax:xla_chunked": _OF_TOKAMAX,
    "torch.sdpa:math": ((), ("bias",)),
    "torch.sdpa:flash": ((),),
}


@program.told
def main() -> None:
    """Appends one line per check, or prints the tables."""
    parser = program.recording_parser(__doc__)
    parser.add_argument("--draws", type=int, default=3, help="of every planted bug and arithmetic")
    parser.add_argument(
        "--libraries", type=int, default=1, help="draws of every correct library and option"
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="checks whose bug, arithmetic or library has it"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.read:
        print("\n".join(tables(fidelity.read_records(args.read))), end="")
        return
    rng = np.random.default_rng(args.seed)
    for check_one in itertools.chain(
        _planted(rng, args.draws, args.only), _libraries(rng, args.libraries, args.only)
    ):
        record = check_one()
        append_line(args.out, json.dumps(record))
        print(_line(record), flush=True)


def _planted(
    rng: np.random.Generator, draws: int, only: str
) -> Iterator[Callable[[], dict[str, Any]]]:
    for _ in range(draws):
        planted: list[tuple[str, str, str | None]]
        planted = [("arithmetic", name, None) for name in ARITHMETICS]
        planted += [("bug", str(rng.choice(_WITH_BUGS)), bug) for bug in BUGS]
        for kind, arithmetic, bug in planted:
            if only in (bug or arithmetic):
                yield functools.partial(_checked, kind, arithmetic, bug, rng)


def _checked(
    kind: str, arithmetic: str, bug: str | None, rng: np.random.Generator
) -> dict[str, Any]:
    drawn = _drawn(rng)
    is_causal = bug in OF_CAUSAL or (bug not in OF_FULL and bool(rng.random() < 0.7))
    beside = _beside(bug, arithmetic, rng)
    tile, backwards = int(rng.choice(_TILES)), bool(rng.random() < 0.5)
    fields = ARITHMETICS[arithmetic]
    kernel = Planted(tile=tile, backwards=backwards, bug=bug, rng=rng, **fields)
    started = time.monotonic()
    planted = target(
        kernel, drawn["head_size"], drawn["tokens"], is_causal=is_causal, setting=Setting(**beside)
    )
    report = check.check(planted, drawn["dtype"], seed=drawn["seed"])
    return {
        "kind": kind,
        "arithmetic": arithmetic,
        "bug": bug,
        "tile": tile,
        "backwards": backwards,
        "is_causal": is_causal,
        **drawn,
        **beside,
        **_verdict(report),
        "seconds": round(time.monotonic() - started, 1),
    }


def _beside(bug: str | None, arithmetic: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draws what every problem has: nothing in half of the draws, else one feature or all four."""
    choices = [(), (), (), (), (), *((name,) for name in _BESIDE), _BESIDE]
    never = NOT_WITH.get(bug or "")
    if arithmetic == "corrected_after_cast":  # it is not defined with a soft cap
        never = "soft_cap"
    chosen = choices[rng.integers(len(choices))]
    names = (*(n for n in chosen if n != never), *ONLY_WITH.get(bug or "", ()))
    return _values(names, rng)


def _values(names: Collection[str], rng: np.random.Generator) -> dict[str, Any]:
    """Draws values for the fields of `Setting` that have these names."""
    values: dict[str, Any] = {
        "window": (int(rng.integers(8, 40)), int(rng.integers(8))),
        "soft_cap": float(rng.choice((5.0, 20.0, 50.0))),
        "sinks": True,
        "bias": True,
    }
    return {name: value for name, value in values.items() if name in names}


def target(
    kernel: Planted,
    head_size: int = 64,
    tokens: int = 160,
    *,
    is_causal: bool = True,
    setting: Setting = Setting(),  # noqa: B008
) -> check.Target:
    """Makes a target of a planted kernel, which is aligned with the first row and key.

    Args:
      kernel: the planted attention.
      head_size, tokens: the sizes of the core problems.
      is_causal: whether the target can be causal. The core problems are then causal. It can always
        be full.
      setting: what every problem has.
    """

    return check.Target(
        name="planted",
        call=lambda problem: as_rows(kernel(problem)),
        can=frozenset(ABILITIES) - (frozenset() if is_causal else {"causal"}),
        script=lambda problem, data: ({}, []),
        setting=setting,
        head_size=head_size,
        tokens=tokens,
    )


def _libraries(
    rng: np.random.Generator, draws: int, only: str
) -> Iterator[Callable[[], dict[str, Any]]]:
    for name, options in _LIBRARIES.items():
        package = name.partition(".")[0].partition(":")[0]
        if only not in name or importlib.util.find_spec(package) is None:
            continue
        for _, names in itertools.product(range(draws), options):
            yield functools.partial(_library, name, names, rng)


def _library(name: str, names: tuple[str, ...], rng: np.random.Generator) -> dict[str, Any]:
    # On a CPU jax.nn and tokamax decline float16.
    declines = name.startswith(("jax.nn", "tokamax"))
    drawn = _drawn(rng, ("bfloat16",) if declines else ("bfloat16", "float16"))
    beside = _values(names, rng)
    started = time.monotonic()
    options = check.Options(head_size=drawn["head_size"], tokens=drawn["tokens"], **beside)
    report = check.check(check.find(name, options), drawn["dtype"], seed=drawn["seed"])
    return {
        "kind": "library",
        "arithmetic": name,
        "bug": None,
        **drawn,
        **beside,
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
    """Compares the verdict with what was planted.

    Returns `named`, `found`, `found, by another name`, `a risk` or `missed` for a bug. Returns
    `named`, `not told apart`, the name of another arithmetic or `false bug` for an arithmetic.
    Returns the state and the arithmetic's name, or `false bug`, for a library.
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
    # The planted exponent is exp(S − m) of a rounded S, which is the exponent of `torch_flash`.
    if record["named"] in (name, name.replace("flash", "torch_flash")):
        return "named"
    return "not told apart" if name in record["alike"] else record["named"]


def tables(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yields Markdown tables that count bugs, arithmetics and correct libraries by outcome."""
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
    sys.exit(main())
