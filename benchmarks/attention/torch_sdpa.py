"""PyTorch's scaled dot product attention as candidates."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Results, Timed
from benchmarks.attention.torch_calls import queued


@dataclasses.dataclass(frozen=True)
class TorchCandidate:
    """One backend of `torch.nn.functional.scaled_dot_product_attention` on a CUDA GPU.

    Attributes:
      name: the name in tables and records.
      backend: the name of a member of `torch.nn.attention.SDPBackend`.
      deterministic: whether gradients have the same bits on every run, if the backend can do so.
    """

    name: str
    backend: str
    deterministic: bool = False

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """See `torch_calls.queued`."""
        import torch

        def attend(q: Any, k: Any, v: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=problem.scale
            )

        return queued(attend, problem, inputs, calls, heads_first=True, mode=self._chosen)

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[None]:
        """Makes PyTorch take this backend, in this mode, within the block."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False  # filling would be timed too
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            with sdpa_kernel(getattr(SDPBackend, self.backend)):
                yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = filled


def torch_candidates() -> list[TorchCandidate]:
    """Returns PyTorch's FlashAttention-2 and cuDNN, by default and in their deterministic modes."""
    return [
        TorchCandidate("torch flash", "FLASH_ATTENTION"),
        TorchCandidate("torch cudnn", "CUDNN_ATTENTION"),
        TorchCandidate("torch flash deterministic", "FLASH_ATTENTION", deterministic=True),
        TorchCandidate("torch cudnn deterministic", "CUDNN_ATTENTION", deterministic=True),
    ]
