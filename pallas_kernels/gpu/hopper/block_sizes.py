"""Tile sizes of the Hopper kernels: speed only, never what is rounded where."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import DynamicMax, Numerics

ROWS = 64  # of a warpgroup's matrix product (WGMMA)
STEPS = (64, 128)
_FEATURES = 128  # of a head, up to which a warpgroup has registers for two sums of 64 rows


def is_wide(head_size: int) -> bool:
    """Whether registers and shared memory of a program have no room for some of what others have.

    No warpgroup has two sums then, and O takes no shared memory where it is not needed there.
    """
    return head_size > _FEATURES


def rounds_products(numerics: Numerics) -> bool:
    """Whether the products of a step of several tiles are rounded, as by `published`."""
    return not numerics.tile_grads.is_identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """One kernel's tiles and how deep it loads ahead.

    A program owns `warpgroups` tiles of 64 rows (queries, or keys for dK and dV), or one if they
    share it (`cooperative`), and steps over the other side.

    Attributes:
      warpgroups: consumers, which multiply, 1 to 3; a producer beside them loads.
      step: keys (for dK and dV: queries) of a mainloop step, 64 or 128.
      stages: steps whose operands are in shared memory at once, at least 1.
      owned_stages: tiles whose own operands are, 1 or 2.
      ping_pong: consumer warpgroups start their products one after the other.
      held: of dQ's kernel and that of dK and dV: a turn has the products that end a step and those
        that begin the next, instead of the latter alone.
      overlap_steps: of dQ's kernel and that of dK and dV: the products that end a step start
        in the same turn as those that begin the next, and before them. Without
        `delta='normalized'`.
      longest_first: tiles are dealt out by their length, of as many heads at a time as the L2 cache
        has room for, instead of in pairs. Without causality they are equally long, and it says
        nothing.
      early_wait: of the forward kernel: P̄V is waited for after few of a step's exponentials,
        instead of after all of its softmax.
      overlap_tiles: of the forward kernel: the last P̄V of a tile is multiplied during the first
        softmax of the program's next, instead of before it. O takes shared memory of its own then.
        In steps that all warpgroups have alike, with two stages of q, without `published`'s or O′'s
        products.
      halved: of the forward kernel in long steps (`rounds_products`): S of a part is multiplied in
        two halves, the second while the first is looked at.
      tests_ties: of the forward kernel, `row_max=DynamicMax(tolerance=0)`: repeated maxima are
        counted only in steps of which a test says that there may be some, instead of in every
        step. Where nothing is counted, and in other kernels, it says nothing.
      v_stages: of dQ's kernel: stages of v, where they are fewer than those of k. v is needed
        for dP alone, early in a step.
      cooperative: of the backward kernels: two warpgroups share 64 rows, and each has one of two
        sums: dV and dK, or P k and dQ (`delta='normalized'`). They take no ping-pong, for one has
        to wait for the other anyway.

    Raises:
      ValueError: a size out of range; `held` without `ping_pong` or in one stage; `overlap_steps`
        with `held`, in one stage or `cooperative`; `overlap_tiles` in one stage of q or in steps
        that are no multiple of own rows; `halved` in steps of 64; `cooperative` among other than
        two warpgroups, in steps of other than 64 rows, or with `ping_pong`.
    """

    warpgroups: int = 2
    step: int = 128
    stages: int = 2
    owned_stages: int = 2
    ping_pong: bool = False
    held: bool = False
    overlap_steps: bool = False
    longest_first: bool = False
    early_wait: bool = False
    overlap_tiles: bool = False
    halved: bool = False
    tests_ties: bool = True
    v_stages: int | None = None
    cooperative: bool = False

    def __post_init__(self) -> None:
        ranges = {"warpgroups": (1, 2, 3), "step": STEPS, "owned_stages": (1, 2)}
        for name, sizes in ranges.items():
            if (value := getattr(self, name)) not in sizes:
                raise ValueError(f"tile size {name} must be one of {sizes}, got {value}")
        if self.held and not self.ping_pong:
            raise ValueError("held=True needs ping_pong=True: there is no turn to hold")
        if self.held and self.stages < 2:
            # Who holds the turn would wait for a step that takes the place of one that another,
            # who waits for the turn, has not done with.
            raise ValueError(f"held=True takes two stages, got {self}")
        if self.overlap_steps and (self.held or self.stages < 2 or self.cooperative):
            raise ValueError(
                f"overlap_steps=True takes two stages, neither held nor cooperative, got {self}"
            )
        if self.overlap_tiles and (self.owned_stages < 2 or self.step % self.owned):
            raise ValueError(
                f"overlap_tiles=True takes owned_stages=2, steps of own rows, got {self}"
            )
        if self.halved and self.step != max(STEPS):  # halves of P̄ have 64 columns
            raise ValueError(f"halved=True takes step={max(STEPS)}, got step={self.step}")
        for name in ("stages", "v_stages"):
            if (stages := getattr(self, name)) is not None and stages < 1:
                raise ValueError(f"{name} must be at least 1, got {stages}")
        if self.cooperative and (self.warpgroups != 2 or self.step != ROWS or self.ping_pong):
            raise ValueError(
                f"cooperative=True takes two warpgroups, step={ROWS}, no ping_pong, got {self}"
            )

    @property
    def owned(self) -> int:
        """Rows of a program's own side."""
        return ROWS if self.cooperative else ROWS * self.warpgroups

    @property
    def stages_of_v(self) -> int:
        """Stages of v, of the kernels whose programs own queries."""
        return self.v_stages or self.stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The tiles of the three Hopper kernels.

    Attributes:
      forward: O and lse; its `step` is the keys of an online-softmax step.
      query_gradients: dQ and δ.
      key_gradients: dK and dV.
      unordered: dQ is summed by the kernel of dK and dV, 5 products for all three instead of 7, in
        an order that differs from run to run, as the last bits of dQ then do; those of dK and dV do
        not. `query_gradients` has no kernel then. Not for `delta='normalized'`, which is known only
        when rows have been walked.
      programs: how many run at once, each on its multiprocessor.
      from_memory: products take P and dS from shared memory instead of registers, one after the
        other and without ping-pong: for tests. The bits are the same.
      interpret: run the kernels in Pallas' interpreter, on any platform, `from_memory`: for tests.

    Raises:
      ValueError: `held`, `overlap_steps` or `cooperative` forward; `early_wait`, `overlap_tiles` or
        `halved` backward; `v_stages` in others than dQ's; an unordered dQ of other than two
        warpgroups, of one stage, with `overlap_steps` or `cooperative`.
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
        if self.forward.overlap_steps:
            raise ValueError("forward: S is always ahead of P̄V, got overlap_steps=True")
        if self.forward.held:
            raise ValueError("forward: turns are held in the backward kernels alone, got held=True")
        for name in ("query_gradients", "key_gradients"):
            for field in ("early_wait", "overlap_tiles", "halved"):
                if getattr(getattr(self, name), field):
                    raise ValueError(f"{name}: {field}=True is of the forward kernel alone")
        if self.forward.cooperative:
            raise ValueError("forward: it has one sum, got cooperative=True")
        for name in ("forward", "key_gradients"):
            if stages := getattr(self, name).v_stages:
                raise ValueError(f"{name}: v_stages are of query_gradients alone, got {stages}")
        tile = self.key_gradients
        if self.unordered and (tile.cooperative or tile.overlap_steps):
            raise ValueError(
                f"unordered dQ takes neither cooperative nor overlap_steps, got {tile}"
            )
        if self.unordered and (tile.warpgroups != 2 or tile.stages < 2):
            raise ValueError(f"unordered dQ takes two warpgroups, two stages or more, got {tile}")


