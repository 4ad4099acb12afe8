"""Chooses which candidates are timed on a platform, and which of them over the sweep of lengths."""

import fnmatch
from collections.abc import Iterable

from benchmarks.attention import own, peers
from benchmarks.attention.flash3 import Flash3Candidate
from benchmarks.attention.timing import Candidate
from benchmarks.attention.torch_sdpa import torch_candidates
from benchmarks.shapes import SWEEP

# The default baselines. Ratios are taken to the fastest candidate that matches.
_BASELINES = {"gpu": "jax pallas *"}

# The sweep shows how time grows with T, for which one candidate per kernel is enough.
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
    """Returns a pattern of names, of which the fastest candidate is the platform's baseline."""
    return _BASELINES.get(platform, "jax.nn xla")


def candidates(platform: str, *, points: bool = False) -> list[Candidate]:
    """Returns everything that can be timed on a platform, installed or not, the reference first.

    Args:
      platform: `cpu`, `gpu` or `tpu`, as `jax.default_backend()` returns it.
      points: whether to add `flash` with each further point rounded.
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
    """Returns the candidates whose names match one of the `fnmatch` patterns."""
    return [c for c in found if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def for_shape(found: Iterable[Candidate], shape_name: str) -> list[Candidate]:
    """Returns all candidates for a named shape, and fewer for a shape of the sweep."""
    return select(found, _SWEEP if shape_name in SWEEP else ("*",))
