"""Rounds whole arrays q, k, V and dO at `query`, `key`, `value` and `do`, as attention reads them.

A scale that many numbers share (`numerics.scaling`) needs the whole array. If scales belong to
blocks along the axis over which a product sums, an array is rounded separately for each such axis.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from lowprec_attn.arithmetic.layout import Grouped
from lowprec_attn.arithmetic.places import Place, span
from lowprec_attn.arithmetic.points import Rounder
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import Numerics, Point

# The axes of q, k, v and dO over which products sum.
_ROWS, _FEATURES = -2, -1
_DO = ("do", "do_of_dv", "do_of_delta")


class BackwardOperands(NamedTuple):
    """Operands of the backward pass, grouped as in `layout`.

    Attributes:
      q, k: the operands of S.
      v, do: the operands of dP.
      k_of_dq, q_of_dk, do_of_dv: the operands of dQ, dK and dV, whose products sum over the rows of
        these arrays (keys or queries).
      do_of_delta: the dO in δ.
    """

    q: Array
    k: Array
    v: Array
    do: Array
    k_of_dq: Array
    q_of_dk: Array
    do_of_dv: Array
    do_of_delta: Array

    def with_do(self, change: Callable[[Array], Array]) -> "BackwardOperands":
        """Returns the operands with `change` applied to every dO."""
        return self._changed(change, _DO)

    def with_rows(self, change: Callable[[Array], Array]) -> "BackwardOperands":
        """Returns the operands with `change` applied to every q and dO."""
        return self._changed(change, ("q", "q_of_dk", *_DO))

    def with_keys(self, change: Callable[[Array], Array]) -> "BackwardOperands":
        """Returns the operands with `change` applied to every k and v."""
        return self._changed(change, ("k", "k_of_dq", "v"))

    def _changed(
        self, change: Callable[[Array], Array], names: tuple[str, ...]
    ) -> "BackwardOperands":
        return self._replace(**{name: change(getattr(self, name)) for name in names})


def share_scales(numerics: Numerics) -> bool:
    """Whether several rows of q, k, v or dO share a scale."""
    points = (numerics.query, numerics.key, numerics.value, numerics.do)
    return any(of.scaling is not None and of.scaling.kind != "x" for of in points)


def read(x: Array, point: Point, spec: Spec, extras: Extras, *, axis: int = _FEATURES) -> Array:
    """Returns an array [B, K, (G,) L, H] rounded at a point, in a dtype that holds the result.

    Args:
      x: a whole array, not a tile of one.
      point: the name of the point.
      spec, extras: the call.
      axis: the axis over which the product sums.
    """
    if getattr(spec.numerics, point).is_identity:
        return x
    grouped = x if x.ndim == 5 else x[:, :, None]
    place = Place(span(0, x.shape[-2])[:, None], span(0, x.shape[-1])[None])
    rounded = Rounder.of(spec, extras)(grouped.astype(jnp.float32), point, place, axis=axis)
    return rounded.reshape(x.shape).astype(spec.numerics.operand_dtype(point, x.dtype))


def forward_operands(inputs: Grouped, spec: Spec) -> Grouped:
    """Returns the inputs with q and k as S reads them, and v as P̄ V, a sum over keys, reads it."""
    q, k, v, extras = inputs
    return inputs._replace(
        q=read(q, "query", spec, extras),
        k=read(k, "key", spec, extras),
        v=read(v, "value", spec, extras, axis=_ROWS),
    )


def backward_operands(inputs: Grouped, do: Array, spec: Spec) -> BackwardOperands:
    """Returns the operands of the backward pass.

    q and k are the same numbers as in the forward pass, and so is v unless its scales belong to
    blocks along the axis of a product.
    """
    q, k, v, extras = inputs

    def along_rows(x: Array, point: Point, along_features: Array) -> Array:
        scaling = getattr(spec.numerics, point).scaling
        if scaling is None or scaling.block_on_axis is None:
            return along_features
        return read(x, point, spec, extras, axis=_ROWS)

    of_q, of_k = read(q, "query", spec, extras), read(k, "key", spec, extras)
    of_do = read(do, "do", spec, extras)
    do_of_dv = along_rows(do, "do", of_do)
    return BackwardOperands(
        q=of_q,
        k=of_k,
        v=read(v, "value", spec, extras),
        do=of_do,
        k_of_dq=along_rows(k, "key", of_k),
        q_of_dk=along_rows(q, "query", of_q),
        do_of_dv=do_of_dv,
        do_of_delta=of_do if do_of_dv is of_do else do,
    )
