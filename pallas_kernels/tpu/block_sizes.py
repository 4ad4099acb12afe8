"""Tile sizes of the TPU kernels and their VMEM. They change speed only, never what is rounded."""

import dataclasses
from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

from lowprec_attn.numerics import Numerics

LANES = 128

# Bytes of VMEM that a kernel may take: the default limit of the compiler on v4 to v5p.
VMEM_LIMIT = 16 * 2**20

# How many blocks of query rows, and how many of keys, each kernel of `BlockSizes` reads and writes.
# forward: q, O and the O for δ; k, v. Each O counts twice, since it may be float32 where q is not.
# key_gradients: q, dO; k, v, dK, dV. query_gradients: q, dO, dQ; k, v.
_WINDOWS = {"forward": (5, 2), "key_gradients": (2, 4), "query_gradients": (3, 2)}

# How many of these blocks are operands of products. Float32 operands are also kept as two or three
# bfloat16 terms.
_OPERANDS = {"forward": (1, 2), "key_gradients": (2, 2), "query_gradients": (2, 2)}

# How many scratch arrays hold sums for the rows or keys that a kernel owns, and row statistics.
# forward: Ō, Ō′ and what a long step adds to them; m, l, m and l of the step, its two largest
# scores. key_gradients: dK, dV and a part of each. query_gradients: dQ, a part of it, Σ P k; lse,
# δ, Σ P (dP − δ), Σ P.
_SUMS = {"forward": (4, 6), "key_gradients": (4, 0), "query_gradients": (3, 4)}

# The most float32 arrays [query, kv] that a schedule keeps at once; tests measure it.
_SCORE_ARRAYS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile.

    Attributes:
      query: query rows of a tile, a multiple of 128.
      kv: keys of a tile, also a multiple of 128. In the forward kernel a tile is one online-softmax
        step, unless `Numerics.kv_block` sets the size of a step. A tile then holds as many whole
        steps as fit, or the largest part that divides a step. The same holds in the backward
        kernels where `tile_grads` rounds.

    Raises:
      ValueError: a size that is not a positive multiple of 128, the lanes of a register.
    """

    query: int
    kv: int

    def __post_init__(self) -> None:
        for name in ("query", "kv"):
            size = getattr(self, name)
            if size < LANES or size % LANES:
                raise ValueError(f"tile size {name} must be a multiple of {LANES}, got {size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The tiles of the three TPU kernels.

    Attributes:
      forward: O and lse.
      key_gradients: dK and dV; a program owns `kv` keys and loops over the queries.
      query_gradients: dQ (and δ for `delta='dp_p'`); a program owns `query` rows and loops over
        the keys.
      interpret: parameters of Pallas' TPU interpreter, to run the kernels in it on any platform
        (for tests); None to compile them.
    """

    forward: Tile
    key_gradients: Tile
    query_gradients: Tile
    interpret: pltpu.InterpretParams | None = None


class Steps(NamedTuple):
    """How many keys and rows the arithmetic takes at a time, whatever the tiles.

    Attributes:
      keys: keys of an online-softmax step, at most S. `tile_grads` rounds products over this many
        keys before they are added to dQ.
      rows: `tile_grads` rounds products over this many queries before they are added to dK and dV.
    """

    keys: int
    rows: int

    @classmethod
    def of(cls, numerics: Numerics, forward: Tile, rows: int, keys: int) -> "Steps":
        """The steps over T rows and S keys; `forward` is the forward tile, cut to the call."""
        by_choice = rows if numerics.kv_block == "all" else numerics.kv_block
        return cls(numerics.step_of(keys, forward.kv), by_choice or forward.kv)


def block_sizes_of(
    given: BlockSizes | None,
    numerics: Numerics,
    rows: int,
    keys: int,
    head_size: int,
    itemsize: int,
    *,
    has_mask: bool = False,
) -> BlockSizes:
    """The tiles of a call: the given or default tiles, cut to its size and fitted to its steps.

    Args:
      given: the caller's choice, or None for the default.
      numerics: determines the steps.
      rows, keys: T and S.
      head_size: H.
      itemsize: bytes of an element of q, k, v.
      has_mask: whether tiles of a dense mask are read.
    """
    sizes = given or _default_block_sizes(keys, head_size, itemsize)
    forward, by_key, by_query = (
        Tile(query=min(tile.query, _in_lanes(rows)), kv=min(tile.kv, _in_lanes(keys)))
        for tile in (sizes.forward, sizes.key_gradients, sizes.query_gradients)
    )
    step = Steps.of(numerics, forward, rows, keys)
    whole = None
    if given is None and forward.kv < step.keys:
        # A step in one tile forms S once, but for few rows at a time. A step in several tiles forms
        # S twice.
        whole = dataclasses.replace(forward, kv=_in_lanes(step.keys))
        whole = _fitting("forward", whole, head_size, itemsize, has_mask=has_mask)
    forward = whole or dataclasses.replace(forward, kv=_in_line(forward.kv, step.keys, keys))
    if not numerics.tile_grads.is_identity:
        by_query = dataclasses.replace(by_query, kv=_in_line(by_query.kv, step.keys, keys))
        by_key = dataclasses.replace(by_key, query=_in_line(by_key.query, step.rows, rows))
    return BlockSizes(
        forward=forward, key_gradients=by_key, query_gradients=by_query, interpret=sizes.interpret
    )


