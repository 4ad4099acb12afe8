"""Which tiles a program works through, one after the other.

There are as many programs as multiprocessors. Under causality tiles differ in length.
`StaticScheduler` deals out pieces of work in turn. Under causality a piece is a pair of tiles, and
all pairs are equally long: the first and the last tile of a head, the second and the last but one,
and so on. `LongestFirstScheduler` deals out single tiles by their length, one group of heads after
the other (FlashAttention-3's LPT).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class WorkTile(NamedTuple):
    """A tile of a program: its block, head and batch element, and whether it exists."""

    block: Array
    head: Array
    batch: Array
    is_valid: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticScheduler:
    """Deals out tiles × heads × batch to programs in turn.

    Attributes:
      tiles, heads, batch: how many there are.
      in_pairs: whether a piece of work is two tiles.
      longest_last: whether tiles with a higher number are the longer ones.
      programs: the largest number of programs.
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
        """How many tiles a program has, including tiles that do not exist."""
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
    """Deals out tiles × heads × batch, the longest first, one group of heads after the other.

    Every round gives each program a tile. Its direction is opposite to the round before, so the
    program with the longest tile of a round gets the shortest of the next. The first rounds of
    successive groups of heads have opposite directions, too, which makes up for an odd number of
    rounds. Programs then end within 1 or 2 % of each other. Pairs leave 3 %, and a direction that
    never changes leaves 6 to 25 %.

    Attributes:
      tiles, heads, batch: how many there are.
      at_a_time: the largest number of heads in a group, out of all `heads` × `batch`.
      longest_last: whether tiles with a higher number are the longer ones.
      programs: the largest number of programs.
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
        """The number of heads in a group; the last group may have fewer."""
        return -(-self._all_heads // -(-self._all_heads // self.at_a_time))

    @property
    def _rounds(self) -> int:
        """The number of rounds of a group."""
        return -(-self.tiles * self._together // self.grid)

    @property
    def grid(self) -> int:
        """The number of programs."""
        return min(self.programs, self.tiles * self._together)

    def count(self, program: Array) -> Array:
        """How many tiles a program has, including tiles that do not exist."""
        # Not a constant: Mosaic GPU's loops do not take bounds that JAX has made literals.
        return program * 0 + self._rounds * -(-self._all_heads // self._together)

    def work_tile(self, program: Array, u: Array) -> WorkTile:
        """The program's u-th tile. Heads that share their keys come one after the other."""
        rounds = jnp.int32(self._rounds)
        # FlashAttention-3 draws the next tile from a counter in memory. Here no program waits for a
        # counter, and the order is the same on every run.
        time, now = lax.div(u, rounds), lax.rem(u, rounds)
        turned = lax.rem(time + now, jnp.int32(2)) == 1
        # Back and forth: the program with the longest tile of a round gets the next one's shortest.
        index = now * self.grid + jnp.where(turned, self.grid - 1 - program, program)
        first = time * self._together
        heads = jnp.minimum(self._together, self._all_heads - first)
        head, near = first + lax.rem(index, heads), lax.div(index, heads)
        is_valid, near = near < self.tiles, jnp.minimum(near, self.tiles - 1)
        tile = self.tiles - 1 - near if self.longest_last else near
        head, batch = lax.rem(head, jnp.int32(self.heads)), lax.div(head, jnp.int32(self.heads))
        return WorkTile(tile, head, batch, is_valid)
