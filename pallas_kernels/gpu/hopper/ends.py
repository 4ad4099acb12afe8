"""Zeros in what lengths hide, without a copy of the arrays.

Lengths alone hide the last rows from all keys, and the last keys from all rows. A product with 0
does not hide NaN or infinity, so the kernels must read zeros there. Only one block of 128 rows of a
batch element has both what is seen and what is hidden. That block is copied, with zeros in what is
hidden. The producer loads it in the place of the array's own block, and what comes later from
beyond the end of the copy, where the copy engine fills in zeros. So shared memory holds the bytes
that it would hold if the whole arrays had been copied, and the consumers need not know.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32

from lowprec_attn.arithmetic.hidden import ends_by_position, lengths_alone_hide
from lowprec_attn.arithmetic.places import span
from lowprec_attn.arithmetic.request import Extras, Spec
from pallas_kernels.gpu.hopper.block_sizes import STEPS
from pallas_kernels.gpu.hopper.machine.layouts import rows_and_columns
from pallas_kernels.gpu.hopper.machine.pipeline import Either, Source
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.problem import Problem

# Rows of a copied block: a multiple of all blocks that a copy of the producer takes.
_BLOCK = max(STEPS)
_ROWS, _KEYS = range(2)  # the sides, as they stand in `Ends.at`


class Ends(NamedTuple):
    """Where the rows and the keys end that are seen, and copies of the blocks around these ends.

    The fields are arrays outside of the kernels, and references inside.

    Attributes:
      at: int32 [2, B]. The rows at[0] and later see no key; no row sees the keys at[1] and later.
      qkv: the blocks of q, k and v, beside each other: [B, 128, N + 2 K, H].
      do: the block of dO, [B, 128, N, V], in the backward pass.
      v: the block of v, [B, 128, K, V], if V is not H; `qkv` then has the other two.
    """

    at: Ref
    qkv: Ref
    do: Ref = None
    v: Ref = None

    @classmethod
    def of(cls, arrays: tuple[Array, ...], extras: Extras, spec: Spec) -> "Ends | None":
        """The ends of a call whose q, k and v lengths alone hide, otherwise None.

        arrays: q, k and v, or the one packed array.
        """
        if not lengths_alone_hide(extras):
            return None
        q, k, v = arrays * 3 if len(arrays) == 1 else arrays
        sizes = q.shape[1], k.shape[1]
        sides = zip(ends_by_position(extras, spec, *sizes), sizes, strict=True)
        at = jnp.stack(
            [jnp.broadcast_to(jnp.clip(end, 0, size), q.shape[:1]) for end, size in sides]
        )
        blocks = [
            _ended(x, at[side], plane if len(arrays) == 1 else None)
            for plane, (x, side) in enumerate(((q, _ROWS), (k, _KEYS), (v, _KEYS)))
        ]
        of_v = blocks.pop() if v.shape[-1] != k.shape[-1] else None
        return cls(at, jnp.concatenate(blocks, axis=2), v=of_v)

    def backward(self, do: Array) -> "Ends":
        """The ends with the block of dO."""
        return self._replace(do=_ended(do, self.at[_ROWS]))

    def of_element(self, batch: Array, problem: Problem) -> "EndsOfElement":
        """The ends of a batch element, within a kernel."""
        # A program's last tile may not exist, and then it may lie anywhere.
        batch = jnp.minimum(batch, self.at.shape[1] - 1)
        return EndsOfElement(self, problem, batch, *(self.at[side, batch] for side in range(2)))


class EndsOfElement(NamedTuple):
    """The ends of a batch element, within a kernel: how many rows and keys are seen."""

    ends: Ends
    problem: Problem
    batch: Array
    rows: Array
    keys: Array

    def part(self, name: str, own: Ref, start: Array, size: int, head: Array) -> Source:
        """What is loaded in the place of `own`, `size` rows from `start` on of one head.

        name: of the array: q, k, v or do. Others have finite numbers or zeros in hidden rows.
        """
        heads, kv_heads = self.problem.heads, self.problem.kv_heads
        before = {"q": 0, "k": heads, "v": heads + kv_heads, "do": 0}
        if name not in before:
            return own
        copied = self.ends.do if name == "do" else self.ends.qkv
        if name == "v" and self.ends.v is not None:
            copied, before["v"] = self.ends.v, 0
        end = self.keys if name in ("k", "v") else self.rows
        # It is used only for parts that reach beyond the end, so not for parts before the block.
        block = lax.div(end, jnp.int32(_BLOCK)) * _BLOCK
        rows = pl.ds(pl.multiple_of(jnp.maximum(start - block, 0), size), size)
        ended = copied.at[self.batch, rows, before[name] + head]
        return Either(ended, own, takes_first=start + size > end)


def without_beyond(x: Array, first: Array, end: Array | None) -> Array:
    """Returns x [rows, columns], whose rows begin with `first`, with zeros from row `end` on.

    A gradient is 0 there anyway, unless what is seen has NaN or infinity. end: None for no end.
    """
    if end is None:
        return x
    rows, _ = rows_and_columns(x.shape, first, first)
    return jnp.where(rows < end, x, 0.0)


def _ended(x: Array, ends: Int32[Array, "B"], plane: int | None = None) -> Array:
    """Returns the block of x [B, 128, heads, H] in which x ends, with zeros from the end on.

    x: an array, or the packed array, of which `plane` is taken.
    """
    index = (ends // _BLOCK * _BLOCK)[:, None] + span(0, _BLOCK)[None]
    element = span(0, x.shape[0])[:, None]
    place = (element, index) if plane is None else (element, index, plane)
    block = x.at[place].get(mode="clip")
    return jnp.where((index < ends[:, None])[..., None, None], block, jnp.zeros_like(block))
