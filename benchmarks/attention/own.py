"""Our implementations as candidates: every preset, every row-max rule, and other step lengths."""

import functools
from collections.abc import Callable, Hashable, Iterator
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.attention.problem import Problem
from benchmarks.attention.timing import Attention, JaxCandidate
from benchmarks.shapes import Shape
from lowprec_attn.arithmetic.request import Extras, RandomStream, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.numerics import (
    EXACT,
    FLASH,
    PLAIN_POINTS,
    POINTS,
    PRESETS,
    PUBLISHED,
    ROW_MAX_RULES,
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
)
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.hopper import attention as hopper
from pallas_kernels.gpu.hopper.block_sizes import BlockSizes, default_block_sizes, is_long
from pallas_kernels.tpu import attention as tpu

# The implementation that serves every preset, by JAX's name of the platform. On any other platform
# it is `tiled`.
GENERAL: dict[str, tuple[str, ModuleType]] = {"gpu": ("gpu", gpu), "tpu": ("tpu", tpu)}

_HOPPER = ("hopper", hopper)  # serves some of the presets


def implementation(platform: str) -> tuple[str, ModuleType]:
    """Returns name and module of the general implementation that is timed on a platform."""
    return GENERAL.get(platform, ("tiled", tiled))


def presets(platform: str) -> Iterator[JaxCandidate]:
    """Yields `gpu flash`, `gpu flash dynamic_max`, ...; the rule is standard if none is named."""
    if platform == "gpu":
        for preset in (
            *("flash", "float32_output", "normalized_delta"),
            *("corrected_after_cast", "matched", "matched_float32_output"),
        ):
            yield _candidate(_HOPPER, preset, PRESETS[preset], StandardMax())
        for preset in ("normalized_delta", "corrected_after_cast"):
            numerics = PRESETS[preset].replace(statistics="lse")
            for served_by in (_HOPPER, implementation(platform)):
                yield _candidate(served_by, f"{preset} lse", numerics, StandardMax())
        yield _candidate(_HOPPER, "flash dynamic_max", FLASH, ROW_MAX_RULES["dynamic_max"]())
        yield _candidate(_HOPPER, "flash unordered", FLASH, StandardMax(), sizes=unordered)
        yield _candidate(_HOPPER, "published", PUBLISHED, StandardMax())
        yield _candidate(_HOPPER, "published dynamic_max", PUBLISHED, DynamicMax())
    for preset, numerics in PRESETS.items():
        yield _candidate(implementation(platform), preset, numerics, StandardMax())
    for preset in ("flash", "published"):
        for rule, row_max in ROW_MAX_RULES.items():
            if row_max is not StandardMax:
                name = f"{preset} {rule.removesuffix('_max')}_max"
                yield _candidate(implementation(platform), name, PRESETS[preset], row_max())


def steps(platform: str) -> Iterator[JaxCandidate]:
    """Yields presets with steps of another length, to show the cost of a step of several tiles."""
    for preset, kv_block in (("flash", 512), ("published", 64)):
        numerics = PRESETS[preset].replace(kv_block=kv_block)
        yield _candidate(
            implementation(platform), f"{preset} kv_block={kv_block}", numerics, StandardMax()
        )


def points(platform: str) -> Iterator[JaxCandidate]:
    """Yields `flash` with one more point rounded, for each point that it leaves in float32."""
    for point in POINTS:
        if point not in PLAIN_POINTS and getattr(FLASH, point) == getattr(EXACT, point):
            numerics = FLASH.replace(**{point: "bfloat16"})
            yield _candidate(implementation(platform), f"flash + {point}", numerics, StandardMax())


def _candidate(
    implementation: tuple[str, ModuleType],
    name: str,
    numerics: Numerics,
    row_max: RowMax,
    sizes: Callable[[Shape], Hashable] = lambda _: None,
) -> JaxCandidate:
    """Makes a candidate; `sizes` returns the tiles of a shape, or None for the implementation's."""
    prefix, module = implementation
    attention = functools.partial(_attention, module, numerics, row_max, sizes)
    return JaxCandidate(f"{prefix} {name}", attention)


def unordered(shape: Shape) -> BlockSizes:
    """Returns the Hopper kernels' tiles for a causal call that sums dQ in no fixed order."""
    long = is_long(shape.length, is_causal=True)
    return default_block_sizes(shape.head_size, long=long, unordered=True)


def _attention(
    module: ModuleType,
    numerics: Numerics,
    row_max: RowMax,
    sizes: Callable[[Shape], Hashable],
    problem: Problem,
) -> Attention:
    """Returns attention as a function of q, k and v.

    Raises:
      NotImplementedError: the implementation declines the problem.
    """
    shape = problem.shape
    spec = Spec(
        numerics=numerics,
        row_max=row_max,
        scale=problem.scale,
        is_causal=True,
        block_sizes=sizes(shape),
    )
    request = Request(
        spec=spec, q_shape=shape.qkv, kv_shape=shape.qkv, dtype=jnp.dtype(problem.dtype)
    )
    if (reason := module.unsupported(request)) is not None:
        raise NotImplementedError(reason)

    def attend(q: Array, k: Array, v: Array) -> Array:
        stream = RandomStream(
            jnp.zeros(2, jnp.uint32),
            jnp.arange(shape.batch, dtype=jnp.int32),
            jnp.arange(shape.heads, dtype=jnp.int32),
        )
        return module.attention(q, k, v, Extras(stream=stream), spec)[0]

    return attend
