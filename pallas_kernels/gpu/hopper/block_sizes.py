"""Tile sizes of the Hopper kernels: speed only, never what is rounded where."""

import dataclasses

from pallas_kernels.gpu.hopper.machine import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tiles and how it is scheduled.

    A program owns `warpgroups` tiles of 64 rows (queries, or keys for dK and dV) and walks over
    the other side.

    Attributes:
      warpgroups: that multiply, 1 to 3; one more loads.
      walk: keys (for dK and dV: queries) of a step of the walk, 64 or 128.
      stages: steps whose operands are in shared memory at once, at least 1.
      slots: tiles whose own operands are, 1 or 2.
      ahead: a warpgroup starts the next product before it has finished the last one.
      turns: warpgroups multiply by turns.

    Raises:
      ValueError: a size out of range.
    """

    warpgroups: int = 2
    walk: int = 128
    stages: int = 2
    slots: int = 2
    ahead: bool = True
    turns: bool = False

    def __post_init__(self) -> None:
        ranges = {"warpgroups": (1, 2, 3), "walk": (64, 128), "slots": (1, 2)}
        for name, sizes in ranges.items():
            if (value := getattr(self, name)) not in sizes:
                raise ValueError(f"tile size {name} must be one of {sizes}, got {value}")
        least = 2 if self.ahead else 1
        if self.stages < least:
            raise ValueError(f"stages must be at least {least}, got {self.stages}")

    @property
    def own(self) -> int:
        """Rows of a program's own side."""
        return ROWS * self.warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The tiles of the three Hopper kernels.

    Attributes:
      forward: O and lse; its `walk` is the keys of an online-softmax step.
      query_gradients: dQ and δ.
      key_gradients: dK and dV.
      programs: how many run at once, each on its multiprocessor.
      interpret: run the kernels in Pallas' interpreter, on any platform: for tests.
      from_memory: products take P and dS from shared memory instead of registers: for tests, and
        needed by the interpreter. No tile may then be `ahead`, nor take `turns` in the interpreter.

    Raises:
      ValueError: options that exclude each other.
    """

    forward: Tile
    query_gradients: Tile
    key_gradients: Tile
    programs: int = 132
    interpret: bool = False
    from_memory: bool = False

    def __post_init__(self) -> None:
        tiles = (self.forward, self.query_gradients, self.key_gradients)
        if self.from_memory and any(tile.ahead for tile in tiles):
            raise ValueError("from_memory=True needs tiles with ahead=False")
        if self.interpret and (not self.from_memory or any(tile.turns for tile in tiles)):
            raise ValueError("interpret=True needs from_memory=True and tiles with turns=False")


def default_block_sizes(head_size: int, *, kv_block: int | None = None) -> BlockSizes:
    """The tiles of a head size; kv_block: keys of an online-softmax step, None for the fastest."""
    if head_size <= 64:
        return BlockSizes(
            forward=Tile(walk=kv_block or 128, turns=True),
            query_gradients=Tile(walk=128),
            key_gradients=Tile(walk=64, stages=3),
        )
    return BlockSizes(
        forward=Tile(walk=kv_block or 128, turns=True),
        query_gradients=Tile(walk=64, stages=3, slots=1),
        key_gradients=Tile(walk=64, slots=1),
    )
