"""How far attention lies from float64, by format, length, tile and implementation.

The measurement of Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803): the same random
q, k, v go through attention in each arithmetic, and every result is compared with attention in
float64. They vary the format, the length, the area of a tile and its sides, swapped or equal. Here
dQ, dK and dV are compared as well, and the sign of the errors is measured (arXiv 2510.04212).

A deviation holds the errors of the arithmetic alone: float64 attention takes the inputs as they
are rounded to the format.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import attention
from lowprec_attn.attention import reference, tiled
from lowprec_attn.diagnostics.signed_errors import signed_error
from lowprec_attn.errors import RunError
from lowprec_attn.numerics import FLASH, PUBLISHED_EAGER, STANDARD, Numerics

_MOST_SEEDS = 10_000
FORMATS = ("bfloat16", "float16", "float32")
TENSORS = ("O", "dQ", "dK", "dV")

Tile = tuple[int, int]  # rows of queries, keys
_Arrays = tuple[np.ndarray, ...]


class Arm(NamedTuple):
    """One way to compute attention.

    Attributes:
      title: for figures.
      numerics: in bfloat16; None for a function of `jax.nn`.
      implementation: of `attention`, or of `jax.nn.dot_product_attention`.
      platform: that it needs, None for any.
      in_tiles: whether a tile's sides are ours to choose.
    """

    title: str
    numerics: Numerics | None
    implementation: str
    platform: str | None = None
    in_tiles: bool = False


ARMS: dict[str, Arm] = {
    "dense": Arm("unfused, autocast (dense, standard)", STANDARD, "dense"),
    "xla": Arm("jax.nn, XLA", None, "xla"),
    "flash": Arm("float32 inside (tiled, flash)", FLASH, "tiled", in_tiles=True),
    "eager": Arm(
        "every operation rounded (tiled, published_eager)", PUBLISHED_EAGER, "tiled", in_tiles=True
    ),
    "gpu": Arm("Pallas kernel (gpu, flash)", FLASH, "gpu", "gpu"),
    "hopper": Arm("Pallas kernel (hopper, flash)", FLASH, "hopper", "gpu"),
    "cudnn": Arm("jax.nn, cuDNN", None, "cudnn", "gpu"),
}


class Grid(NamedTuple):
    """What is measured.

    Attributes:
      formats: of inputs and of every rounding.
      lengths: T, of queries and keys.
      tiles: to compare at `length`; both sides of a tile.
      length: at which formats and tiles are compared.
      tile: with which formats and lengths are compared.
      crossed: every tile in every format at every length; figures show those of `length`, `tile`.
      seeds: how many draws of the inputs.
      heads, head_size: N and H; the batch is 1.
    """

    formats: tuple[str, ...] = FORMATS
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    tiles: tuple[Tile, ...] = (
        *((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
        *((16, 256), (256, 16), (32, 128), (128, 32)),
    )
    length: int = 512
    tile: Tile = (64, 64)
    crossed: bool = False
    seeds: int = 3
    heads: int = 2
    head_size: int = 64


class Case(NamedTuple):
    """One program: an arm of `ARMS`, a format, a length T, and a tile where the arm has one."""

    arm: str
    format: str
    length: int
    tile: Tile | None


def cases(grid: Grid) -> list[Case]:
    """Every format at every length; every tile at one place, or if the grid is crossed at each."""
    backend, low = jax.default_backend(), low_format(grid.formats)
    places = list(itertools.product(grid.formats, dict.fromkeys((*grid.lengths, grid.length))))
    of_tiles = places if grid.crossed else [(low, grid.length)]
    found = []
    for name, arm in ARMS.items():
        if arm.platform not in (None, backend):
            continue
        tile = grid.tile if arm.in_tiles else None
        found += [Case(name, f, t, tile) for f, t in places]
        if arm.in_tiles:
            found += [Case(name, f, t, tile) for f, t in of_tiles for tile in grid.tiles]
    return list(dict.fromkeys(found))


def low_format(formats: Sequence[str]) -> str:
    """The first that is not float32, if there is one: of what is shown in one format alone."""
    return next((f for f in formats if f != "float32"), formats[0])


def measure(grid: Grid, wanted: Sequence[Case]) -> Iterator[list[dict[str, Any]] | str]:
    """For each case its records, or why there are none, as one line.

    A record holds the case, the seed, the tensor, the root mean square of its exact values (`size`)
    and `max`, `mean`, `rms` and `coherence` of the deviation: those of `signed_error`, the largest
    of the heads, their mean, their root mean square, their mean.
    """
    for case in wanted:
        function = _compiled(case, grid)
        records: list[dict[str, Any]] = []
        try:
            for seed in range(grid.seeds):
                inputs, exact = _exact(grid, case.format, case.length, seed)
                found = function(*inputs)
                records += [
                    {**case._asdict(), "seed": seed, "tensor": name, **_statistics(x, golden)}
                    for name, x, golden in zip(TENSORS, found, exact, strict=True)
                ]
        except (ValueError, NotImplementedError, RuntimeError) as error:
            # JAX says in all of these ways that a device or a library lacks a format.
            ours = ARMS[case.arm].numerics is not None
            if ours and not isinstance(error, attention.UnsupportedError):
                raise
            yield f"{case.arm} in {case.format} is left out: {str(error).splitlines()[0]}"
            continue
        yield records


def check(grid: Grid) -> None:
    """Refuses what cannot be measured.

    Raises:
      RunError: an unknown format, a size below 1, or more than this machine's memory holds.
    """
    unknown = [f for f in grid.formats if f not in FORMATS]
    if unknown:
        raise RunError(f"unknown format {unknown[0]!r}; formats are {', '.join(FORMATS)}")
    sizes = {
        "--lengths": grid.lengths,
        "--length": (grid.length,),
        "--tiles": tuple(itertools.chain(*grid.tiles, grid.tile)),
        "--seeds": (grid.seeds,),
        "--heads": (grid.heads,),
        "--head-size": (grid.head_size,),
    }
    for option, values in sizes.items():
        if min(values) < 1:
            raise RunError(f"{option} must be at least 1, got {min(values)}")
    if grid.seeds > _MOST_SEEDS:
        raise RunError(f"--seeds must be at most {_MOST_SEEDS}, got {grid.seeds}")
    longest = max(*grid.lengths, grid.length)
    from lowprec_attn.training.memory import host_bytes  # which --help does without

    # S and P of the exact result, and seven arrays of the inputs' shape, all in float64.
    needed = 8 * grid.heads * (2 * longest**2 + 7 * longest * grid.head_size)
    if needed > host_bytes():
        raise RunError(
            f"exact attention of length {longest}, {grid.heads} heads of {grid.head_size} takes at "
            f"least {needed / 1e9:,.0f} GB, and this machine has {host_bytes() / 1e9:,.0f} GB; "
            "give smaller --lengths, --length, --heads or --head-size"
        )


def _compiled(case: Case, grid: Grid) -> Callable[..., _Arrays]:
    """(q, k, v, dO) -> (O, dQ, dK, dV)."""
    arm = ARMS[case.arm]
    options: dict[str, Any] = {"implementation": arm.implementation, "is_causal": True}
    function: Callable[..., Any] = jax.nn.dot_product_attention
    if arm.numerics is not None:
        function = attention.dot_product_attention
        numerics = arm.numerics.with_format(case.format)
        if not numerics.normalize_probs:
            numerics = numerics.replace(kv_block=min((case.tile or grid.tile)[1], case.length))
        options["numerics"] = numerics
        if case.tile is not None:
            query, keys = (min(side, case.length) for side in case.tile)
            options["block_sizes"] = tiled.BlockSizes(query=query, kv_bwd=keys)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *x: function(*x, **options), q, k, v)
        return out, *pullback(do.astype(out.dtype))

    return both


# One length of one format at a time is looked at, by several arms and tiles.
@functools.lru_cache(maxsize=64)
def _exact(grid: Grid, fmt: str, length: int, seed: int) -> tuple[_Arrays, _Arrays]:
    """Normal q, k, v and dO [1, T, N, H] in a format, and float64 O, dQ, dK, dV of them."""
    rng = np.random.default_rng(seed)
    shape = (1, length, grid.heads, grid.head_size)
    drawn = (rng.standard_normal(shape) for _ in range(4))
    q, k, v, do = (x.astype(jnp.dtype(fmt)) for x in drawn)
    masking = reference.Masking(is_causal=True)
    forward = reference.attention(q, k, v, masking=masking)
    backward = reference.backward(q, k, v, do, masking=masking)
    return (q, k, v, do), (forward.o, backward.dq, backward.dk, backward.dv)


def _statistics(found: np.ndarray, exact: np.ndarray) -> dict[str, float | None]:
    # The difference is taken in float64: float32 results err by less than its own last digits.
    difference = (np.asarray(found).astype(np.float64) - exact).astype(np.float32)
    heads = signed_error(jnp.asarray(difference), jnp.zeros(exact.shape, jnp.float32))
    by_head = {name: np.asarray(x).astype(np.float64) for name, x in heads.items()}
    statistics = {
        "size": math.sqrt(np.mean(exact**2)),
        "max": by_head["max"].max(),
        "mean": by_head["mean"].mean(),
        "rms": math.sqrt(np.mean(by_head["rms"] ** 2)),
        "coherence": by_head["coherence"].mean(),
    }
    # JSON has no NaN. Six digits are more than any two seeds share.
    return {name: float(f"{x:.6g}") if math.isfinite(x) else None for name, x in statistics.items()}
