"""One attention call as the Hopper kernels see it: sizes, tiles, masks, parts of the arrays."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.request import Spec
from lowprec_attn.numerics import MASKED
from pallas_kernels.gpu.hopper.block_sizes import (
    ROWS,
    STEPS,
    BlockSizes,
    Tile,
    is_wide,
    keeps_auxiliary,
    rounds_products,
)
from pallas_kernels.gpu.hopper.machine.instructions import tanh
from pallas_kernels.gpu.hopper.machine.layouts import extended, rows_and_columns
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.segments import Segments
from pallas_kernels.gpu.hopper.tile_scheduler import LongestFirstScheduler, StaticScheduler

LOG2E = math.log2(math.e)

# Scores are large in rows with |lse| · log₂(e) above this. Up to it, float32 numbers lie at most
# 2^-14 apart, so a P from lse is off by at most a relative 4e-5, a 50th of a rounding to bfloat16.
LARGE = 1024.0

# Bytes that programs walk over at a time if the longest tiles come first. They stay in the L2 cache
# of 50 MiB, beside everything else that passes through it.
_WALKED_AT_A_TIME = 32 * 2**20


class KeySteps(NamedTuple):
    """The key steps that 64 query rows visit.

    `full`, `end` and `clear` count from the first step of the program's tile.

    Attributes:
      full: steps from this one on need a mask.
      end: the number of steps.
      begin: the tile's first step, among all steps of the keys; None if tiles begin with step 0.
      clear: steps before this one need a mask too; None if there are none.
    """

    full: Array
    end: Array
    begin: Array | None = None
    clear: Array | None = None

    def of(self, t: Array) -> Array:
        """The index of the t-th step among all steps of the keys."""
        return t if self.begin is None else self.begin + t

    def takes_mask(self, t: Array) -> Array:
        """Whether step t needs a mask, because some row may not see all of its keys."""
        beyond = t >= self.full
        return beyond if self.clear is None else beyond | (t < self.clear)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and arithmetic of a call.

    Attributes:
      spec: the call's static part.
      batch, rows, keys, heads, kv_heads, head_size: B, T, S, N, K, H.
      value_size: V, the head size of v, O and dO; `head_size` is that of q and k.
      dtype: the dtype of q, k, v, dO and the gradients.
      packed: whether q, k and v, and so their gradients, are planes of one array [B, T, 3, N, H].
      sizes: the tiles.
      has_segments: whether ids hide keys, see `segments`.
    """

    spec: Spec
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: np.dtype
    packed: bool
    sizes: BlockSizes
    has_segments: bool = False

    @classmethod
    def of(
        cls,
        q: Array,
        k: Array,
        spec: Spec,
        sizes: BlockSizes,
        *,
        value_size: int | None = None,
        has_segments: bool = False,
    ) -> "Problem":
        """The problem of a call with these arrays; q and k may both be the packed array.

        value_size: V; None if it equals H.

        Raises:
          ValueError: the tiles do not fit the call, see `BlockSizes.check`.
        """
        sizes.check(spec.numerics, q.shape[-1])
        return cls(
            spec=spec,
            batch=q.shape[0],
            rows=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_size=q.shape[-1],
            value_size=value_size or q.shape[-1],
            dtype=np.dtype(q.dtype),
            packed=q.ndim == 5,
            sizes=sizes,
            has_segments=has_segments,
        )

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def unit(self) -> float:
        """The unit of scores and m: the scale of q·k, or the cap if scores are capped."""
        return self.spec.scale if self.spec.soft_cap is None else self.spec.soft_cap

    @property
    def log2_unit(self) -> float:
        """`unit` · log₂(e): exp(S) is 2 to the power of this times the score in `unit`."""
        return self.unit * LOG2E

    @property
    def computes_places(self) -> bool:
        """Whether the dK and dV kernel lacks registers to keep the indices of scores in."""
        return self.has_segments or self.spec.soft_cap is not None

    def capped(self, products: Array) -> Array:
        """Returns scores in `unit`: tanh(scale · q·k / cap), or q·k itself without a cap."""
        if self.spec.soft_cap is None:
            return products
        factor = self.spec.scale / self.spec.soft_cap
        return tanh(products, factor, interpret=self.sizes.interpret)

    @property
    def scales_last(self) -> bool:
        """Whether dQ and dK are scaled once summed: a power of two commutes with rounding dS."""
        return self.spec.scale_is_power_of_two

    @property
    def vector_rows(self) -> int:
        """The length T of the kernels' own vectors [B, N, T]: `rows` rounded up to whole steps.

        So no vector ends within a step. Entries beyond the last row are those of a row of zeros,
        hence finite. Without them a step would read numbers of the next head, which could make P
        infinite, and zeros of dO do not cancel an infinite P.
        """
        return -(-self.rows // max(STEPS)) * max(STEPS)

    @property
    def normalizes_delta(self) -> bool:
        """Whether δ is Σ P dP / Σ P, from the P and dP of the backward pass itself."""
        return self.spec.numerics.delta == "normalized"

    @property
    def corrects_after_cast(self) -> bool:
        """Whether dQ and dK are corrected by λ = Σ dS / Σ P, from the rounded dS and P."""
        return self.spec.numerics.delta == "after_cast"

    @property
    def sums_rows(self) -> bool:
        """Whether the dQ kernel also sums dS, P and P k over the keys."""
        return self.spec.numerics.delta in SUMS_ROWS

    @property
    def whole_max(self) -> bool:
        """Whether P̄ is formed against a maximum that is a whole number in base 2, see `powers`."""
        return self.spec.numerics.exponent == "whole_max"

    @property
    def saves_inverse_l(self) -> bool:
        """Whether the backward pass forms P as P̄ times 1 / l, from a saved m and 1 / l."""
        return self.spec.numerics.statistics == "m_and_l" and not self.saves_log2_l

    @property
    def saves_log2_l(self) -> bool:
        """Whether rows of large scores alone form P from m and log₂ l, and others from lse.

        See `LARGE`. It costs no product an entry. With whole-number maxima or a rounded P̄, and
        where dS takes 1 / l at no cost (no `sums_rows`), all rows form P as P̄ times 1 / l.
        """
        n = self.spec.numerics
        as_before = n.exponent != "whole_max" and n.recomputed_probs == "unrounded"
        return n.statistics == "m_and_l" and self.sums_rows and as_before

    @property
    def sums_rounded_probs(self) -> bool:
        """Whether l sums P̄ after its rounding."""
        return self.spec.numerics.row_sum == "rounded"

    @property
    def rounds_recomputed_probs(self) -> bool:
        """Whether the backward pass rounds its recomputed P̄, as the forward pass rounds P̄."""
        return self.spec.numerics.recomputed_probs == "rounded"

    @property
    def saves_halves(self) -> bool:
        """Whether δ sees both halves of O: the rounded O and what its rounding left."""
        return self.spec.numerics.saved_output == "halves"

    @property
    def sums_queries(self) -> bool:
        """Whether the dK and dV kernel also sums dQ."""
        return self.sizes.unordered

    @property
    def keeps_auxiliary(self) -> bool:
        """Whether δ sees O′, the output of an unrounded P̄."""
        return keeps_auxiliary(self.spec.numerics)

    @property
    def rounds_products(self) -> bool:
        """Whether products are rounded to `dtype` too, as by `published`; see `long_steps`.

        These are S, P̄V of a step, the last l, dP and the products of a tile.
        """
        return rounds_products(self.spec.numerics)

    def rounded(self, x: Array) -> Array:
        """Returns x rounded to `dtype`, as float32, if `rounds_products`; otherwise x itself."""
        return extended(x.astype(self.dtype)) if self.rounds_products else x

    def _parts(self, step: int) -> int:
        """How many mainloop steps, of `step` keys or queries each, make one long step."""
        of_softmax = self.spec.numerics.kv_block
        assert isinstance(of_softmax, int)  # `unsupported` declines any other
        return of_softmax // step

    def long_steps(
        self, step: int, end: Array, begin: Array | None = None
    ) -> tuple[Array | int, Array]:
        """(first, last): long steps first ... last − 1 hold mainloop steps begin ... end − 1."""
        parts = jnp.int32(self._parts(step))
        return 0 if begin is None else lax.div(begin, parts), lax.div(end + (parts - 1), parts)

    def parts_of_long_step(
        self, i: Array, step: int, end: Array, begin: Array | None = None
    ) -> tuple[Array, Array]:
        """(first, last): the i-th long step consists of the mainloop steps first ... last − 1.

        Only steps among begin ... end − 1 count.
        """
        parts = self._parts(step)
        first = i * parts if begin is None else jnp.maximum(i * parts, begin)
        return first, jnp.minimum((i + 1) * parts, end)

    @property
    def has_equal_sizes(self) -> bool:
        """Whether v has the head size of q and k, so that dQ and O, and dK and dV, are alike."""
        return self.value_size == self.head_size

    @property
    def is_wide(self) -> bool:
        """See `block_sizes.is_wide`.

        If so, δ loads O from global memory straight to registers, and an O that is saved for δ
        alone is stored straight from registers.
        """
        return is_wide(self.head_size)

    def part(
        self, ref: Ref, batch: Array, start: Array, size: int, head: Array, *, plane: int = 0
    ) -> Ref:
        """`size` rows of one head of an array; `plane` picks q (0), k (1) or v (2) if packed."""
        rows = pl.ds(start, size)
        if len(ref.shape) == 5:
            return ref.at[batch, rows, plane, head]
        return ref.at[batch, rows, head]

    def store_rows(self, row: Array, copies: Sequence[tuple[Ref, Ref]]) -> None:
        """Starts copies of vectors to global memory, for the query rows from `row` on.

        A warpgroup beyond `vector_rows` stores nothing. A copy of a matrix stops at the end of the
        array's rows, but a copy of a vector would go on into the rows of the next head.
        """

        def start() -> None:
            for source, target in copies:
                plgpu.copy_smem_to_gmem(source, target)

        pl.when(row < self.vector_rows)(start)

    def store_from_registers(self, row: Array, x: Array, part: Ref, *, end: int) -> None:
        """Stores x straight from registers, for the rows from `row` on.

        It is used where shared memory has no room for x. Nothing is stored if `row` is `end` or
        beyond, since no copy would store those rows either.
        """

        def store() -> None:
            part[...] = x

        pl.when(row < end)(store)

    def by_query(self, tile: Tile) -> StaticScheduler | LongestFirstScheduler:
        """The scheduler of the query tiles of all heads."""
        tiles, walked = self.query_tiles(tile), self.keys / self.group
        return self._scheduler(tile, tiles, self.heads, walked, longest_last=True)

    def by_key(self, tile: Tile) -> StaticScheduler | LongestFirstScheduler:
        """The scheduler of the key tiles of all key heads."""
        tiles = self.key_tiles(tile)
        return self._scheduler(tile, tiles, self.kv_heads, self.rows * self.group)

    def query_tiles(self, tile: Tile) -> int:
        """The number of query tiles of a head."""
        return -(-self.vector_rows // tile.owned)

    def key_tiles(self, tile: Tile) -> int:
        """The number of key tiles of a head."""
        return -(-self.keys // tile.owned)

    def _scheduler(
        self, tile: Tile, tiles: int, heads: int, walked: float, *, longest_last: bool = False
    ) -> StaticScheduler | LongestFirstScheduler:
        """The scheduler that `tile` asks for.

        walked: how many rows of k and v, or of q and dO, a head's tiles walk over.
        """
        # As in FlashAttention-3's LPT scheduler, not all heads are worked on at once: their keys
        # would evict each other from the L2 cache.
        if tile.longest_first and self.spec.is_causal:
            size = walked * (self.head_size + self.value_size) * self.dtype.itemsize
            return LongestFirstScheduler(
                tiles=tiles,
                heads=heads,
                batch=self.batch,
                at_a_time=max(int(_WALKED_AT_A_TIME / size), 1),
                longest_last=longest_last,
                programs=self.sizes.programs,
            )
        return StaticScheduler(
            tiles=tiles,
            heads=heads,
            batch=self.batch,
            in_pairs=self.spec.is_causal,
            longest_last=longest_last,
            programs=self.sizes.programs,
        )

    def key_steps(self, first: Array, size: int, step: int) -> tuple[Array, Array]:
        """(full, end): the rows first ... first + size − 1 see keys in the steps before `end`.

        They see all keys of the steps before `full`. Windows and ids are not considered.
        """
        # Not constants: Mosaic GPU's loops do not take bounds that JAX has made literals.
        full, end = (first * 0 + n for n in (self.keys // step, -(-self.keys // step)))
        if self.spec.is_causal:
            full = jnp.minimum(full, lax.div(first + 1, jnp.int32(step)))
            end = jnp.minimum(end, lax.div(first + (size + step - 1), jnp.int32(step)))
        return full, end

    def program_steps(
        self, start: Array, batch: Array, tile: Tile, segments: Segments | None
    ) -> tuple[Array | None, Array]:
        """(begin, length): the key steps that a program visits for the rows from `start` on.

        `begin` is None if every tile begins with step 0.
        """
        _, end = self.key_steps(start, tile.owned, tile.step)
        if not self.hides_steps:
            return None, end
        begin = start * 0
        if self.spec.window is not None:
            left, right = self.spec.window
            step, steps = jnp.int32(tile.step), -(-self.keys // tile.step)
            # Rows that lie beyond all keys of their window take the last step.
            begin = jnp.minimum(lax.div(jnp.maximum(start - left, 0), step), steps - 1)
            if not self.spec.is_causal:
                reach = start + (tile.owned + right + tile.step - 1)
                end = jnp.minimum(end, lax.div(reach, step))
        if segments is not None:
            first, last = segments.visited(batch, start)
            begin, end = jnp.maximum(begin, first), jnp.minimum(end, last)
        # There is always a step, because the mainloop begins with one unconditionally.
        return begin, jnp.maximum(end - begin, 1)

    def consumer_steps(
        self,
        row: Array,
        batch: Array,
        tile: Tile,
        segments: Segments | None,
        program: tuple[Array | None, Array] | None = None,
    ) -> KeySteps:
        """The key steps of the 64 rows from `row` on.

        program: the program's `program_steps`, or None if it owns only these rows.
        """
        full, end = self.key_steps(row, ROWS, tile.step)
        if not self.hides_steps:
            return KeySteps(full, end)
        begin, last = program or self.program_steps(row, batch, tile, segments)
        assert begin is not None
        if self.spec.is_causal:  # otherwise warpgroups of a program end together
            last = jnp.clip(end - begin, 1, last)
        clear = row * 0
        if self.spec.window is not None:
            left, right = self.spec.window
            step = jnp.int32(tile.step)
            if not self.spec.is_causal:
                full = jnp.minimum(full, lax.div(row + (right + 1), step))
            # Of the 64 rows, the last is the first from which the window hides a key on the left.
            clear = lax.div(jnp.maximum(row + (ROWS - 1 - left), 0) + (tile.step - 1), step)
        if segments is not None:
            alike, differs = segments.alike(batch, row)
            clear, full = jnp.maximum(clear, alike), jnp.minimum(full, differs)
        return KeySteps(full - begin, last, begin, clear - begin)

    def query_steps(
        self, first: Array, batch: Array, tile: Tile, segments: Segments | None
    ) -> tuple[Array, Array]:
        """(begin, end): the query steps whose rows see a program's keys, which begin at `first`."""
        begin, end = self._query_steps(first, tile)
        if segments is not None:
            of_ids = segments.visited(batch, first)
            end = jnp.minimum(end, of_ids[1])
            begin = jnp.minimum(jnp.maximum(begin, of_ids[0]), end)
        return begin, end

    def _query_steps(self, first: Array, tile: Tile) -> tuple[Array, Array]:
        step = tile.step
        end = first * 0 + (-(-self.rows // step))
        if self.spec.window is not None:
            left, right = self.spec.window
            before = first if self.spec.is_causal else jnp.maximum(first - right, 0)
            reach = lax.div(first + (tile.owned + left + step - 1), jnp.int32(step))
            end = jnp.minimum(end, reach)
            return jnp.minimum(lax.div(before, jnp.int32(step)), end), end
        if not self.spec.is_causal:
            return first * 0, end
        # Queries before the first key see none of them.
        return jnp.minimum(lax.div(first, jnp.int32(step)), end), end

    def hides_from_queries(self, key: Array, row: Array, step: int) -> Array | None:
        """Whether one of the rows row ... row + step − 1 does not see one of the 64 keys at `key`.

        None if only padding of the last tiles could be hidden that needs no mask: its rows are
        zero, and the gradients of its keys are not stored. These gradients may be NaN, see
        `adds_padding_to_dq`.
        """
        if self.spec.window is None:
            hides = key + (ROWS - 1) > row if self.spec.is_causal else None
            if not self.adds_padding_to_dq:
                return hides
            is_padded = key + ROWS > self.keys
            return is_padded if hides is None else hides | is_padded
        left, right = self.spec.window
        reach = row if self.spec.is_causal else row + right
        return (key + (ROWS - 1) > reach) | (key < row + (step - 1 - left))

    @property
    def adds_padding_to_dq(self) -> bool:
        """Whether the sum of dQ has products with padded keys, whose P must then be 0.

        A padded key scores 0. If lse is below −89, its P = exp(0 − lse) and its dS are infinite,
        and an infinite dS times the zeros of the key is NaN.
        """
        hidden_anyway = self.spec.is_causal and self.rows <= self.keys
        is_padded = self.keys % self.sizes.key_gradients.owned != 0
        return self.sums_queries and is_padded and not hidden_anyway

    def mask_keys(
        self,
        s: Array,
        row: Array,
        key: Array,
        masked: Array | float = MASKED,
        alike: Array | None = None,
    ) -> Array:
        """Scores [queries, keys] of the tile at (row, key), set to `masked` for hidden keys.

        alike: which pairs share an id, if ids hide keys.
        """
        # By global indices rather than the diagonal of a tile, since tiles need not be square.
        rows, keys = rows_and_columns(s.shape, row, key)
        return self._masked(s, rows, keys, masked, alike)

    def mask_queries(self, s: Array, key: Array, row: Array, alike: Array | None = None) -> Array:
        """Scores [keys, queries] of the tile at (key, row), set to MASKED for hidden keys."""
        keys, rows = rows_and_columns(s.shape, key, row)
        return self._masked(s, rows, keys, MASKED, alike)

    def _masked(
        self, s: Array, rows: Array, keys: Array, masked: Array | float, alike: Array | None
    ) -> Array:
        # Without causality only the padding of the last keys is masked: its rows of k are zero, so
        # they score 0 instead of −inf.
        seen = rows >= keys if self.spec.is_causal else keys < self.keys
        if self.spec.is_causal and self.keys < self.rows:
            seen = seen & (keys < self.keys)
        if self.spec.window is not None:
            left, right = self.spec.window
            seen = seen & (keys >= rows - left)
            if not self.spec.is_causal:
                seen = seen & (keys <= rows + right)
        if alike is not None:
            seen = seen & alike
        return jnp.where(seen, s, masked)

    def masks_steps(self, step: int) -> bool:
        """Whether a row may visit a step of `step` keys and not see all of them."""
        return self.spec.is_causal or self.keys % step != 0 or self.hides_steps

    @property
    def hides_steps(self) -> bool:
        """Whether a row may see no key of its first step, so that m stays MASKED for a while."""
        return self.spec.window is not None or self.has_segments
