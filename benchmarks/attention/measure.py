"""Compiles, checks and times the candidates of one problem, and makes a record of each."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.attention.problem import Problem
from benchmarks.attention.records import Record, cores, reason
from benchmarks.attention.timing import Candidate, Results, Timed, interleave

# The largest allowed ‖x − reference‖ / ‖reference‖ of an output. Roundings cause up to 0.05
# (`published` at a length of 32768). Another scale, mask or layout causes about 1.
_SAME_FUNCTION = 0.25


def measure(problem: Problem, found: Sequence[Candidate], rounds: int) -> list[Record]:
    """Times all candidates of a problem in turn.

    Returns:
      A record for each candidate, in order: of kind `time`, or of kind `refused` with the reason.
    """
    inputs = problem.inputs()
    calls = problem.calls(jax.default_backend())
    prepared, refused = prepare(problem, found, inputs, calls)
    distances = check(prepared, refused)
    samples = interleave({name: prepared[name] for name in distances}, rounds)
    return [
        _refused(problem, c.name, refused[c.name])
        if c.name in refused
        else {
            **_timed(problem, c.name, samples[c.name]),
            "calls": calls,
            "method": prepared[c.name].method,
            "distance": distances[c.name],
            "same_bits": _repeats(prepared[c.name]),
        }
        for c in found
    ]


def threads() -> ThreadPoolExecutor:
    """Returns a pool with one thread per processor, which helps as compilers release the GIL."""
    return ThreadPoolExecutor(cores())


def prepare(
    problem: Problem, found: Sequence[Candidate], inputs: Results, calls: int
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Compiles all candidates at once; returns the compiled ones, and why the others declined."""
    prepared: dict[str, Timed] = {}
    refused: dict[str, str] = {}
    with threads() as pool:
        futures = {c.name: pool.submit(c.prepare, problem, inputs, calls) for c in found}
        for name, future in futures.items():
            try:
                prepared[name] = future.result()
            except Exception as error:  # every package declines with exceptions of its own
                refused[name] = reason(error)
    return prepared, refused


def check(prepared: dict[str, Timed], refused: dict[str, str]) -> dict[str, float]:
    """Returns the distance of each candidate's results from those of the first that runs.

    Candidates that fail, or whose results are too far off, are added to `refused` instead.
    """
    reference: Results | None = None
    distances = {}
    for name, timed in prepared.items():
        try:
            results = jax.block_until_ready(timed.results())
        except Exception as error:  # for example, a run may need more memory than there is
            refused[name] = reason(error)
            continue
        if reference is None:
            reference = results
        distance = float(_distance(results, reference))
        if distance <= _SAME_FUNCTION:
            distances[name] = distance
        else:
            refused[name] = f"computes something else: {distance:.2g} from the first one's results"
    return distances


def _repeats(timed: Timed, runs: int = 4) -> bool:
    """Whether further runs gave the same bits as the first, a test of determinism."""
    first = timed.results()
    return all(bool(_same(first, timed.results())) for _ in range(runs - 1))


@jax.jit
def _same(x: Results, y: Results) -> Array:
    return jnp.all(jnp.stack([jnp.array_equal(a, b) for a, b in zip(x, y, strict=True)]))


@jax.jit
def _distance(results: Results, reference: Results) -> Array:
    """Returns the largest ‖x − y‖ / ‖y‖ of the outputs, or NaN if any is NaN."""

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))

    pairs = zip(results, reference, strict=True)
    return jnp.max(
        jnp.stack([norm(x.astype(jnp.float32) - y.astype(jnp.float32)) / norm(y) for x, y in pairs])
    )


def _key(problem: Problem, name: str) -> Record:
    return {
        "shape": problem.name,
        "dtype": problem.dtype,
        "pass": problem.pass_name,
        "name": name,
    }


def _refused(problem: Problem, name: str, why: str) -> Record:
    return {"kind": "refused", **_key(problem, name), "reason": why}


def _timed(problem: Problem, name: str, samples: list[float]) -> Record:
    median = float(np.median(samples))
    return {
        "kind": "time",
        **_key(problem, name),
        "seconds": median,
        "seconds_25_75": [float(x) for x in np.percentile(samples, [25, 75])],
        "tflops": problem.flops / median / 1e12,
        "samples": [float(f"{x:.5g}") for x in samples],
    }
