"""Takes time samples of every candidate in turn, so that ratios belong to one run."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from benchmarks.attention.problem import Problem

Attention = Callable[[Array, Array, Array], Array]
Results = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Timed:
    """A candidate that is compiled and ready to be timed.

    Attributes:
      results: runs it once and returns O, and dQ, dK and dV if there is a backward pass, as JAX
        arrays [B, T, N, H].
      seconds: takes one sample and returns the seconds per call.
      method: how a sample is taken, in words.
    """

    results: Callable[[], Results]
    seconds: Callable[[], float]
    method: str


class Candidate(Protocol):
    """An implementation of attention, with a name."""

    @property
    def name(self) -> str:
        """The name in tables and records."""

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """Compiles it for q, k, v, dO and samples of `calls` calls; raises if it declines."""


@dataclasses.dataclass(frozen=True)
class JaxCandidate:
    """Attention as a JAX function.

    Attributes:
      name: the name in tables and records.
      attention: returns the function for a problem, or raises if it declines the problem.
      options: compiler options, as `jax.stages.Lowered.compile` takes them.
    """

    name: str
    attention: Callable[[Problem], Attention]
    options: Mapping[str, str | bool] | None = None

    def function(self, problem: Problem) -> Callable[..., Results]:
        """Returns a function (q, k, v, dO) -> (O,) or (O, dQ, dK, dV)."""
        attend = self.attention(problem)

        def forward(q: Array, k: Array, v: Array, do: Array) -> Results:
            return (attend(q, k, v),)

        def both(q: Array, k: Array, v: Array, do: Array) -> Results:
            o, pullback = jax.vjp(attend, q, k, v)
            return o, *pullback(do)

        return both if problem.backward else forward

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """See `in_one_program`."""
        return in_one_program(self.function(problem), inputs, calls, self.options)


def in_one_program(
    function: Callable[..., Results],
    inputs: Results,
    calls: int,
    options: Mapping[str, str | bool] | None = None,
) -> Timed:
    """Compiles a program that makes all calls of a sample; see `repeat` and `JaxCandidate`."""
    looped = function if calls == 1 else repeat(function, calls)
    program = (
        jax.jit(looped).lower(*inputs).compile(compiler_options=dict(options) if options else None)
    )

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        return (time.perf_counter() - start) / calls

    return Timed(lambda: program(*inputs), seconds, "all calls in one program, host clock")


def repeat(function: Callable[..., Results], calls: int) -> Callable[..., Results]:
    """Returns a program that calls the function `calls` times, one call after the other.

    This excludes the host's work for a call, which would hide kernels of less than about 100 µs. A
    barrier makes the inputs of a call depend on the results of the call before, and costs nothing
    itself. The compiler can then neither hoist a call out of the loop nor merge or overlap two.
    """

    def program(*inputs: Array) -> Results:
        outputs = jax.eval_shape(function, *inputs)
        unused = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)

        def again(_: Array, carry: Any) -> Any:
            arguments, _ = lax.optimization_barrier(carry)
            return arguments, function(*arguments)

        return lax.fori_loop(0, calls, again, (inputs, unused))[1]

    return program


def interleave(timed: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Takes `rounds` samples of each candidate, in seconds per call.

    Every round takes one sample of each candidate, in a new random order. Drifts of the clock, due
    to heat or other programs, then affect all candidates alike, and sample i of one may be divided
    by sample i of another.
    """
    samples: dict[str, list[float]] = {name: [] for name in timed}
    names, order = list(timed), random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            samples[name].append(timed[name].seconds())
    return samples
