"""FlashAttention-3 (arXiv 2407.08608), from one of the packages that contain its kernels."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Results, Timed
from benchmarks.attention.torch_calls import queued

# FlashAttention-3's own package, built from source, and `fa3-fwd` from the package index, which has
# wheels but only the forward pass.
_BOTH_PASSES, _FORWARD = "flash_attn_interface", "fa3_fwd_interface"


@dataclasses.dataclass(frozen=True)
class Flash3Candidate:
    """`flash_attn_func` of FlashAttention-3 on a Hopper GPU."""

    name: str = "torch flash3"

    def prepare(self, problem: Problem, inputs: Results, calls: int) -> Timed:
        """See `torch_calls.queued`.

        Raises:
          ImportError: no package has the passes of the problem.
        """
        function = flash_attn_func(backward=problem.backward)

        def attend(q: Any, k: Any, v: Any) -> Any:
            return function(q, k, v, softmax_scale=problem.scale, causal=True)

        return queued(attend, problem, inputs, calls)


def flash_attn_func(*, backward: bool) -> Callable[..., Any]:
    """Returns `flash_attn_func` of the first installed package that has these passes.

    Raises:
      ImportError: no package has them.
    """
    modules = (_BOTH_PASSES,) if backward else (_BOTH_PASSES, _FORWARD)
    for name in modules:
        if importlib.util.find_spec(name):
            return importlib.import_module(name).flash_attn_func
    raise ImportError(f"no module {' or '.join(modules)}")
