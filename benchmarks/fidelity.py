"""How far O, lse, dQ, dK and dV of every kernel here lie from float64, by the size of scores.

    python -m benchmarks.fidelity --out FILE.jsonl
    python -m benchmarks.fidelity --out FILE.jsonl --arrays CAPTURE.npz --numerics exact flash
    python -m benchmarks.fidelity --read results/fidelity/h100.jsonl.xz --result dq

The problems are causal attention of bfloat16 q, k, v and dO: made up, with largest scores from 10
to 1e7, or layers of an npz as `diagnostics.capture` saves them. Made up in two kinds. `clustered`:
tokens near six directions that q and k share, values with a common part, as layers of trained
models have them (after the sweep of github.com/KohakuBlueleaf/KohakuFA). `normal`: nothing is
shared.

Kernels: those of this library that serve here, each with every arithmetic that is asked for;
jax.nn by XLA and by cuDNN; PyTorch's FlashAttention-2, cuDNN and unfused attention, where torch is
installed. A kernel that cannot serve is recorded with its reason. jax.nn and PyTorch hand out no
float32 lse.

A line of the file is one kernel on one problem: versions and device; of every head the largest
|score|; of each result its RMS in float64 and ‖x − x64‖ / ‖x64‖ over all rows; of lse the largest
|lse − lse64|, and the largest |Σ P − 1| of a row with P = exp(S64 − lse), the exact scores and the
kernel's own lse. At 1e6 and more most rows are one key, and the true dQ and dK fade: what is left
of any error is large beside them.
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
_OF_HEAD = (0, 1, 3)  # the other axes
_KEYWORDS = {"causal": "is_causal", "scale": "scale"}

Record = dict[str, Any]


class Kernel(NamedTuple):
    """A name, the arithmetic asked for (None: nothing can be asked), and what computes it.

    `run` takes a problem and returns its results as arrays of rows; it raises where it cannot
    serve.
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
    refused: set[tuple[str, str | None]] = set()  # said once
    for record in written:
        kernel = record["kernel"], record["numerics"]
        if "errors" in record or kernel not in refused:
            print(_line(record), flush=True)
        if "errors" not in record:
            refused.add(kernel)


def arguments(
    doc: str | None, *, tokens: int, scores: Sequence[float], **others: Any
) -> argparse.Namespace:
    """The command line of a program on such problems.

    Args:
      doc: of the program.
      tokens, scores: defaults.
      others: further options, by name.
    """
    parser = program.recording_parser(doc)
    parser.add_argument("--scores", type=float, nargs="+", default=scores, help="largest ones")
    for name, default in {"tokens": tokens, "heads": 4, "head_size": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, options in others.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def write(path: Path, records: Iterator[Record]) -> Iterator[Record]:
    """Appends each record with versions and device, and hands it on."""
    where = environment(program.name())
    for record in records:
        line = strict_json(record | {"environment": where})
        append_line(path, json.dumps(line, allow_nan=False))
        yield record


def read_records(path: Path) -> list[Record]:
    """The lines of a file.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            return [from_strict_json(json.loads(line)) for line in file]
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise UserError(f"{path} holds no records of this program: {error}") from error


def tables(records: Sequence[Record], result: str) -> Iterator[str]:
    """In Markdown, one table a kind of problem: errors of `result` by kernel and problem.

    A cell is the error of the worst head. What was refused is left out.
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
    """In Markdown, one table a kind of problem, with a row for each pair of words.

    Args:
      cells: the words of a row, a problem, and what stands there.
      corner: heading of the words, of a kind.
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
    """Problems of both kinds, as `arguments` asks for them."""
    for kind in ("clustered", "normal"):
        for score in args.scores:
            arrays = drawn(kind, score, (args.tokens, args.heads, args.head_size), args.seed)
            yield _problem(f"{kind} {score:.0e}", arrays, args.head_size**-0.5)


def captured(path: Path) -> Iterator[Problem]:
    """The layers of a file, as bfloat16.

    Raises:
      UserError: it is none, or a layer has no dO or is not causal.
    """
    for layer in array_file.load(path):
        if layer.do is None or not layer.is_causal:
            raise UserError(f"{path}: {layer.name} must be causal and have dO (`do`)")
        yield _problem(layer.name, (layer.q, layer.k, layer.v, layer.do), layer.factor)


def _problem(name: str, arrays: Arrays, scale: float) -> Problem:
    return formed(name, "", arrays, "bfloat16", causal=True, scale=scale)


def measure(problem: Problem, kernels: Sequence[Kernel]) -> Iterator[Record]:
    """A record of each kernel."""
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
        except Exception as error:  # of any kind: theirs are not ours to know
            yield record | {"unsupported": reason(error)}
            continue
        errors = {r: _relative(found[r], exact[r]) for r in RESULTS}
        if "lse" in found:
            lse = found["lse"]
            errors["lse"] = np.abs(lse - exact["lse"]).max((0, 1, 3)).tolist()
            with np.errstate(over="ignore"):  # of an lse that is far off
                p = np.exp(forward.s - lse.transpose(0, 2, 1, 3))
            errors["p_row_sum"] = np.abs(p.sum(-1) - 1).max((0, 2)).tolist()
        yield record | {"errors": errors}


def own(names: Sequence[str]) -> list[Kernel]:
    """This library's kernels with every arithmetic.

    Raises:
      UserError: one is none.
    """
    return [
        Kernel(module, name, run_own(module, parse_numerics(name)))
        for module in attention.IMPLEMENTATIONS
        for name in names
    ]


def parse_numerics(text: str) -> Numerics:
    """PRESET[:FIELD=VALUE,…].

    Raises:
      UserError: it is none.
    """
    name, _, changes = text.partition(":")
    pairs = [change.partition("=") for change in changes.split(",") if change]
    fields: Any = {field: int(v) if v.isdigit() else v for field, _, v in pairs}
    try:
        return get_preset(name).replace(**fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"--numerics {text}: {error}") from error


def run_own(implementation: str, numerics: Numerics) -> Callable[[Problem], Found]:
    """One of this library's implementations in an arithmetic."""
    return called(
        attention.dot_product_attention,
        implementation=implementation,
        numerics=numerics,
        return_residual=True,
    )


def called(
    function: Callable[..., Any], framework: str = "jax", **options: Any
) -> Callable[[Problem], Found]:
    """What computes the results of a function by its keywords `is_causal` and `scale`."""
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
    """`jax.nn.dot_product_attention`, which rounds the lse that it hands out."""
    of = functools.partial(called, jax.nn.dot_product_attention)
    return [Kernel(f"jax.nn {name}", None, of(implementation=name)) for name in ("xla", "cudnn")]


def torch_sdpa() -> list[Kernel]:
    """PyTorch's kernels, on its GPU where it has one; none where torch is not installed."""
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
    """‖found − exact‖ / ‖exact‖ of every head; not finite where `found` is not."""
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
