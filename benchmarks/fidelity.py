"""Measures how far O, lse, dQ, dK and dV of every kernel lie from float64, by the size of scores.

    python -m benchmarks.fidelity --out FILE.jsonl
    python -m benchmarks.fidelity --out FILE.jsonl --arrays CAPTURE.npz --numerics exact flash
    python -m benchmarks.fidelity --read results/fidelity/h100.jsonl.xz --result dq

The problems are causal attention of bfloat16 q, k, v and dO. They are made up, with largest scores
from 10 to 1e7, or they are layers of an npz that `diagnostics.capture` saved. There are two kinds
of made-up problems. In `clustered`, tokens lie near six directions that q and k share, and values
have a common part, as in layers of trained models (after the sweep of
github.com/KohakuBlueleaf/KohakuFA). In `normal`, nothing is shared.

The kernels are this library's, each with every requested arithmetic; jax.nn's, by XLA and by cuDNN;
and, if torch is installed, PyTorch's FlashAttention-2, cuDNN and unfused attention. A kernel that
cannot serve a problem is recorded with its reason. jax.nn and PyTorch return no float32 lse.

A line of the file is one kernel on one problem. It holds versions and device, and for every head
the following: the largest |score|; for each result, its RMS in float64 and ‖x − x64‖ / ‖x64‖ over
all rows; for lse, the largest |lse − lse64|, and a row's largest |Σ P − 1|, where
P = exp(S64 − lse) has the exact scores and the kernel's own lse. From 1e6 on, most rows attend to
one key, and the true dQ and dK are tiny, so that any error is large beside them.
"""

import argparse
import functools
import importlib.util
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import program
from benchmarks.attention.records import environment, reason
from lowprec_attn import attention
from lowprec_attn.check import libraries
from lowprec_attn.check.calls import Function
from lowprec_attn.check.inputs import Arrays, drawn, largest_scores
from lowprec_attn.check.measure import RESULTS, Found, both_passes, results
from lowprec_attn.check.problems import Problem, formed
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line, from_strict_json, strict_json
from lowprec_attn.numerics import Numerics, get_preset
from lowprec_attn.tables import markdown

SCORES = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
NUMERICS = ("exact", "flash", "float32_output", "normalized_delta", "matched")
_OF_LSE = ("lse", "p_row_sum")
_OF_HEAD = (0, 1, 3)  # the axes that a statistic of each head is taken over
_KEYWORDS = {"causal": "is_causal", "scale": "scale"}

Record = dict[str, Any]


class Kernel(NamedTuple):
    """A kernel: its name, the requested arithmetic, and a function that runs it.

    `numerics` is None for a kernel whose arithmetic cannot be chosen. `run` takes a problem and
    returns its results as arrays of rows; it raises if it cannot serve the problem.
    """

    name: str
    numerics: str | None
    run: Callable[[Problem], Found]


@program.told
def main() -> None:
    """Prints and appends a line for each kernel and problem."""
    args = arguments(
        __doc__,
        tokens=256,
        scores=SCORES,
        result={"choices": (*RESULTS, *_OF_LSE), "default": "dq", "help": "of --read"},
        arrays={"type": Path, "help": "an npz with q, k, v and do of layers"},
        numerics={"nargs": "+", "default": NUMERICS, "metavar": "PRESET[:FIELD=VALUE,…]",
                  "help": "of this library's kernels (default: %(default)s)"},
    )  # fmt: skip
    if args.read:
        print("\n".join(tables(read_records(args.read), args.result)), end="")
        return
    kernels = [*own(args.numerics), *jax_nn(), *torch_sdpa()]
    problems = captured(args.arrays) if args.arrays else made_up(args)
    written = write(args.out, (r for p in problems for r in measure(p, kernels)))
    refused: set[tuple[str, str | None]] = set()  # each refusal is printed once
    for record in written:
        kernel = record["kernel"], record["numerics"]
        if "errors" in record or kernel not in refused:
            print(_line(record), flush=True)
        if "errors" not in record:
            refused.add(kernel)


