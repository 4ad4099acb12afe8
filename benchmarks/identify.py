"""Finds the preset that a library's attention computes, by the distance of its results from each.

    python -m benchmarks.identify --out FILE.jsonl
    python -m benchmarks.identify --out FILE.jsonl --scores 1e3 1e4 --arithmetics splash torch_flash
    python -m benchmarks.identify --read FILE.jsonl

The problems are those of `benchmarks.fidelity`. The kernels are its foreign ones, and JAX's own
Pallas kernels: the one for GPUs, compiled if there is a GPU, and those for TPUs, in the
interpreter. Presets are computed by `tiled`, or by `dense` if P̄ is normalised before rounding. The
default of 128 tokens is one softmax step of each kernel, so that neither the size nor the order of
steps plays a part.

A row of O, dQ, dK or dV is hard if two presets differ in it by more than 2^-7 of its norm. A line
of the file is one kernel on one problem. It holds the RMS distance of each result from each
preset's over the hard rows, and the RMS of these rows in float64. Presets that agree to the last
bit count as one. `--read` prints the nearest preset, and its distance divided by that of the next.
At most a half counts as identified. A ratio near 1 says that the problem cannot tell the two apart.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from benchmarks import fidelity, program
from benchmarks.attention.records import reason
from benchmarks.fidelity import Kernel, Record
from lowprec_attn.check.calls import jax_array, jax_gradients
from lowprec_attn.check.libraries import splash_attention
from lowprec_attn.check.measure import RESULTS, Found, both_passes, results
from lowprec_attn.check.problems import Problem

ARITHMETICS = (
    *("exact", "splash", "flash_attention_3", "torch_flash", "kohaku_fa", "tokamax"),
    *("jax_pallas", "torch_flash:delta_value=bfloat16", "jax_nn", "standard"),
    *("splash:probs=float32", "normalized_delta:exponent=shift_first"),
)
SCORES = (1e1, 1e2, 1e3, 1e4, 1e5)
IDENTIFIED = 0.5  # the largest ratio of the nearest preset's distance to the next one's
_HARD = 2.0**-7  # the part of a row's norm by which presets differ: bfloat16's last place


@program.told
def main() -> None:
    """Prints and appends a line for each foreign kernel and problem."""
    args = fidelity.arguments(
        __doc__,
        tokens=128,
        scores=SCORES,
        arithmetics={"nargs": "+", "default": ARITHMETICS, "metavar": "PRESET[:…]"},
    )
    if args.read:
        print("\n".join(table(fidelity.read_records(args.read))), end="")
        return
    presets = [preset(text) for text in args.arithmetics]
    kernels = foreign()
    problems = fidelity.made_up(args)
    measured = (r for p in problems for r in measure(p, kernels, presets))
    for record in fidelity.write(args.out, measured):
        print(_line(record), flush=True)


def preset(text: str) -> Kernel:
    """Makes a kernel that computes an arithmetic by `tiled` or `dense`.

    Raises:
      UserError: the text is not an arithmetic.
    """
    numerics = fidelity.parse_numerics(text)
    module = "dense" if numerics.normalize_probs else "tiled"
    return Kernel(text, text, fidelity.run_own(module, numerics))


def foreign() -> list[Kernel]:
    """Returns the kernels that are compared with the presets."""
    return [*fidelity.jax_nn(), *fidelity.torch_sdpa(), *jax_pallas()]


def measure(
    problem: Problem, kernels: Sequence[Kernel], presets: Sequence[Kernel]
) -> Iterator[Record]:
    """Yields a record for each kernel on a problem."""
    computed = {kernel.name: kernel.run(problem) for kernel in presets}
    exact = results(problem, *both_passes(problem))
    hard = {name: hard_rows([x[name] for x in computed.values()]) for name in RESULTS}
    for kernel in kernels:
        record: Record = {
            "problem": problem.name,
            "shape": list(problem.q.shape),
            "kernel": kernel.name,
        }
        try:
            found = kernel.run(problem)
        except Exception as error:  # a library may raise anything
            yield record | {"unsupported": reason(error)}
            continue
        yield record | {
            "results": {
                name: {
                    "hard_rows": int(rows.sum()),
                    "rms": _rms(exact[name][rows]),
                    "distance": {
                        label: _rms(found[name][rows] - x)
                        for label, x in distinct(
                            {label: r[name][rows] for label, r in computed.items()}
                        ).items()
                    },
                }
                for name, rows in hard.items()
            }
        }


def hard_rows(results: Sequence[np.ndarray]) -> np.ndarray:
    """Returns whether two of the results [B, T, N, H] differ clearly in a row [B, T, N]."""
    stack = np.stack(results)
    spread = np.linalg.norm(stack.max(0) - stack.min(0), axis=-1)
    return spread > _HARD * np.linalg.norm(stack, axis=-1).max(0)


def distinct(computed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the results by preset; presets with equal results share a label, `a = b`."""
    labels: dict[bytes, list[str]] = {}
    for label, x in computed.items():
        labels.setdefault(x.tobytes(), []).append(label)
    return {" = ".join(names): computed[names[0]] for names in labels.values()}


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean())) if x.size else 0.0


