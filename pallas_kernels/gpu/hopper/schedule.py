"""Which tiles a program works through, one after the other.

There are as many programs as multiprocessors, and each takes every so-manyth piece of work. Under
causality tiles differ in length: a piece of work is then two tiles that are as long together as any
other two, the first and the last of a head, the second and the last but one ...
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


class Turn(NamedTuple):
    """A program's u-th tile: its number, head and batch element; whether there is one."""

    tile: Array
    head: Array
    batch: Array
    exists: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
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

    def turns(self, program: Array) -> Array:
        """How many tiles a program has, those that do not exist included."""
        pieces = lax.div(self._pieces - program + (self.grid - 1), jnp.int32(self.grid))
        return pieces * 2 if self.in_pairs else pieces

    def turn(self, program: Array, u: Array) -> Turn:
        """The program's u-th tile. Heads that share their keys come one after the other."""
        piece, second = (u // 2, u % 2) if self.in_pairs else (u, jnp.int32(0))
        index = program + piece * self.grid
        head, index = lax.rem(index, jnp.int32(self.heads)), lax.div(index, jnp.int32(self.heads))
        near, batch = (
            lax.rem(index, jnp.int32(self._per_head)),
            lax.div(index, jnp.int32(self._per_head)),
        )
        far = self.tiles - 1 - near
        long, short = (far, near) if self.longest_last else (near, far)
        if not self.in_pairs:
            return Turn(long, head, batch, batch < self.batch)
        # The middle one of an odd number of tiles is its own partner.
        return Turn(jnp.where(second == 0, long, short), head, batch, (second == 0) | (near != far))