def _in_line(size: int, step: int, total: int) -> int:
    """The largest tile size up to `size` that is a multiple of `step`, or else that divides it."""
    if step >= total:  # one step takes all tiles
        return size
    if step <= size:
        return size // step * step
    return max(part for part in range(LANES, size + 1, LANES) if step % part == 0)


def _default_block_sizes(keys: int, head_size: int, itemsize: int) -> BlockSizes:
    """Tiles of low cost in the compiler's schedules for v5e and v6e (`benchmarks.tpu.cost`).

    Longer steps have less overhead. With few keys, however, more of a long step lies above the
    diagonal.
    """
    if head_size > 128:
        tile = Tile(query=256, kv=512)
    else:
        tile = Tile(query=512, kv=1024 if keys >= 8192 and itemsize == 2 else 512)
    return BlockSizes(forward=tile, key_gradients=tile, query_gradients=tile)


def _in_lanes(size: int) -> int:
    """The size rounded up to a multiple of `LANES`."""
    return -(-size // LANES) * LANES


def too_large(
    sizes: BlockSizes, head_size: int, itemsize: int, *, has_mask: bool = False
) -> str | None:
    """Names the first tile that does not fit in VMEM, and one that does; None if all tiles fit.

    Args:
      sizes: as `block_sizes_of` gives them.
      head_size: H.
      itemsize: bytes of an element of q, k, v.
      has_mask: whether tiles of a dense mask are read.
    """
    for kernel in _WINDOWS:
        tile = getattr(sizes, kernel)
        need = vmem_bytes(kernel, tile, head_size, itemsize, has_mask=has_mask)
        if need > VMEM_LIMIT:
            other = _fitting(kernel, tile, head_size, itemsize, has_mask=has_mask)
            advice = f"{other} fits" if other else "no tile with as many keys does"
            return (
                f"{kernel}={tile}, which needs up to {need >> 20} MiB of VMEM "
                f"of {VMEM_LIMIT >> 20} ({advice})"
            )
    return None


def _fitting(
    kernel: str, tile: Tile, head_size: int, itemsize: int, *, has_mask: bool
) -> Tile | None:
    """The largest tile that fits, with the same keys and at most the same rows; or None."""
    for query in range(tile.query, 0, -LANES):
        smaller = dataclasses.replace(tile, query=query)
        if vmem_bytes(kernel, smaller, head_size, itemsize, has_mask=has_mask) <= VMEM_LIMIT:
            return smaller
    return None


def vmem_bytes(
    kernel: str, tile: Tile, head_size: int, itemsize: int, *, has_mask: bool = False
) -> int:
    """The most bytes of VMEM that a kernel with this tile needs, whatever the numerics.

    Args:
      kernel: a field of `BlockSizes`.
      tile: its tile.
      head_size: H.
      itemsize: bytes of an element of q, k, v.
      has_mask: whether tiles of a dense mask are read.
    """
    columns = _in_lanes(head_size)

    def numbers(blocks: tuple[int, int]) -> int:
        rows, keys = blocks
        return (rows * tile.query + keys * tile.kv) * columns

    # Blocks of rows and of keys are double-buffered, because the next one is fetched meanwhile.
    windows = 2 * itemsize * numbers(_WINDOWS[kernel])
    terms = 4 * numbers(_OPERANDS[kernel]) if itemsize == 4 else 0
    owned = tile.kv if kernel == "key_gradients" else tile.query
    sums, statistics = _SUMS[kernel]
    scratch = sums * owned * columns + statistics * tile.query * LANES
    # Scores and the arrays formed from them may spill. So may a mask, which is read as bytes and
    # widened.
    scores = (4 * _SCORE_ARRAYS + (2 + 4) * has_mask) * tile.query * tile.kv
    return windows + terms + 4 * scratch + scores
