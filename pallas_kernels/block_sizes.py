"""Tile sizes of the kernels: speed only, never what is rounded where."""

import dataclasses

_POWERS_OF_TWO = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tile and how the compiler schedules it.

    Attributes:
      query: query rows of a tile, a power of two in 16..256.
      kv: keys of a tile, likewise. The forward kernel takes `Numerics.kv_block` instead, where
        that is given, because there the number of keys per step is arithmetic.
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
      key_gradients: dK and dV; a program owns `kv` keys and walks over the queries.
      query_gradients: dQ (and δ for `delta='dp_p'`); a program owns `query` rows and walks over
        the keys.
      interpret: run the kernels in Pallas' interpreter, on any platform: for tests.
    """

    forward: Tile
    key_gradients: Tile
    query_gradients: Tile
    interpret: bool = False


def default_block_sizes(head_size: int, *, splits: bool = False) -> BlockSizes:
    """Tiles tuned on one NVIDIA H200; other GPUs get the same.

    Args:
      head_size: H of q, k, v.
      splits: whether some product splits an operand into several terms (a float32 operand does),
        which needs room for them.
    """
    if splits:
        return _split_block_sizes(head_size)
    if head_size <= 64:
        tile = Tile(query=64, kv=64, warps=4, stages=3)
        return BlockSizes(forward=tile, key_gradients=tile, query_gradients=tile)
    if head_size <= 128:
        return BlockSizes(
            forward=Tile(query=128, kv=64, warps=8, stages=3),
            key_gradients=Tile(query=64, kv=64, warps=4, stages=2),
            query_gradients=Tile(query=128, kv=32, warps=8, stages=3),
        )
    return BlockSizes(
        forward=Tile(query=64, kv=32, warps=8, stages=1),
        key_gradients=Tile(query=32, kv=32, warps=8, stages=1),
        query_gradients=Tile(query=32, kv=32, warps=8, stages=1),
    )


def _split_block_sizes(head_size: int) -> BlockSizes:
    if head_size <= 128:
        tile = Tile(query=64, kv=64, warps=4, stages=1)
        by_key = Tile(query=64, kv=64, warps=4, stages=1 if head_size <= 64 else 2)
        return BlockSizes(forward=tile, key_gradients=by_key, query_gradients=tile)
    tile = Tile(query=64, kv=16, warps=4, stages=1)
    return BlockSizes(
        forward=tile,
        key_gradients=Tile(query=16, kv=64, warps=4, stages=1),
        query_gradients=tile,
    )
