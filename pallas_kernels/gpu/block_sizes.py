"""Tile sizes of the GPU kernels. They change speed only, never what is rounded where.

The table of a device kind is filled from `python -m benchmarks.tune` on such a device.
"""

import dataclasses
import math
from typing import NamedTuple

_POWERS_OF_TWO = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile and how the compiler schedules it.

    Attributes:
      query: query rows of a tile, a power of two in 16..256.
      kv: keys of a tile, also a power of two in 16..256. Where `Numerics.kv_block` is given, the
        forward kernel takes a tile that divides it instead, because the number of keys per step
        then belongs to the arithmetic.
      warps: warps of 32 threads per program.
      stages: depth of the software pipeline that loads tiles ahead of their use.

    Raises:
      ValueError: a size that the compiler cannot lay out.
    """

    query: int
    kv: int
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name in ("query", "kv"):
            if getattr(self, name) not in _POWERS_OF_TWO:
                raise ValueError(
                    f"tile size {name} must be one of {_POWERS_OF_TWO}, got {getattr(self, name)}"
                )
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps must be 1, 2, 4, 8 or 16, got {self.warps}")
        if self.stages < 1:
            raise ValueError(f"stages must be positive, got {self.stages}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The tiles of the three GPU kernels.

    Attributes:
      forward: O and lse.
      key_gradients: dK and dV; a program owns `kv` keys and loops over the queries.
      query_gradients: dQ (and δ for `delta='dp_p'`); a program owns `query` rows and loops over
        the keys.
      interpret: run the kernels in Pallas' interpreter, on any platform (for tests).
    """

    forward: Tile
    key_gradients: Tile
    query_gradients: Tile
    interpret: bool = False


class _Row(NamedTuple):
    """The tiles up to a head size and a length, each as (query, kv, warps, stages)."""

    head_size: int
    length: float
    forward: tuple[int, int, int, int]
    key_gradients: tuple[int, int, int, int]
    query_gradients: tuple[int, int, int, int]


class _Table(NamedTuple):
    """The rows of a device kind. The first row that reaches a head size and a length serves it.

    `splits` serves calls in which some product splits an operand into several terms, which need
    room.
    """

    plain: tuple[_Row, ...]
    splits: tuple[_Row, ...]


# Tuned on one NVIDIA H200 at head sizes 64 and 128. Up to length 2048, more and smaller programs
# are faster. At greater lengths, two tiles of 64 rows that share their keys pay off.
_HOPPER = _Table(
    plain=(
        _Row(64, 2048, (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
        _Row(64, math.inf, (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3)),
        _Row(128, math.inf, (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3)),
        _Row(256, math.inf, (64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    ),
    splits=(
        _Row(64, math.inf, (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 2)),
        _Row(128, math.inf, (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 2)),
        _Row(256, math.inf, (64, 16, 4, 1), (16, 64, 4, 1), (64, 16, 4, 1)),
    ),
)

# Not tuned. These tiles compile for compute capabilities 8.0 and 8.9 almost without register
# spills, within the 99 KiB of shared memory that a program has on the smallest of these GPUs.
_OTHER = _Table(
    plain=(
        _Row(64, math.inf, (64, 64, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2)),
        _Row(128, math.inf, (64, 64, 4, 2), (64, 32, 4, 1), (64, 32, 4, 2)),
        _Row(256, math.inf, (64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
    ),
    splits=(
        _Row(64, math.inf, (64, 32, 4, 1), (32, 32, 4, 1), (64, 32, 4, 1)),
        _Row(128, math.inf, (32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
        _Row(256, math.inf, (32, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
    ),
)

# Tables by prefix of the device kind. The three GPUs share one multiprocessor design.
_TABLES = {"NVIDIA H100": _HOPPER, "NVIDIA H200": _HOPPER, "NVIDIA GH200": _HOPPER}


def is_hopper(device_kind: str | None) -> bool:
    """Whether JAX's name of a GPU belongs to an NVIDIA Hopper GPU."""
    return _table(device_kind) is _HOPPER


def _table(device_kind: str | None) -> _Table:
    kind = device_kind or ""
    return next((table for name, table in _TABLES.items() if kind.startswith(name)), _OTHER)


def default_block_sizes(
    head_size: int,
    *,
    length: int,
    splits: bool = False,
    sums_keys: bool = False,
    device_kind: str | None = None,
) -> BlockSizes:
    """The tiles that the table of a device kind has for a call.

    Args:
      head_size: H of q, k, v, up to 256.
      length: T, the number of queries.
      splits: whether some product splits an operand into several terms (a float32 operand does).
      sums_keys: whether dQ's kernel sums P k beside dQ (`delta='normalized'` or 'after_cast').
      device_kind: JAX's name of the GPU that the call is compiled for, or None if unknown.
    """
    table = _table(device_kind)
    rows = table.splits if splits else table.plain
    row = next(r for r in rows if head_size <= r.head_size and length <= r.length)
    forward, key_gradients, query_gradients = (
        Tile(query=query, kv=kv, warps=warps, stages=stages)
        for query, kv, warps, stages in (row.forward, row.key_gradients, row.query_gradients)
    )
    if sums_keys and not splits:
        query_gradients = _with_second_sum(query_gradients, head_size, length)
    return BlockSizes(forward=forward, key_gradients=key_gradients, query_gradients=query_gradients)


def _with_second_sum(tile: Tile, head_size: int, length: int) -> Tile:
    """A tile of dQ's kernel that leaves registers for a second sum of dQ's size.

    Tuned on one NVIDIA H200: 64 rows and four warps. At head size 64 a third stage pays off in long
    loops.
    """
    query, kv = min(tile.query, 64), min(tile.kv, 64)
    stages = 3 if head_size <= 64 and length > 2048 else 2
    return Tile(query=query, kv=kv, warps=4, stages=min(stages, tile.stages))
