"""Tile sizes of the Hopper kernels: speed only, never what is rounded where."""

import dataclasses

import jax.numpy as jnp

from lowprec_attn.arithmetic.request import Spec

ROWS = 64  # of a warpgroup's matrix product (WGMMA)
WALKS = (64, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tiles and how deep it loads ahead.

    A program owns `warpgroups` tiles of 64 rows (queries, or keys for dK and dV) and walks over
    the other side.

    Attributes:
      warpgroups: that multiply, 1 to 3; one more loads.
      walk: keys (for dK and dV: queries) of a step of the walk, 64 or 128.
      stages: steps whose operands are in shared memory at once, at least 1.
      slots: tiles whose own operands are, 1 or 2.
      turns: warpgroups start their products by turns.
      held: of dQ's kernel and that of dK and dV: a turn has the products that end a step and those
        that begin the next, instead of the latter alone.
      longest_first: tiles are dealt out by their length, of as many heads at a time as the L2 cache
        has room for, instead of in pairs.
      fresh: of the forward kernel: S adds to nothing, instead of to zeros that are written first.
      soon: of the forward kernel: P̄V is waited for after the exponentials of so many of a step's
        keys, a power of two from 8 on; 0: after the maxima; None: after all of the softmax.
      apart: of the forward kernel: steps that take a mask have a loop of their own, instead of a
        branch in every step.

    Raises:
      ValueError: a size out of range, or turns that are held where there are none.
    """

    warpgroups: int = 2
    walk: int = 128
    stages: int = 2
    slots: int = 2
    turns: bool = False
    held: bool = False
    longest_first: bool = False
    fresh: bool = False
    soon: int | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        ranges = {"warpgroups": (1, 2, 3), "walk": WALKS, "slots": (1, 2)}
        for name, sizes in ranges.items():
            if (value := getattr(self, name)) not in sizes:
                raise ValueError(f"tile size {name} must be one of {sizes}, got {value}")
        if self.held and not self.turns:
            raise ValueError("held=True needs turns=True: there is no turn to hold")
        soon = (None, 0, *(n for n in (8, 16, 32, 64, 128) if n <= self.walk))
        if self.soon not in soon:
            raise ValueError(f"soon must be one of {soon} of walk={self.walk}, got {self.soon}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")

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
      unordered: dQ is summed by the kernel of dK and dV, 5 products for all three instead of 7, in
        an order that differs from run to run, as the last bits of dQ then do; those of dK and dV do
        not. `query_gradients` has no kernel then. Not for `delta='normalized'`, which is known only
        when rows have been walked.
      programs: how many run at once, each on its multiprocessor.
      from_memory: products take P and dS from shared memory instead of registers, one after the
        other and without turns: for tests. The bits are the same.
      interpret: run the kernels in Pallas' interpreter, on any platform, `from_memory`: for tests.

    Raises:
      ValueError: turns that are held forward; what is of the forward kernel alone in the backward
        kernels; an unordered dQ of other than two warpgroups, or of one stage.
    """

    forward: Tile
    query_gradients: Tile
    key_gradients: Tile
    unordered: bool = False
    programs: int = 132
    from_memory: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.interpret:
            object.__setattr__(self, "from_memory", True)
        if self.forward.held:
            raise ValueError("forward: turns are held in the backward kernels alone, got held=True")
        for name in ("query_gradients", "key_gradients"):
            tile = getattr(self, name)
            if tile.fresh or tile.soon is not None or tile.apart:
                raise ValueError(f"{name}: fresh, soon and apart are forward alone, got {tile}")
        tile = self.key_gradients
        if self.unordered and (tile.warpgroups != 2 or tile.stages < 2):
            raise ValueError(f"unordered dQ takes two warpgroups, two stages or more, got {tile}")


def default_block_sizes(
    head_size: int,
    *,
    kv_block: int | None = None,
    saves_float32: bool = False,
    keeps_auxiliary: bool = False,
    sums_keys: bool = False,
    unordered: bool = False,
) -> BlockSizes:
    """The tiles of a head size, tuned on one NVIDIA H200.

    Args:
      head_size: 64 or 128.
      kv_block: keys of an online-softmax step, None for the fastest.
      saves_float32: whether the forward kernel stores a float32 O as well, which takes memory.
      keeps_auxiliary: whether it sums up Ō′ beside Ō (`saved_output='auxiliary'`), which takes
        registers.
      sums_keys: whether dQ's kernel adds up P k beside dQ (`delta='normalized'`), which takes
        registers.
      unordered: of `BlockSizes`.
    """
    if head_size <= 64:
        return BlockSizes(
            forward=Tile(walk=kv_block or 128, turns=True),
            query_gradients=Tile(walk=64, stages=3) if sums_keys else Tile(turns=True, held=True),
            key_gradients=Tile(turns=True, held=True),
            unordered=unordered,
        )
    walk = kv_block or (64 if keeps_auxiliary else 128)
    return BlockSizes(
        forward=Tile(walk=walk, slots=1 if saves_float32 else 2),
        query_gradients=Tile(
            walk=64, stages=2 if saves_float32 else 3, slots=1, turns=not sums_keys
        ),
        key_gradients=Tile(walk=64, stages=2 if unordered else 3, slots=1, turns=True, held=True),
        unordered=unordered,
    )


def block_sizes(head_size: int, spec: Spec) -> BlockSizes:
    """The tiles of a call: those that it names, or those of the table."""
    if spec.block_sizes is None:
        kv_block = spec.numerics.kv_block
        assert kv_block != "all"  # `unsupported` declines it
        return default_block_sizes(
            head_size,
            kv_block=kv_block,
            saves_float32=spec.numerics.saved_dtype == jnp.float32,
            keeps_auxiliary=spec.numerics.saved_dtype == jnp.bfloat16,
            sums_keys=spec.numerics.delta == "normalized",
        )
    assert isinstance(spec.block_sizes, BlockSizes)  # `unsupported` declines any other
    return spec.block_sizes
