"""Peers: other libraries' attention in JAX, with the arithmetic of `flash`."""

import functools
from typing import Any

import jax

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Attention, JaxCandidate

# Tile sizes of JAX's own Pallas-Triton kernel besides its default: the fastest on one H200 of about
# twenty that were tried. They are the query and key blocks of the forward pass, of the scan for dK
# and dV, and of the scan for dQ, then the pipeline stages of the forward pass. All have 4 warps.
_PALLAS_SIZES = {
    "64x64": ((64, 64, 64, 128, 128, 64), 3),
    "64x128": ((64, 128, 64, 128, 128, 64), 2),
    "128x64": ((128, 64, 64, 64, 64, 32), 2),
}


# With this option, XLA asks cuDNN for a backward pass that sums in a fixed order. Without it, XLA
# takes cuDNN's faster one.
_DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def jax_nn(implementation: str, *, deterministic: bool = False) -> JaxCandidate:
    """Returns `jax.nn.dot_product_attention` by XLA or cuDNN as a candidate.

    If `deterministic`, every run gives the same bits.
    """

    def attention(problem: Problem) -> Attention:
        return functools.partial(
            jax.nn.dot_product_attention,
            scale=problem.scale,
            is_causal=True,
            implementation=implementation,
        )

    name = f"jax.nn {implementation}"
    if deterministic:
        return JaxCandidate(f"{name} deterministic", attention, _DETERMINISTIC)
    return JaxCandidate(name, attention)


def jax_pallas() -> list[JaxCandidate]:
    """Returns candidates of `jax.experimental.pallas.ops.gpu.attention`, default sizes first."""
    names = ("default", *_PALLAS_SIZES)
    return [
        JaxCandidate(f"jax pallas {name}", functools.partial(_jax_pallas, name)) for name in names
    ]


def _jax_pallas(name: str, problem: Problem) -> Attention:
    # Imported here because the module is deprecated and may be gone.
    from jax.experimental.pallas.ops.gpu import attention as kernel

    options: dict[str, Any] = {}
    if name != "default":
        sizes, stages = _PALLAS_SIZES[name]
        options = {
            "block_sizes": kernel.BlockSizes(*sizes),
            "num_warps": 4,
            "num_stages": stages,
        }
    return lambda q, k, v: kernel.mha(
        q,
        k,
        v,
        None,
        sm_scale=problem.scale,
        causal=True,
        backward_pass_impl="triton",
        **options,
    )


def tokamax(implementation: str) -> JaxCandidate:
    """Returns `tokamax.dot_product_attention` as a candidate; the package is optional."""

    def attention(problem: Problem) -> Attention:
        import tokamax as package

        return functools.partial(
            package.dot_product_attention,
            scale=problem.scale,
            is_causal=True,
            implementation=implementation,
        )

    return JaxCandidate(f"tokamax {implementation}", attention)
