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
import importlib.metadata
import importlib.util
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import attention
from lowprec_attn.attention import IMPLEMENTATIONS, reference
from lowprec_attn.check.inputs import drawn, largest_scores
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line, from_strict_json
from lowprec_attn.numerics import Numerics, get_preset
from lowprec_attn.tables import markdown

SCORES = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7)
NUMERICS = ("exact", "flash", "float32_output", "normalized_delta", "matched")
RESULTS = ("o", "dq", "dk", "dv")
_OF_LSE = ("lse", "p_row_sum")
_OF_HEAD = (0, 1, 3)  # the other axes
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "numpy")


class Problem(NamedTuple):
    """Causal attention of bfloat16 q, k, v, dO [B, T, N, H], and the factor of q kᵀ."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: float


class Kernel(NamedTuple):
    """A name, the arithmetic asked for (None: nothing can be asked), and what computes it.

    `run` takes a problem and returns o, dq, dk, dv and, where there is one, lse as float64 arrays.
    It raises where it cannot serve.
    """

    name: str
    numerics: str | None
    run: Callable[[Problem], dict[str, np.ndarray]]


def main() -> None:
    """Prints and appends a line for each kernel and problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--out", type=Path, help="JSON lines, appended to")
    files.add_argument("--read", type=Path, help="such a file, as it is or .xz: prints its tables")
    parser.add_argument("--result", choices=(*RESULTS, *_OF_LSE), default="dq", help="of --read")
    parser.add_argument("--arrays", type=Path, help="an npz with q, k, v and do of layers")
    parser.add_argument("--scores", type=float, nargs="+", default=SCORES, help="largest ones")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--numerics",
        nargs="+",
        default=NUMERICS,
        metavar="PRESET[:FIELD=VALUE,…]",
        help="of this library's kernels (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        if args.read:
            print("\n".join(tables(read_records(args.read), args.result)), end="")
            return
        kernels = [*own(args.numerics), *jax_nn(), *torch_sdpa()]
        shape = (args.tokens, args.heads, args.head_size)
        problems = captured(args.arrays) if args.arrays else made_up(args.scores, shape, args.seed)
        refused: set[tuple[str, str | None]] = set()  # said once
        for problem in problems:
            for record in measure(problem, kernels):
                append_line(args.out, strict_json(record | {"environment": environment()}))
                kernel = record["kernel"], record["numerics"]
                if "errors" in record or kernel not in refused:
                    print(_line(record), flush=True)
                if "errors" not in record:
                    refused.add(kernel)
    except UserError as error:
        sys.exit(f"error: {error}")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            return [from_strict_json(json.loads(line)) for line in file]
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise UserError(f"{path} holds no records of this program: {error}") from error


def tables(records: Sequence[Mapping[str, Any]], result: str) -> Iterator[str]:
    """In Markdown, one table a kind of problem: errors of `result` by kernel and problem.

    A cell is the error of the worst head. What was refused is left out.
    """
    served = [r for r in records if result in r.get("errors", ())]
    for kind in dict.fromkeys(r["problem"].split()[0] for r in served):
        of_kind = [r for r in served if r["problem"].split()[0] == kind]
        problems = list(dict.fromkeys(r["problem"] for r in of_kind))
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for r in of_kind:
            cells = rows.setdefault((r["kernel"], r["numerics"] or ""), {})
            cells[r["problem"]] = f"{max(r['errors'][result]):.1e}"
        names = [problem.removeprefix(kind).strip() for problem in problems]
        header = [f"{kind}: {result}", "arithmetic", *names]
        yield markdown(
            header, [[*of, *(cells.get(p, "") for p in problems)] for of, cells in rows.items()]
        )


def made_up(scores: Sequence[float], shape: tuple[int, int, int], seed: int) -> Iterator[Problem]:
    """Problems of both kinds with these largest |scores|; `shape` is T, N and H."""
    for kind in ("clustered", "normal"):
        for score in scores:
            arrays = drawn(kind, score, shape, seed)
            yield _problem(f"{kind} {score:.0e}", arrays, shape[2] ** -0.5)


def captured(path: Path) -> Iterator[Problem]:
    """The layers of a file, as bfloat16.

    Raises:
      UserError: it is none, or a layer has no dO or is not causal.
    """
    for layer in array_file.load(path):
        if layer.do is None or not layer.is_causal:
            raise UserError(f"{path}: {layer.name} must be causal and have dO (`do`)")
        scale = layer.q.shape[-1] ** -0.5 if layer.scale is None else float(layer.scale)
        yield _problem(layer.name, (layer.q, layer.k, layer.v, layer.do), scale)


def _problem(name: str, arrays: Iterable[np.ndarray], scale: float) -> Problem:
    q, k, v, do = (np.asarray(x).astype(jnp.bfloat16) for x in arrays)
    return Problem(name, q, k, v, do, scale)


