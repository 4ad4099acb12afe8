"""PyTorch's scaled dot product attention, in the same process and on the same inputs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Results, Timed


@dataclasses.dataclass(frozen=True)
class TorchCandidate:
    """One backend of `torch.nn.functional.scaled_dot_product_attention` on a CUDA GPU.

    Attributes:
      name: what tables and records call it.
      backend: a name of `torch.nn.attention.SDPBackend`.
      deterministic: gradients with the same bits on every run, where the backend has such a mode.
    """

    name: str
    backend: str
    deterministic: bool = False

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """Queues all calls of a sample between two CUDA events.

        Raises:
          ImportError, RuntimeError: no PyTorch with CUDA here, or the backend declines.
        """
        import torch

        jax.block_until_ready(inputs)  # PyTorch reads the same memory on a stream of its own
        q, k, v, do = (torch.from_dlpack(x).transpose(1, 2) for x in inputs)
        for x in (q, k, v):
            x.requires_grad_(problem.backward)

        def call() -> tuple[Any, ...]:
            o = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=problem.scale
            )
            return (o, *torch.autograd.grad(o, (q, k, v), do)) if problem.backward else (o,)

        def results() -> Results:
            with self._chosen():
                outputs = [x.detach().transpose(1, 2).contiguous() for x in call()]
            torch.cuda.synchronize()
            return tuple(jnp.from_dlpack(x) for x in outputs)

        def seconds() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            with self._chosen():
                start.record()
                for _ in range(calls):
                    call()
                end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / calls

        return Timed(results, seconds, "all calls queued, CUDA events")

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[None]:
        """Within it PyTorch takes this backend, in this mode."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would be timed too
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with sdpa_kernel(getattr(SDPBackend, self.backend)):
                yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = filled


def torch_candidates() -> list[TorchCandidate]:
    """FlashAttention-2 and cuDNN as PyTorch brings them, and in their deterministic modes."""
    return [
        TorchCandidate("torch flash", "FLASH_ATTENTION"),
        TorchCandidate("torch cudnn", "CUDNN_ATTENTION"),
        TorchCandidate("torch flash deterministic", "FLASH_ATTENTION", deterministic=True),
        TorchCandidate("torch cudnn deterministic", "CUDNN_ATTENTION", deterministic=True),
    ]
