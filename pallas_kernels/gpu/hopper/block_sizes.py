"""Tile sizes of the Hopper kernels. They change speed alone, never what is rounded where."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import DynamicMax, Numerics
from pallas_kernels.gpu.hopper.tuning import tuned

ROWS = 64  # rows of a warpgroup's matrix product (WGMMA)
STEPS = (64, 128)
_FEATURES = 128  # the largest head size at which a warpgroup has registers for two sums of 64 rows

# The other head size that values may have, by that of queries and keys: 192 and 128 are DeepSeek's.
OTHER_VALUES = {192: 128, 128: 64}

BackwardKernel = Literal["query_gradients", "key_gradients"]


def is_wide(head_size: int) -> bool:
    """Whether a program lacks registers and shared memory for what smaller head sizes keep there.

    If so, no warpgroup has two sums, and O takes no shared memory where it is not needed there.
    """
    return head_size > _FEATURES


def rounds_products(numerics: Numerics) -> bool:
    """Whether the products of a step of several tiles are rounded, as in `published`."""
    return not numerics.tile_grads.is_identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardTile:
    """The tile of the forward kernel, and how far the kernel loads ahead.

    A program owns `warpgroups` blocks of 64 queries and steps over the keys.

    Attributes:
      warpgroups: consumer warpgroups, 1 to 3. A producer warpgroup loads for them.
      step: keys of a mainloop step, 64 or 128.
      stages: steps whose k and v are in shared memory at once, at least 1.
      owned_stages: tiles whose q is in shared memory at once, 1 or 2.
      ping_pong: whether consumers take turns to start their products.
      longest_first: whether tiles are dealt out the longest first, of as many heads at a time as
        the L2 cache has room for, instead of in pairs. It has no effect without causality, where
        all tiles are equally long.
      early_wait: whether the wait for P̄V comes after a few exponentials of a step, instead of after
        its whole softmax.
      overlap_tiles: whether the last P̄V of a tile is multiplied during the first softmax of the
        program's next tile, instead of before it. O then takes shared memory of its own.
      halved: whether, in long steps (`rounds_products`), S of a part is multiplied in two halves,
        the second half while the first is used.
      tests_ties: whether, with `row_max=DynamicMax(tolerance=0)`, repeated maxima are counted only
        in steps where a test says that there may be some, instead of in every step. It has no
        effect where nothing is counted.

    Raises:
      ValueError: see `check`.
    """

    warpgroups: int = 2
    step: int = 128
    stages: int = 2
    owned_stages: int = 2
    ping_pong: bool = False
    longest_first: bool = False
    early_wait: bool = False
    overlap_tiles: bool = False
    halved: bool = False
    tests_ties: bool = True

    def __post_init__(self) -> None:
        self.check()

    @property
    def owned(self) -> int:
        """Query rows of a program's tile."""
        return ROWS * self.warpgroups

    def check(self, numerics: Numerics | None = None) -> None:
        """Refuses a tile that the kernel cannot have, at all or for a call's numerics if given.

        Raises:
          ValueError: a size is out of range; `overlap_tiles` with one stage of q, with a step that
            is not a multiple of the tile's rows, with rounded products or with O′; `halved` with
            steps of 64, or without long steps; long steps with a step that is not a multiple of the
            tile's rows; a step other than `kv_block`, without long steps.
        """
        _check_sizes(self)
        alike = self.step % self.owned == 0
        if self.overlap_tiles and (self.owned_stages < 2 or not alike):
            raise ValueError(
                "overlap_tiles=True needs owned_stages=2 and a step that is a multiple of the "
                f"tile's {self.owned} rows, got {self}"
            )
        if self.halved and self.step != max(STEPS):  # halves of P̄ have 64 columns
            raise ValueError(f"halved=True needs step={max(STEPS)}, got step={self.step}")
        if numerics is None:
            return
        n, in_long_steps = numerics, rounds_products(numerics)
        if in_long_steps and not alike:
            raise ValueError(
                f"kv_block={n.kv_block} needs a step that is a multiple of the tile's "
                f"{self.owned} rows, got {self}"
            )
        if not in_long_steps and n.kv_block not in (None, self.step):
            raise ValueError(f"kv_block={n.kv_block} takes step={n.kv_block}, got step={self.step}")
        if self.halved and not in_long_steps:
            raise ValueError(f"halved=True needs tile_grads=bfloat16, got {n.tile_grads}")
        if self.overlap_tiles and (in_long_steps or keeps_auxiliary(n)):
            what = "tile_grads" if in_long_steps else "saved_output"
            raise ValueError(f"overlap_tiles=True does not support {what}={getattr(n, what)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardTile:
    """The tile of the dQ kernel or of the dK and dV kernel, and how far the kernel loads ahead.

    A program owns `warpgroups` blocks of 64 rows (dQ: queries; dK and dV: keys), or one block that
    warpgroups share (`cooperative`), and steps over the other side.

    Attributes:
      warpgroups: consumer warpgroups, 1 to 3. A producer warpgroup loads for them.
      step: keys (dK and dV: queries) of a mainloop step, 64 or 128.
      stages: steps whose operands are in shared memory at once, at least 1.
      v_stages: the stages of v in the dQ kernel, if v has fewer than k. v is needed only for dP,
        early in a step.
      owned_stages: tiles whose own operands are in shared memory at once, 1 or 2.
      ping_pong: whether consumers take turns to start their products.
      held: whether a turn of the ping-pong has the products that end a step and those that begin
        the next, instead of only those that begin a step.
      overlap_steps: whether the products that end a step start in the same turn as those that begin
        the next, and before them.
      longest_first: see `ForwardTile`.
      cooperative: whether two warpgroups share 64 rows, and each has one of two sums: dV and dK, or
        P k and dQ (`delta` 'normalized' or 'after_cast'). They take no ping-pong, because one has
        to wait for the other anyway.

    Raises:
      ValueError: see `check`.
    """

    warpgroups: int = 2
    step: int = 128
    stages: int = 2
    v_stages: int | None = None
    owned_stages: int = 2
    ping_pong: bool = False
    held: bool = False
    overlap_steps: bool = False
    longest_first: bool = False
    cooperative: bool = False

    def __post_init__(self) -> None:
        self.check()

    @property
    def owned(self) -> int:
        """Rows of a program's own side."""
        return ROWS if self.cooperative else ROWS * self.warpgroups

    @property
    def stages_of_v(self) -> int:
        """The stages of v in the dQ kernel."""
        return self.v_stages or self.stages

    def check(
        self,
        kernel: BackwardKernel | None = None,
        numerics: Numerics | None = None,
        *,
        unordered: bool = False,
        head_size: int | None = None,
    ) -> None:
        """Refuses a tile that no kernel can have, or that the given kernel, or call, cannot have.

        Args:
          kernel: the kernel that the tile is for.
          numerics, head_size: of a call.
          unordered: whether the dK and dV kernel also sums dQ.

        Raises:
          ValueError: a size is out of range; `held` without `ping_pong` or with one stage;
            `overlap_steps` with `held`, one stage, `cooperative`, a dQ kernel that sums rows, or
            rounded products; `cooperative` with other than two warpgroups, steps of other than 64
            rows, `ping_pong`, a dQ kernel that does not sum rows, or a dK and dV kernel with
            rounded products; `v_stages` for the dK and dV kernel; `unordered` with other than two
            warpgroups, one stage, `overlap_steps`, `cooperative`, or steps of more blocks of dQ
            than there are warpgroups.
        """
        _check_sizes(self)
        if self.v_stages is not None and self.v_stages < 1:
            raise ValueError(f"v_stages must be at least 1, got {self.v_stages}")
        if self.held and not self.ping_pong:
            raise ValueError("held=True needs ping_pong=True: without turns there is none to hold")
        if self.held and self.stages < 2:
            # The holder of the turn would wait for a step whose stage another consumer still uses,
            # while that consumer waits for the turn.
            raise ValueError(f"held=True needs two stages or more, got {self}")
        if self.overlap_steps and (self.held or self.stages < 2 or self.cooperative):
            raise ValueError(
                "overlap_steps=True needs two stages or more, held=False and cooperative=False, "
                f"got {self}"
            )
        if self.cooperative and (self.warpgroups != 2 or self.step != ROWS or self.ping_pong):
            raise ValueError(
                f"cooperative=True needs two warpgroups, step={ROWS} and ping_pong=False, "
                f"got {self}"
            )
        if kernel == "query_gradients" and numerics is not None:
            self._check_query_gradients(numerics)
        if kernel == "key_gradients":
            self._check_key_gradients(numerics, unordered, head_size)

    def _check_query_gradients(self, n: Numerics) -> None:
        sums_rows = n.delta in SUMS_ROWS
        if self.overlap_steps and sums_rows:
            raise ValueError(
                f"overlap_steps=True does not support delta={n.delta!r}, whose dQ kernel also sums "
                f"rows, got {self}"
            )
        if self.overlap_steps and rounds_products(n):
            raise ValueError(
                f"tile_grads={n.tile_grads} needs overlap_steps=False, since each long step has a "
                f"sum of its own, got {self}"
            )
        if self.cooperative and not sums_rows:
            raise ValueError(
                f"cooperative=True needs delta={' or '.join(SUMS_ROWS)}, got delta={n.delta}"
            )

    def _check_key_gradients(
        self, n: Numerics | None, unordered: bool, head_size: int | None
    ) -> None:
        if self.v_stages:
            raise ValueError(
                "key_gradients must have v_stages=None, because only query_gradients uses it, "
                f"got {self.v_stages}"
            )
        if (self.overlap_steps or self.cooperative) and n is not None and rounds_products(n):
            raise ValueError(
                f"tile_grads={n.tile_grads} needs overlap_steps=False and cooperative=False, since "
                f"each long step has a sum of its own, got {self}"
            )
        if not unordered:
            return
        if self.cooperative or self.overlap_steps:
            raise ValueError(
                f"unordered=True needs cooperative=False and overlap_steps=False, got {self}"
            )
        if self.warpgroups != 2 or self.stages < 2:
            raise ValueError(
                f"unordered=True needs two warpgroups, and two stages or more, got {self}"
            )
        if head_size is not None and self.step * head_size > self.owned * ROWS:
            # A warpgroup has registers for one block of dQ, 64 by 64.
            raise ValueError(
                f"unordered=True needs step={self.owned * ROWS // head_size} or less at head size "
                f"{head_size}, got step={self.step}"
            )


Tile = ForwardTile | BackwardTile


def _check_sizes(tile: Tile) -> None:
    ranges = {"warpgroups": (1, 2, 3), "step": STEPS, "owned_stages": (1, 2)}
    for name, sizes in ranges.items():
        if (value := getattr(tile, name)) not in sizes:
            raise ValueError(f"tile size {name} must be one of {sizes}, got {value}")
    if tile.stages < 1:
        raise ValueError(f"stages must be at least 1, got {tile.stages}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The tiles of the three Hopper kernels.

    Attributes:
      forward: for O and lse. Its `step` is the number of keys of an online-softmax step.
      query_gradients: for dQ and δ.
      key_gradients: for dK and dV.
      unordered: whether the dK and dV kernel also sums dQ, with 5 products for all three gradients
        instead of 7. The order of the sums, and with it the last bits of dQ, differs from run to
        run; the bits of dK and dV do not. The dQ kernel does not run then. This is not served for a
        `delta` that sums rows, which is known only after all keys of a row, nor for `matched`.
      programs: how many programs run at once, each on its own multiprocessor.
      from_memory: whether products take P and dS from shared memory instead of registers, one after
        the other and without ping-pong, for tests. The bits are the same.
      interpret: whether the kernels run in Pallas' interpreter, on any platform and `from_memory`,
        for tests.

    Raises:
      ValueError: see the tiles' `check`.
    """

    forward: ForwardTile
    query_gradients: BackwardTile
    key_gradients: BackwardTile
    unordered: bool = False
    programs: int = 132
    from_memory: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.interpret:
            object.__setattr__(self, "from_memory", True)
        self.key_gradients.check("key_gradients", unordered=self.unordered)

    def check(self, numerics: Numerics, head_size: int) -> None:
        """Raises ValueError if the kernels of a call do not take these tiles."""
        self.forward.check(numerics)
        if not self.unordered:
            self.query_gradients.check("query_gradients", numerics)
        self.key_gradients.check(
            "key_gradients", numerics, unordered=self.unordered, head_size=head_size
        )


def keeps_auxiliary(numerics: Numerics) -> bool:
    """Whether δ sees O′, which a second sum beside Ō gives, from unrounded P̄."""
    return numerics.saved_dtype is not None and numerics.saved_output == "auxiliary"


# The least number of query rows of a long causal call. Measured at head size 64, the tiles of long
# calls take 6 % more time at 1,024 rows, 1 % more at 2,048, 7 % less at 4,096 and 14 % less at
# 8,192. At head size 128 they take 8 % less at 8,192.
_LONG = 4096


def is_long(rows: int, *, is_causal: bool) -> bool:
    """Whether a call takes the tiles of long calls."""
    return is_causal and rows >= _LONG


def default_block_sizes(
    head_size: int,
    *,
    value_size: int | None = None,
    kv_block: int | None = None,
    saves_float32: bool = False,
    saves_halves: bool = False,
    keeps_auxiliary: bool = False,
    sums_keys: bool = False,
    corrects_after_cast: bool = False,
    long: bool = False,
    unordered: bool = False,
    rounds_products: bool = False,
    counts_ties: bool = False,
    has_segments: bool = False,
    has_sinks: bool = False,
    soft_cap: bool = False,
) -> BlockSizes:
    """Returns tiles from the table `tuning.toml`, which was tuned on one NVIDIA H200.

    Args:
      head_size: of queries and keys: 64, 128 or 256, or a key of `OTHER_VALUES`.
      value_size: of values: None for `head_size`, or else its entry in `OTHER_VALUES`.
      kv_block: keys of an online-softmax step, None for the fastest.
      saves_float32: whether the forward kernel also stores a float32 O, which takes shared memory.
      saves_halves: whether it also stores what rounding O left, which takes half as much.
      keeps_auxiliary: whether it also sums Ō′ (`saved_output='auxiliary'`), which takes registers.
      sums_keys: whether the dQ kernel also sums P k (`delta` 'normalized' or 'after_cast'), which
        takes registers.
      corrects_after_cast: whether the dK and dV kernel also reads λ q (`delta='after_cast'`), which
        takes shared memory.
      long: see `is_long`.
      unordered: see `BlockSizes`.
      rounds_products: whether a step of `kv_block` keys is made of parts, because its products are
        rounded, as in `published`.
      counts_ties: whether the forward kernel looks for repeated maxima, as `DynamicMax` does.
      has_segments: whether ids of segments or of lengths hide keys.
      has_sinks: whether rows begin with a sink's m and l.
      soft_cap: whether scores are capped; the derivative of the cap takes registers.

    Raises:
      ValueError: Ō′ or an unordered dQ above head size 128; steps of 128 keys with values of 256;
        an unordered dQ with values of another size; rounded products at a head size other than 64;
        head sizes that are not in the table.
    """
    value_size = value_size or head_size
    if value_size not in (head_size, OTHER_VALUES.get(head_size)):
        raise ValueError(
            f"no tiles for head size {head_size} with values of {value_size} "
            f"(values take {OTHER_VALUES.get(head_size, head_size)})"
        )
    if unordered and value_size != head_size:
        raise ValueError(f"unordered needs values of head size {head_size}, got {value_size}")
    if rounds_products and head_size != ROWS:
        raise ValueError(f"rounds_products needs head size {ROWS}, got {head_size}")
    if is_wide(head_size):
        asked = (kv_block == 128 and is_wide(value_size), keeps_auxiliary, unordered)
        names = ("kv_block=128", "keeps_auxiliary", "unordered")
        if any(asked):
            raise ValueError(f"{names[asked.index(True)]} does not fit head size {head_size}")
    elif kv_block == 64 or keeps_auxiliary:
        long = False  # the tiles of long calls were not measured with these
    call = {
        "head_size": head_size,
        "value_size": value_size,
        "kv_block": kv_block,
        "saves_float32": saves_float32,
        "saves_halves": saves_halves,
        "keeps_auxiliary": keeps_auxiliary,
        "sums_keys": sums_keys,
        "corrects_after_cast": corrects_after_cast,
        "long": long,
        "unordered": unordered,
        "rounds_products": rounds_products,
        "counts_ties": counts_ties,
        "has_segments": has_segments,
        "has_sinks": has_sinks,
        "soft_cap": soft_cap,
    }
    return BlockSizes(
        forward=ForwardTile(**tuned("forward", call)),
        query_gradients=BackwardTile(**tuned("query_gradients", call)),
        key_gradients=BackwardTile(**tuned("key_gradients", call)),
        unordered=unordered and not rounds_products,
    )


def block_sizes(
    shape: Sequence[int],
    spec: Spec,
    *,
    value_size: int | None = None,
    has_segments: bool = False,
    has_sinks: bool = False,
) -> BlockSizes:
    """The tiles that a call names, or else the tiles from the table.

    Args:
      shape: of q [B, T, N, H], or of the packed array [B, T, 3, N, H].
      spec: the call's static part.
      value_size, has_segments, has_sinks: see `default_block_sizes`.
    """
    if spec.block_sizes is None:
        kv_block = spec.numerics.kv_block
        assert kv_block != "all"  # `unsupported` declines it
        return default_block_sizes(
            shape[-1],
            value_size=value_size,
            kv_block=kv_block,
            saves_float32=spec.numerics.saved_dtype == jnp.float32,
            saves_halves=spec.numerics.saved_output == "halves",
            keeps_auxiliary=keeps_auxiliary(spec.numerics),
            sums_keys=spec.numerics.delta in SUMS_ROWS,
            corrects_after_cast=spec.numerics.delta == "after_cast",
            long=is_long(shape[1], is_causal=spec.is_causal),
            rounds_products=rounds_products(spec.numerics),
            counts_ties=isinstance(spec.row_max, DynamicMax),
            has_segments=has_segments,
            has_sinks=has_sinks,
            soft_cap=spec.soft_cap is not None,
        )
    assert isinstance(spec.block_sizes, BlockSizes)  # `unsupported` declines any other
    return spec.block_sizes
