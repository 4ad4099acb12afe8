"""Which candidates are timed on which platform, and which of them over the sweep of lengths."""

import fnmatch
from collections.abc import Iterable

from benchmarks.attention import own, peers
from benchmarks.attention.flash3 import Flash3Candidate
from benchmarks.attention.timing import Candidate
from benchmarks.attention.torch_sdpa import torch_candidates
from benchmarks.shapes import SWEEP

# What ratios are taken to unless another is chosen: the fastest that matches.
_BASELINES = {"gpu": "jax pallas *"}

# The sweep asks how time grows with T, and takes one candidate per kernel for that.
_SWEEP = (
    "jax.nn *",
    "jax pallas default",
    "jax pallas 64x128",
    "torch *",
    "tokamax mosaic",
    "* exact",
    "* flash",
    "* published",
    "* flash dynamic_max",
)


def baseline(platform: str) -> str:
    """A pattern of names; the fastest candidate that matches is the baseline of a platform."""
    return _BASELINES.get(platform, "jax.nn xla")


def candidates(platform: str, *, points: bool = False) -> list[Candidate]:
    """Everything that can be timed on a platform, installed or not; the reference comes first.

    Args:
      platform: `cpu`, `gpu`, `tpu`, as `jax.default_backend()` says.
      points: also `flash` with each further point rounded.
    """
    found: list[Candidate] = [peers.jax_nn("xla")]
    if platform == "gpu":
        found += [peers.jax_nn("cudnn"), peers.jax_nn("cudnn", deterministic=True)]
        found += [*peers.jax_pallas(), *torch_candidates(), Flash3Candidate()]
        found += [peers.tokamax("triton"), peers.tokamax("mosaic")]
    found += [*own.presets(platform), *own.steps(platform)]
    if points:
        found += own.points(platform)
    return found


def select(found: Iterable[Candidate], patterns: Iterable[str]) -> list[Candidate]:
    """Those whose names match one of the patterns of `fnmatch`."""
    return [c for c in found if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def for_shape(found: Iterable[Candidate], shape_name: str) -> list[Candidate]:
    """All on a named shape, fewer on a shape of the sweep."""
    return select(found, _SWEEP if shape_name in SWEEP else ("*",))