# Query rows from which on a causal call is long. Measured at head size 64: the tiles of long calls
# take 6 % longer at 1,024 rows, 1 % at 2,048, and 7 % less at 4,096, 14 % at 8,192. At head size
# 128 they take 8 % less at 8,192.
_LONG = 4096


def is_long(rows: int, *, is_causal: bool) -> bool:
    """Whether a call takes the tiles of long ones."""
    return is_causal and rows >= _LONG


def default_block_sizes(
    head_size: int,
    *,
    kv_block: int | None = None,
    saves_float32: bool = False,
    keeps_auxiliary: bool = False,
    sums_keys: bool = False,
    long: bool = False,
    unordered: bool = False,
    rounds_products: bool = False,
    counts_ties: bool = False,
) -> BlockSizes:
    """The tiles of a head size, tuned on one NVIDIA H200.

    Args:
      head_size: 64, 128 or 256.
      kv_block: keys of an online-softmax step, None for the fastest.
      saves_float32: whether the forward kernel stores a float32 O as well, which takes memory.
      keeps_auxiliary: whether it sums up Ō′ beside Ō (`saved_output='auxiliary'`), which takes
        registers.
      sums_keys: whether dQ's kernel adds up P k beside dQ (`delta='normalized'`), which takes
        registers.
      long: whether `is_long`. Steps of 64 keys and Ō′ were not measured so, and change nothing.
      unordered: of `BlockSizes`.
      rounds_products: whether a step of `kv_block` keys is walked over in parts, for its products
        are rounded, as by `published`.
      counts_ties: whether the forward kernel looks for repeated maxima, as `DynamicMax` does. At
        head size 64 short tiles then overlap, for it has more to hide.

    Raises:
      ValueError: at head size 256, steps of 128 keys, Ō′ or an unordered dQ; rounded products at
        another head size than 64.
    """
    if rounds_products:
        if head_size != ROWS:
            raise ValueError(f"rounds_products takes head size {ROWS}, got {head_size}")
        return BlockSizes(
            forward=Tile(longest_first=True, halved=True),
            query_gradients=Tile(step=64, stages=3, ping_pong=True, held=True, longest_first=True),
            key_gradients=Tile(step=64, stages=3, ping_pong=True, held=True, longest_first=True),
        )
    if is_wide(head_size):
        asked = (kv_block == 128, keeps_auxiliary, unordered)
        names = ("kv_block=128", "keeps_auxiliary", "unordered")
        if any(asked):
            raise ValueError(f"{names[asked.index(True)]} does not fit head size {head_size}")
        return BlockSizes(
            forward=Tile(step=64, owned_stages=1, ping_pong=long, longest_first=long),
            query_gradients=Tile(step=64, owned_stages=1, longest_first=long, cooperative=True)
            if sums_keys
            else Tile(step=64, owned_stages=1, v_stages=1, ping_pong=True, longest_first=long),
            key_gradients=Tile(step=64, owned_stages=1, cooperative=True, longest_first=True),
        )
    step = kv_block or (64 if keeps_auxiliary and head_size > 64 else 128)
    long = long and step == 128 and not keeps_auxiliary
    if head_size <= 64:
        return BlockSizes(
            forward=Tile(
                warpgroups=3 if long else 2,
                step=step,
                ping_pong=True,
                longest_first=long,
                early_wait=step == 128 and not keeps_auxiliary,
                overlap_tiles=counts_ties and step == 128 and not long and not keeps_auxiliary,
            ),
            query_gradients=Tile(step=64, stages=3, longest_first=long)
            if sums_keys
            else Tile(ping_pong=True, held=True, longest_first=long),
            key_gradients=Tile(ping_pong=True, held=True, longest_first=long or not unordered),
            unordered=unordered,
        )
    return BlockSizes(
        forward=Tile(
            step=step,
            owned_stages=1 if saves_float32 else 2,
            ping_pong=long,
            longest_first=long,
            early_wait=long,
        ),
        query_gradients=Tile(
            step=64,
            stages=3,
            v_stages=2 if saves_float32 else None,
            owned_stages=1,
            ping_pong=True,
            overlap_steps=not sums_keys,
            longest_first=long,
        ),
        key_gradients=Tile(
            step=64,
            stages=2 if unordered else 3,
            owned_stages=1,
            ping_pong=True,
            held=unordered,
            overlap_steps=not unordered,
            longest_first=long or not unordered,
        ),
        unordered=unordered,
    )


def block_sizes(shape: Sequence[int], spec: Spec) -> BlockSizes:
    """The tiles of a call: those that it names, or those of the table.

    shape: of q [B, T, N, H], or of the packed array [B, T, 3, N, H].
    """
    if spec.block_sizes is None:
        kv_block = spec.numerics.kv_block
        assert kv_block != "all"  # `unsupported` declines it
        return default_block_sizes(
            shape[-1],
            kv_block=kv_block,
            saves_float32=spec.numerics.saved_dtype == jnp.float32,
            keeps_auxiliary=spec.numerics.saved_dtype == jnp.bfloat16,
            sums_keys=spec.numerics.delta == "normalized",
            long=is_long(shape[1], is_causal=spec.is_causal),
            rounds_products=rounds_products(spec.numerics),
            counts_ties=isinstance(spec.row_max, DynamicMax),
        )
    assert isinstance(spec.block_sizes, BlockSizes)  # `unsupported` declines any other
    return spec.block_sizes