def arguments(
    doc: str | None, *, tokens: int, scores: Sequence[float], **others: Any
) -> argparse.Namespace:
    """Parses the command line of a program that runs on such problems.

    Args:
      doc: the program's docstring.
      tokens, scores: the defaults of these options.
      others: further options by name, with the keywords of `add_argument`.
    """
    parser = program.recording_parser(doc)
    parser.add_argument("--scores", type=float, nargs="+", default=scores, help="largest ones")
    for name, default in {"tokens": tokens, "heads": 4, "head_size": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, options in others.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def write(path: Path, records: Iterator[Record]) -> Iterator[Record]:
    """Appends each record with versions and device to a file, and yields it."""
    where = environment(program.name())
    for record in records:
        line = strict_json(record | {"environment": where})
        append_line(path, json.dumps(line, allow_nan=False))
        yield record


def read_records(path: Path) -> list[Record]:
    """Returns the records of a file, one per line.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            return [from_strict_json(json.loads(line)) for line in file]
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise UserError(f"{path} holds no records of this program: {error}") from error


def tables(records: Sequence[Record], result: str) -> Iterator[str]:
    """Yields a Markdown table per kind of problem: errors of `result` by kernel and problem.

    A cell is the error of the worst head. Refused problems are left out.
    """
    cells = [
        ((r["kernel"], r["numerics"] or ""), r["problem"], f"{max(r['errors'][result]):.1e}")
        for r in records
        if result in r.get("errors", ())
    ]
    return by_problem(cells, lambda kind: (f"{kind}: {result}", "arithmetic"))


def by_problem(
    cells: Sequence[tuple[tuple[str, str], str, str]],
    corner: Callable[[str], tuple[str, str]],
) -> Iterator[str]:
    """Yields a Markdown table per kind of problem, with a row for each pair of words.

    Args:
      cells: for each cell, the two words of its row, its problem, and its text.
      corner: takes a kind and returns the headings of the two columns of words.
    """
    for kind in dict.fromkeys(problem.split()[0] for _, problem, _ in cells):
        of_kind = [cell for cell in cells if cell[1].split()[0] == kind]
        problems = list(dict.fromkeys(problem for _, problem, _ in of_kind))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for words, problem, text in of_kind:
            rows.setdefault(words, {})[problem] = text
        names = [problem.removeprefix(kind).strip() for problem in problems]
        body = [[*words, *(row.get(p, "") for p in problems)] for words, row in rows.items()]
        yield markdown([*corner(kind), *names], body)


def made_up(args: argparse.Namespace) -> Iterator[Problem]:
    """Yields problems of both kinds, as the options of `arguments` say."""
    for kind in ("clustered", "normal"):
        for score in args.scores:
            arrays = drawn(kind, score, (args.tokens, args.heads, args.head_size), args.seed)
            yield _problem(f"{kind} {score:.0e}", arrays, args.head_size**-0.5)


def captured(path: Path) -> Iterator[Problem]:
    """Yields the layers of a file as problems in bfloat16.

    Raises:
      UserError: the file holds no layers, or a layer has no dO or is not causal.
    """
    for layer in array_file.load(path):
        if layer.do is None or not layer.is_causal:
            raise UserError(f"{path}: {layer.name} must be causal and have dO (`do`)")
        yield _problem(layer.name, (layer.q, layer.k, layer.v, layer.do), layer.factor)


def _problem(name: str, arrays: Arrays, scale: float) -> Problem:
    return formed(name, "", arrays, "bfloat16", causal=True, scale=scale)


def measure(problem: Problem, kernels: Sequence[Kernel]) -> Iterator[Record]:
    """Yields a record for each kernel on a problem."""
    forward, backward = both_passes(problem)
    exact = results(problem, forward, backward)
    facts = {
        "problem": problem.name,
        "shape": list(problem.q.shape),
        "score_maximum": largest_scores(problem.q, problem.k, problem.scale).tolist(),
        "rms": {r: np.sqrt((exact[r] ** 2).mean(_OF_HEAD)).tolist() for r in RESULTS},
    }
    for kernel in kernels:
        record = facts | {"kernel": kernel.name, "numerics": kernel.numerics}
        try:
            found = kernel.run(problem)
        except Exception as error:  # a library may raise anything
            yield record | {"unsupported": reason(error)}
            continue
        errors = {r: _relative(found[r], exact[r]) for r in RESULTS}
        if "lse" in found:
            lse = found["lse"]
            errors["lse"] = np.abs(lse - exact["lse"]).max((0, 1, 3)).tolist()
            with np.errstate(over="ignore"):  # exp overflows if lse is far off
                p = np.exp(forward.s - lse.transpose(0, 2, 1, 3))
            errors["p_row_sum"] = np.abs(p.sum(-1) - 1).max((0, 2)).tolist()
        yield record | {"errors": errors}


def own(names: Sequence[str]) -> list[Kernel]:
    """Returns this library's kernels, each with every arithmetic.

    Raises:
      UserError: a name is not an arithmetic.
    """
    return [
        Kernel(module, name, run_own(module, parse_numerics(name)))
        for module in attention.IMPLEMENTATIONS
        for name in names
    ]


def parse_numerics(text: str) -> Numerics:
    """Parses an arithmetic that is written PRESET[:FIELD=VALUE,…].

    Raises:
      UserError: the text is not an arithmetic.
    """
    name, _, changes = text.partition(":")
    pairs = [change.partition("=") for change in changes.split(",") if change]
    fields: Any = {field: int(v) if v.isdigit() else v for field, _, v in pairs}
    try:
        return get_preset(name).replace(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"--numerics {text}: {error}") from error


def run_own(implementation: str, numerics: Numerics) -> Callable[[Problem], Found]:
    """Returns a function that runs one of this library's implementations with an arithmetic."""
    return called(
        attention.dot_product_attention,
        implementation=implementation,
        numerics=numerics,
        return_residual=True,
    )


def called(
    function: Callable[..., Any], framework: str = "jax", **options: Any
) -> Callable[[Problem], Found]:
    """Returns a function that computes a problem's results by calling `function`.

    `function` must take the keywords `is_causal` and `scale`.
    """
    return Function(
        function=function,
        name="attention",
        head=(),
        framework=framework,
        layout="BTNH" if framework == "jax" else "BNTH",
        keywords=_KEYWORDS,
        options=options,
    ).caller()


def jax_nn() -> list[Kernel]:
    """Returns the kernels of `jax.nn.dot_product_attention`, which returns a rounded lse."""
    of = functools.partial(called, jax.nn.dot_product_attention)
    return [Kernel(f"jax.nn {name}", None, of(implementation=name)) for name in ("xla", "cudnn")]


def torch_sdpa() -> list[Kernel]:
    """Returns PyTorch's kernels, run on a GPU if it has one; none if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    of = {
        name: called(libraries.torch_attention, "torch", backend=backend)
        for name, backend in libraries.BACKENDS.items()
    }

    def efficient_in_float32(problem: Problem) -> Found:
        return of["efficient"](formed("", "", problem.arrays, "float32", causal=True,
                                      scale=problem.scale))  # fmt: skip

    kernels = [Kernel(f"torch {name}", None, of[name]) for name in ("flash", "cudnn", "math")]
    return [*kernels, Kernel("torch efficient float32", None, efficient_in_float32)]


def _relative(found: np.ndarray, exact: np.ndarray) -> list[float]:
    """Returns ‖found − exact‖ / ‖exact‖ of every head; not finite if `found` is not."""
    size = np.sqrt((exact**2).sum(_OF_HEAD))
    return (np.sqrt(((found - exact) ** 2).sum(_OF_HEAD)) / np.maximum(size, 1e-300)).tolist()


def _line(record: Mapping[str, Any]) -> str:
    numerics = record["numerics"] or ""
    head = f"{record['problem']:16} {record['kernel']:12} {numerics:24}"
    if "errors" not in record:
        return f"{head} {record['unsupported'][:100]}"
    worst = {name: max(values) for name, values in record["errors"].items()}
    return head + " ".join(f"{name} {value:8.1e}" for name, value in worst.items())


if __name__ == "__main__":
    sys.exit(main())
