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

# Bytes of what programs walk over at a time if the longest tiles come first: it stays in the L2
# cache, of 50 MiB, beside what else goes through it.
_WALKED_AT_A_TIME = 32 * 2**20


class KeySteps(NamedTuple):
    """The key steps that 64 query rows visit, counted from the first of their program's tile.

    Attributes:
      full: steps from it on take a mask.
      end: how many there are.
      begin: the first step, where not all tiles begin with step 0.
      clear: steps before it take a mask too, where there are any.
    """

    full: Array
    end: Array
    begin: Array | None = None
    clear: Array | None = None

    def of(self, t: Array) -> Array:
        """The t-th one, among all steps of the keys."""
        return t if self.begin is None else self.begin + t

    def takes_mask(self, t: Array) -> Array:
        """Whether the rows do not see all keys of the t-th one."""
        beyond = t >= self.full
        return beyond if self.clear is None else beyond | (t < self.clear)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes and arithmetic of a call.

    Attributes:
      spec: the call's static part.
      batch, rows, keys, heads, kv_heads, head_size: B, T, S, N, K, H.
      dtype: of q, k, v, dO and the gradients.
      packed: q, k and v are the planes of one array [B, T, 3, N, H], as their gradients are.
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
    dtype: np.dtype
    packed: bool
    sizes: BlockSizes
    has_segments: bool = False

    @classmethod
    def of(
        cls, q: Array, k: Array, spec: Spec, sizes: BlockSizes, *, has_segments: bool = False
    ) -> "Problem":
        """The problem of a call with these arrays; q and k may be the packed one.

        Raises:
          ValueError: tiles that the call does not take, see their `check`.
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
        """What scores and m count in: the scale of q·k, or the cap of tanh(S / cap)."""
        return self.spec.scale if self.spec.soft_cap is None else self.spec.soft_cap

    @property
    def log2_unit(self) -> float:
        """exp(S) is 2 to the power of a score times this."""
        return self.unit * LOG2E

    @property
    def computes_places(self) -> bool:
        """Whether the kernel of dK and dV has no registers for places of scores in them."""
        return self.has_segments or self.spec.soft_cap is not None

    def capped(self, products: Array) -> Array:
        """Scores of q·k: tanh(scale · q·k / cap), or as they are."""
        if self.spec.soft_cap is None:
            return products
        factor = self.spec.scale / self.spec.soft_cap
        return tanh(products, factor, interpret=self.sizes.interpret)

    @property
    def scales_last(self) -> bool:
        """Whether dQ and dK are scaled as sums: a power of two commutes with rounding dS."""
        return self.spec.scale_is_power_of_two

    @property
    def vector_rows(self) -> int:
        """T of the kernels' own vectors [B, N, T]: whole steps, so that none ends within one.

        What is beyond the last row is that of a row of zeros: finite, where the next head's numbers
        would make P infinite, which no zero of dO takes back.
        """
        return -(-self.rows // max(STEPS)) * max(STEPS)

    @property
    def normalizes_delta(self) -> bool:
        """Whether δ = Σ P dP / Σ P of the backward pass itself."""
        return self.spec.numerics.delta == "normalized"

    @property
    def corrects_after_cast(self) -> bool:
        """Whether dQ and dK are corrected by λ = Σ dS / Σ P of the rounded dS and P."""
        return self.spec.numerics.delta == "after_cast"

    @property
    def sums_rows(self) -> bool:
        """Whether Σ dS, Σ P and Σ P k are summed beside dQ."""
        return self.spec.numerics.delta in SUMS_ROWS

    @property
    def whole_max(self) -> bool:
        """Whether P̄ is formed against a whole number in base 2: `powers`."""
        return self.spec.numerics.exponent == "whole_max"

    @property
    def saves_inverse_l(self) -> bool:
        """Whether P is P̄ times 1 / l, which is saved beside what P̄ is formed against."""
        return self.spec.numerics.statistics == "m_and_l"

    @property
    def sums_rounded_probs(self) -> bool:
        """Whether l adds P̄ as rounded."""
        return self.spec.numerics.row_sum == "rounded"

    @property
    def rounds_recomputed_probs(self) -> bool:
        """Whether P̄ of the backward pass is rounded, as that of the forward pass."""
        return self.spec.numerics.recomputed_probs == "rounded"

    @property
    def saves_halves(self) -> bool:
        """Whether δ sees O and, beside it, what its rounding left."""
        return self.spec.numerics.saved_output == "halves"

    @property
    def sums_queries(self) -> bool:
        """Whether dQ is summed by the kernel of dK and dV."""
        return self.sizes.unordered

    @property
    def keeps_auxiliary(self) -> bool:
        """Whether δ sees O′, from unrounded P̄."""
        return keeps_auxiliary(self.spec.numerics)

    @property
    def rounds_products(self) -> bool:
        """Whether S, P̄V of a step, the last l, dP and the products of a tile are rounded to `dtype`
        too, as by `published`; see `long_steps`."""
        return rounds_products(self.spec.numerics)

    def rounded(self, x: Array) -> Array:
        """x as it is rounded where `rounds_products`, float32; elsewhere x itself."""
        return extended(x.astype(self.dtype)) if self.rounds_products else x

    def _parts(self, step: int) -> int:
        """Mainloop steps, of so many keys or queries, that are one of those that round."""
        of_softmax = self.spec.numerics.kv_block
        assert isinstance(of_softmax, int)  # `unsupported` declines any other
        return of_softmax // step

    def long_steps(
        self, step: int, end: Array, begin: Array | None = None
    ) -> tuple[Array | int, Array]:
        """(first, last): those first ... last − 1 have the mainloop's begin ... end − 1."""
        parts = jnp.int32(self._parts(step))
        return 0 if begin is None else lax.div(begin, parts), lax.div(end + (parts - 1), parts)

    def parts_of_long_step(
        self, i: Array, step: int, end: Array, begin: Array | None = None
    ) -> tuple[Array, Array]:
        """(first, last): of mainloop steps begin ... end − 1 the i-th has first ... last − 1."""
        parts = self._parts(step)
        first = i * parts if begin is None else jnp.maximum(i * parts, begin)
        return first, jnp.minimum((i + 1) * parts, end)

    @property
    def is_wide(self) -> bool:
        """Of `block_sizes`: here the O that δ sees goes straight to registers, and in float32
        straight from them."""
        return is_wide(self.head_size)

    def part(
        self, ref: Ref, batch: Array, start: Array, size: int, head: Array, *, plane: int = 0
    ) -> Ref:
        """`size` rows of one head of q (plane 0), k (1), v (2), or of an array like one of them."""
        rows = pl.ds(start, size)
        if len(ref.shape) == 5:
            return ref.at[batch, rows, plane, head]
        return ref.at[batch, rows, head]

    def store_rows(self, row: Array, copies: Sequence[tuple[Ref, Ref]]) -> None:
        """Starts copies of vectors, of the query rows from `row` on, to global memory.

        A warpgroup beyond `vector_rows` stores none: unlike a copy of matrices, that of a vector
        does not stop at the end of the array's rows but goes on into those of the next head.
        """

        def start() -> None:
            for source, target in copies:
                plgpu.copy_smem_to_gmem(source, target)

        pl.when(row < self.vector_rows)(start)

    def store_from_registers(self, row: Array, x: Array, part: Ref, *, end: int) -> None:
        """Stores numbers of the rows from `row` on where shared memory has no room for them.

        Rows from `end` on, which no copy would store, are left out.
        """

        def store() -> None:
            part[...] = x

        pl.when(row < end)(store)

    def by_query(self, tile: Tile) -> StaticScheduler | LongestFirstScheduler:
        """Query tiles, all heads."""
        tiles, walked = self.query_tiles(tile), self.keys / self.group
        return self._scheduler(tile, tiles, self.heads, walked, longest_last=True)

    def by_key(self, tile: Tile) -> StaticScheduler | LongestFirstScheduler:
        """Key tiles, all key heads."""
        tiles = self.key_tiles(tile)
        return self._scheduler(tile, tiles, self.kv_heads, self.rows * self.group)

    def query_tiles(self, tile: Tile) -> int:
        """Query tiles of a head."""
        return -(-self.vector_rows // tile.owned)

    def key_tiles(self, tile: Tile) -> int:
        """Key tiles of a head."""
        return -(-self.keys // tile.owned)

    def _scheduler(
        self, tile: Tile, tiles: int, heads: int, walked: float, *, longest_last: bool = False
    ) -> StaticScheduler | LongestFirstScheduler:
        """walked: rows, of two arrays, that a head's tiles walk over."""
        # As FlashAttention-3's LPT scheduler: not all heads at once, or their keys would drive each
        # other out of the L2 cache.
        if tile.longest_first and self.spec.is_causal:
            size = 2 * walked * self.head_size * self.dtype.itemsize
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
        """(full, end) for the rows first ... first + size − 1: they see the keys of steps before
        `end`, all of them before `full`."""
        # Not constants: Mosaic GPU's loops take none that JAX has made literals of.
        full, end = (first * 0 + n for n in (self.keys // step, -(-self.keys // step)))
        if self.spec.is_causal:
            full = jnp.minimum(full, lax.div(first + 1, jnp.int32(step)))
            end = jnp.minimum(end, lax.div(first + (size + step - 1), jnp.int32(step)))
        return full, end

    def program_steps(
        self, start: Array, batch: Array, tile: Tile, segments: Segments | None
    ) -> tuple[Array | None, Array]:
        """(begin, length): the key steps that a program visits for the rows from `start` on."""
        _, end = self.key_steps(start, tile.owned, tile.step)
        if not self.hides_steps:
            return None, end
        begin = start * 0
        if self.spec.window is not None:
            left, right = self.spec.window
            step, steps = jnp.int32(tile.step), -(-self.keys // tile.step)
            # Rows that lie beyond all keys that they could see take the last step.
            begin = jnp.minimum(lax.div(jnp.maximum(start - left, 0), step), steps - 1)
            if not self.spec.is_causal:
                reach = start + (tile.owned + right + tile.step - 1)
                end = jnp.minimum(end, lax.div(reach, step))
        if segments is not None:
            first, last = segments.visited(batch, start)
            begin, end = jnp.maximum(begin, first), jnp.minimum(end, last)
        # One step there is always, for the mainloop begins with it.
        return begin, jnp.maximum(end - begin, 1)

    def consumer_steps(
        self,
        row: Array,
        batch: Array,
        tile: Tile,
        segments: Segments | None,
        program: tuple[Array | None, Array] | None = None,
    ) -> KeySteps:
        """Those of 64 rows; program: its `program_steps`, None where it has no more rows."""
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
            # The last row is the first that does not see a key on the left.
            clear = lax.div(jnp.maximum(row + (ROWS - 1 - left), 0) + (tile.step - 1), step)
        if segments is not None:
            alike, differs = segments.alike(batch, row)
            clear, full = jnp.maximum(clear, alike), jnp.minimum(full, differs)
        return KeySteps(full - begin, last, begin, clear - begin)

    def query_steps(
        self, first: Array, batch: Array, tile: Tile, segments: Segments | None
    ) -> tuple[Array, Array]:
        """(begin, end): a program's keys, from `first` on, are seen by queries of these steps."""
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
        """Whether some of 64 keys are hidden from some of the rows row ... row + step − 1; None:
        what pads the last tiles alone, which is zero, or not stored."""
        if self.spec.window is None:
            return key + (ROWS - 1) > row if self.spec.is_causal else None
        left, right = self.spec.window
        reach = row if self.spec.is_causal else row + right
        return (key + (ROWS - 1) > reach) | (key < row + (step - 1 - left))

    def mask_keys(
        self,
        s: Array,
        row: Array,
        key: Array,
        masked: Array | float = MASKED,
        alike: Array | None = None,
    ) -> Array:
        """Scores [queries, keys] of the tile at (row, key), `masked` where a row does not see.

        alike: which pairs have one id, where there are any.
        """
        # By global indices, not by the diagonal of a tile: tiles need not be square.
        rows, keys = rows_and_columns(s.shape, row, key)
        return self._masked(s, rows, keys, masked, alike)

    def mask_queries(self, s: Array, key: Array, row: Array, alike: Array | None = None) -> Array:
        """Scores [keys, queries] of the tile at (key, row), MASKED where a row does not see."""
        keys, rows = rows_and_columns(s.shape, key, row)
        return self._masked(s, rows, keys, MASKED, alike)

    def _masked(
        self, s: Array, rows: Array, keys: Array, masked: Array | float, alike: Array | None
    ) -> Array:
        # Without causality only what pads the last keys is masked: k's rows of zeros score 0, not
        # −inf.
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
        """Whether some visited step of so many keys is not seen in full."""
        return self.spec.is_causal or self.keys % step != 0 or self.hides_steps

    @property
    def hides_steps(self) -> bool:
        """Whether a row may see no key of its first step: m is then MASKED for a while."""
        return self.spec.window is not None or self.has_segments