def measure(problem: Problem, kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """A record of each kernel."""
    name, q, k, v, do, scale = problem
    options: Any = {"scale": scale, "masking": reference.Masking(is_causal=True)}
    forward = reference.attention(q, k, v, **options)
    backward = reference.backward(q, k, v, do, **options)
    exact = {"o": forward.o, "dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    facts = {
        "problem": name,
        "shape": list(q.shape),
        "score_maximum": largest_scores(q, k, scale).tolist(),
        "rms": {r: np.sqrt((exact[r] ** 2).mean(_OF_HEAD)).tolist() for r in RESULTS},
    }
    for kernel in kernels:
        record = facts | {"kernel": kernel.name, "numerics": kernel.numerics}
        try:
            found = kernel.run(problem)
        except Exception as error:  # of any kind: theirs are not ours to know
            reason = str(error).strip().splitlines() or [""]
            yield record | {"unsupported": f"{type(error).__name__}: {reason[0]}"}
            continue
        errors = {r: _relative(found[r], exact[r]) for r in RESULTS}
        if "lse" in found:
            lse = found["lse"]
            errors["lse"] = np.abs(lse - forward.lse).max((0, 1)).tolist()
            with np.errstate(over="ignore"):  # of an lse that is far off
                p = np.exp(forward.s - lse.transpose(0, 2, 1)[..., None])
            errors["p_row_sum"] = np.abs(p.sum(-1) - 1).max((0, 2)).tolist()
        yield record | {"errors": errors}


def own(names: Sequence[str]) -> list[Kernel]:
    """This library's kernels with every arithmetic.

    Raises:
      UserError: one is none.
    """
    return [
        Kernel(module, name, functools.partial(run_own, module, parse_numerics(name)))
        for module in IMPLEMENTATIONS
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


def run_own(implementation: str, numerics: Numerics, problem: Problem) -> dict[str, np.ndarray]:
    """The results of one of this library's implementations, float64."""
    return run_compiled(_compiled_own(implementation, numerics, problem.scale), problem)


@functools.cache  # one program for all problems of a shape
def _compiled_own(implementation: str, numerics: Numerics, scale: float) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=scale,
            numerics=numerics,
            implementation=implementation,
            return_residual=True,
        )

    return both_passes(attend)


def jax_nn() -> list[Kernel]:
    """`jax.nn.dot_product_attention`, which rounds the lse that it hands out."""

    @functools.cache
    def compiled(implementation: Any, scale: float) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(
                q, k, v, scale=scale, is_causal=True, implementation=implementation
            ), None

        return both_passes(attend)

    def run(implementation: str, problem: Problem) -> dict[str, np.ndarray]:
        return run_compiled(compiled(implementation, problem.scale), problem)

    names = ("xla", "cudnn")
    return [Kernel(f"jax.nn {name}", None, functools.partial(run, name)) for name in names]


def both_passes(attend: Callable[..., Any]) -> Any:
    """(q, k, v, dO) -> the results of a function that returns O and lse, or None for that."""

    @jax.jit
    def both(q: Any, k: Any, v: Any, do: Any) -> dict[str, Any]:
        o, pullback, lse = jax.vjp(attend, q, k, v, has_aux=True)
        found = dict(zip(RESULTS, (o, *pullback(do.astype(o.dtype))), strict=True))
        return found if lse is None else found | {"lse": lse}

    return both


def run_compiled(both: Any, problem: Problem) -> dict[str, np.ndarray]:
    """What such a function returns for a problem, float64."""
    arrays = (jnp.asarray(x) for x in problem[1:5])
    return {name: np.asarray(x).astype(np.float64) for name, x in both(*arrays).items()}


def torch_sdpa() -> list[Kernel]:
    """PyTorch's kernels, on its GPU where it has one; none where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return []

    def run(backend: str, dtype: str, problem: Problem) -> dict[str, np.ndarray]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        device = "cuda" if torch.cuda.is_available() else "cpu"

        def tensor(x: np.ndarray) -> Any:  # heads first
            wide = torch.from_numpy(x.astype(np.float32))
            return wide.to(device, getattr(torch, dtype)).transpose(1, 2)

        q, k, v = (tensor(x).requires_grad_() for x in (problem.q, problem.k, problem.v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=problem.scale
            )
            o.backward(tensor(problem.do))
        found = zip(RESULTS, (o.detach(), q.grad, k.grad, v.grad), strict=True)
        return {name: x.transpose(1, 2).double().cpu().numpy() for name, x in found}

    backends = {
        "flash": ("FLASH_ATTENTION", "bfloat16"),
        "cudnn": ("CUDNN_ATTENTION", "bfloat16"),
        "math": ("MATH", "bfloat16"),
        "efficient float32": ("EFFICIENT_ATTENTION", "float32"),
    }
    return [Kernel(f"torch {n}", None, functools.partial(run, *b)) for n, b in backends.items()]


def _relative(found: np.ndarray, exact: np.ndarray) -> list[float]:
    """‖found − exact‖ / ‖exact‖ of every head; not finite where `found` is not."""
    size = np.sqrt((exact**2).sum(_OF_HEAD))
    return (np.sqrt(((found - exact) ** 2).sum(_OF_HEAD)) / np.maximum(size, 1e-300)).tolist()


def environment() -> dict[str, Any]:
    """Versions and device."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    (device, *_) = jax.devices()
    return {"versions": versions, "backend": device.platform, "device_kind": device.device_kind}


def strict_json(record: Mapping[str, Any]) -> str:
    """With NaN and infinities as the texts "nan", "inf" and "-inf"."""
    as_texts = json.loads(json.dumps(record), parse_constant=lambda name: str(float(name)))
    return json.dumps(as_texts, allow_nan=False)


def _line(record: Mapping[str, Any]) -> str:
    numerics = record["numerics"] or ""
    head = f"{record['problem']:16} {record['kernel']:12} {numerics:24}"
    if "errors" not in record:
        return f"{head} {record['unsupported'][:100]}"
    worst = {name: max(values) for name, values in record["errors"].items()}
    return head + " ".join(f"{name} {value:8.1e}" for name, value in worst.items())


if __name__ == "__main__":
    main()
