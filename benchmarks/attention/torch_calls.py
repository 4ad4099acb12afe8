"""Times calls of PyTorch, in JAX's process and on JAX's inputs."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Results, Timed


def queued(
    attend: Callable[[Any, Any, Any], Any],
    problem: Problem,
    inputs: Results,
    calls: int,
    *,
    heads_first: bool = False,
    mode: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Timed:
    """Prepares PyTorch calls; all calls of a sample are queued between two CUDA events.

    Args:
      attend: takes and returns PyTorch tensors, (q, k, v) -> O; `torch.autograd` computes the
        backward pass.
      problem: says whether there is a backward pass.
      inputs: q, k, v and dO [B, T, N, H].
      calls: the number of calls in a sample.
      heads_first: whether `attend` takes and returns [B, N, T, H].
      mode: makes a context, with settings of PyTorch, within which calls are made.

    Raises:
      ImportError, RuntimeError: there is no PyTorch with CUDA here, or `attend` declines.
    """
    import torch

    def swapped(x: Any) -> Any:
        return x.transpose(1, 2) if heads_first else x

    jax.block_until_ready(inputs)  # PyTorch reads the same memory on its own stream
    q, k, v, do = (swapped(torch.from_dlpack(x)) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_(problem.backward)

    def call() -> tuple[Any, ...]:
        o = attend(q, k, v)
        return (o, *torch.autograd.grad(o, (q, k, v), do)) if problem.backward else (o,)

    def results() -> Results:
        with mode():
            outputs = [swapped(x.detach()).contiguous() for x in call()]
        torch.cuda.synchronize()
        return tuple(jnp.from_dlpack(x) for x in outputs)

    def seconds() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with mode():
            start.record()
            for _ in range(calls):
                call()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    return Timed(results, seconds, "all calls queued, CUDA events")