def nearest(distances: Mapping[str, float]) -> tuple[str, float]:
    """Returns the nearest label and its distance divided by the next one's (NaN without a next)."""
    first, *others = sorted(distances, key=lambda label: distances[label])
    if not others:
        return first, float("nan")
    return first, distances[first] / distances[others[0]]


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yields a Markdown table per kind of problem: nearest preset by kernel, result and problem."""
    cells = [
        ((record["kernel"], name), record["problem"], _cell(found))
        for record in records
        for name, found in record.get("results", {}).items()
    ]
    return fidelity.by_problem(cells, lambda kind: (kind, "result"))


def _cell(found: Mapping[str, Any]) -> str:
    if not found["hard_rows"]:
        return "–"
    label, ratio = nearest(found["distance"])
    mark = "**" if ratio <= IDENTIFIED else ""
    return f"{mark}{label}{mark} {ratio:.2g}"


def _line(record: Mapping[str, Any]) -> str:
    head = f"{record['problem']:16} {record['kernel']:24}"
    if "results" not in record:
        return f"{head} {record['unsupported'][:100]}"
    return head + "; ".join(f"{name} {_cell(x)}" for name, x in record["results"].items())


def jax_pallas() -> list[Kernel]:
    """Returns JAX's own kernels: for GPUs (Triton), for TPUs, and splash attention."""
    on_gpu = jax.default_backend() in ("cuda", "gpu")
    return [
        Kernel(f"jax pallas gpu{'' if on_gpu else ' (interpreted)'}", None, _run(_gpu)),
        Kernel("jax pallas tpu (interpreted)", None, _run(_tpu)),
        Kernel("jax splash (interpreted)", None, _run(_splash)),
    ]


def _run(attend: Callable[..., Any]) -> Callable[[Problem], Found]:
    @functools.cache
    def compiled(scale: float) -> Any:
        both = functools.partial(jax_gradients, lambda **x: (attend(**x, scale=scale), None))
        # By default XLA leaves out roundings within chains of bfloat16 operations.
        return jax.jit(both, compiler_options={"xla_allow_excess_precision": False})

    def run(problem: Problem) -> Found:
        names = ("q", "k", "v", "do")
        x = {n: jax_array(a, None) for n, a in zip(names, problem.arrays, strict=True)}
        with pltpu.force_tpu_interpret_mode() if attend is _tpu else contextlib.nullcontext():
            found = compiled(problem.scale)(x)
        return {name: np.asarray(found[name]).astype(np.float64) for name in RESULTS}

    return run


def _gpu(q: Any, k: Any, v: Any, scale: float) -> Any:
    from jax.experimental.pallas.ops.gpu import attention as pallas

    sizes = pallas.BlockSizes.get_default()
    sizes = dataclasses.replace(sizes, block_q=128, block_k=128)
    interpret = jax.default_backend() not in ("cuda", "gpu")
    return pallas.mha(
        q, k, v, None, sm_scale=scale, causal=True, block_sizes=sizes, interpret=interpret
    )


def _tpu(q: Any, k: Any, v: Any, scale: float) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    return pallas.flash_attention(*heads_first, causal=True, sm_scale=scale).swapaxes(1, 2)


def _splash(q: Any, k: Any, v: Any, scale: float) -> Any:
    return splash_attention(q, k, v, is_causal=True, scale=scale)


if __name__ == "__main__":
    sys.exit(main())
