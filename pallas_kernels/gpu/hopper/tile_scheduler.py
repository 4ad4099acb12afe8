"""Which tiles a program works through, one after the other.

There are as many programs as multiprocessors. Under causality tiles differ in length.
`StaticScheduler` deals out pieces of work, each program every so-manyth: a piece is then two tiles
that are as long together as any other two, the first and the last of a head, the second and the
last but one ... `LongestFirstScheduler` deals out single tiles by their length, of some heads after
the other (FlashAttention-3's LPT).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class WorkTile(NamedTuple):
    """A program's u-th tile: its block, head and batch element; whether there is one."""

    block: Array
    head: Array
    batch: Array
    is_valid: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticScheduler:
    """Tiles × heads × batch, dealt out to programs.

    Attributes:
      tiles, heads, batch: how many there are.
      in_pairs: a piece of work is two tiles.
      longest_last: tiles with a higher number are the longer ones.
      programs: at most so many.
    """

    tiles: int
    heads: int
    batch: int
    in_pairs: bool
    longest_last: bool
    programs: int

    @property
    def _per_head(self) -> int:
        return -(-self.tiles // 2) if self.in_pairs else self.tiles

    @property
    def _pieces(self) -> int:
        return self._per_head * self.heads * self.batch

    @property
    def grid(self) -> int:
        """The number of programs."""
        return min(self.programs, self._pieces)

    def count(self, program: Array) -> Array:
        """How many tiles a program has, those that do not exist included."""
        pieces = lax.div(self._pieces - program + (self.grid - 1), jnp.int32(self.grid))
        return pieces * 2 if self.in_pairs else pieces

    def work_tile(self, program: Array, u: Array) -> WorkTile:
        """The program's u-th tile. Heads that share their keys come one after the other."""
        piece, second = (u // 2, u % 2) if self.in_pairs else (u, jnp.int32(0))
        index = program + piece * self.grid
        # Heads vary fastest: programs that run at the same time share keys in the L2 cache.
        head, index = lax.rem(index, jnp.int32(self.heads)), lax.div(index, jnp.int32(self.heads))
        near, batch = (
            lax.rem(index, jnp.int32(self._per_head)),
            lax.div(index, jnp.int32(self._per_head)),
        )
        far = self.tiles - 1 - near
        long, short = (far, near) if self.longest_last else (near, far)
        if not self.in_pairs:
            return WorkTile(long, head, batch, batch < self.batch)
        # The middle one of an odd number of tiles is its own partner.
        return WorkTile(
            jnp.where(second == 0, long, short), head, batch, (second == 0) | (near != far)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongestFirstScheduler:
    """Tiles × heads × batch, dealt out the longest first, of some heads after those of others.

    Every round gives each program a tile, in the other direction than the round before: who got the
    longest of one gets the shortest of the next. Other heads' first round is turned if that of the
    heads before was not, so that what an odd number of rounds leaves is made up for as well.
    Programs then end together, within 1 or 2 %, where pairs leave 3 % and a direction that is never
    turned 6 to 25 %.

    Attributes:
      tiles, heads, batch: how many there are.
      at_a_time: at most so many heads are worked through at once, of all `heads` × `batch`.
      longest_last: tiles with a higher number are the longer ones.
      programs: at most so many.
    """

    tiles: int
    heads: int
    batch: int
    at_a_time: int
    longest_last: bool
    programs: int

    @property
    def _all_heads(self) -> int:
        return self.heads * self.batch

    @property
    def _together(self) -> int:
        """Heads of a time, the last one's being fewer if need be."""
        return -(-self._all_heads // -(-self._all_heads // self.at_a_time))

    @property
    def _rounds(self) -> int:
        """Of the heads of a time."""
        return -(-self.tiles * self._together // self.grid)

    @property
    def grid(self) -> int:
        """The number of programs."""
        return min(self.programs, self.tiles * self._together)

    def count(self, program: Array) -> Array:
        """How many tiles a program has, those that do not exist included."""
        # Not a constant: Mosaic GPU's loops take none that JAX has made a literal of.
        return program * 0 + self._rounds * -(-self._all_heads // self._together)

    def work_tile(self, program: Array, u: Array) -> WorkTile:
        """The program's u-th tile. Heads that share their keys come one after the other."""
        rounds = jnp.int32(self._rounds)
        # FlashAttention-3 draws the next tile from a counter in memory. Here nobody waits for one,
        # and the order is the same on every run.
        time, now = lax.div(u, rounds), lax.rem(u, rounds)
        turned = lax.rem(time + now, jnp.int32(2)) == 1
        # Back and forth: who got the longest tile of a round gets the shortest of the next.
        index = now * self.grid + jnp.where(turned, self.grid - 1 - program, program)
        first = time * self._together
        heads = jnp.minimum(self._together, self._all_heads - first)
        head, near = first + lax.rem(index, heads), lax.div(index, heads)
        is_valid, near = near < self.tiles, jnp.minimum(near, self.tiles - 1)
        tile = self.tiles - 1 - near if self.longest_last else near
        head, batch = lax.rem(head, jnp.int32(self.heads)), lax.div(head, jnp.int32(self.heads))
        return WorkTile(tile, head, batch, is_valid)
