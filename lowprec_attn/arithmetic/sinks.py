"""Attention sinks: one more column of scores, a learned number per head, without key or value.

The sink enters m, l and thus lse, and so reduces the weights of the keys. With
P_sink = exp(sink − lse), a row of P sums to 1 − P_sink over the keys. The value of the sink is 0,
and therefore its dP is 0 too. The gradient of the sink is Σ P_sink (dlse − δ) over the rows, and
rows of dS sum to P_sink δ over the keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.powers import power, whole_max
from lowprec_attn.arithmetic.products import LOG2E, powers
from lowprec_attn.arithmetic.recurrence import RowStatistics, subtracted_max
from lowprec_attn.arithmetic.request import Extras, Spec


def start_of_rows(sinks: Array, unit: float, spec: Spec) -> tuple[Array, Array]:
    """Returns m and l before the first key, which are the sink and 1.

    With `whole_max`, m is the sink in base 2 rounded up, and l is the P̄ of the sink. A sink of −inf
    has no effect: m = −inf and l = 0.

    Args:
      sinks: the sinks in units of S, of any shape.
      unit: the unit of the scores and of m.
      spec: static part of the call, for the exponent.
    """
    s = _in_unit(sinks, unit)
    # As in a softmax step, no derivative goes through m.
    m = lax.stop_gradient(s)
    if spec.numerics.exponent == "whole_max":
        m = whole_max(m, unit * LOG2E)
        return m, power(s, unit * LOG2E, subtracted_max(m, m == -jnp.inf))
    return m, jnp.exp(s - subtracted_max(m, m == -jnp.inf))


def probabilities(sinks: Array, statistics: RowStatistics, unit: float, spec: Spec) -> Array:
    """Returns P_sink of rows; 0 where lse is −inf.

    P_sink is not rounded, because it is no operand of a matrix product.

    Args:
      sinks: the sinks in units of S; they broadcast to the statistics.
      statistics: the statistics of the rows, with m in the unit `unit`.
      unit, spec: as in `start_of_rows`.
    """
    subtracted, inverse_l = statistics
    s = jnp.broadcast_to(_in_unit(sinks, unit), subtracted.shape)
    exponent = spec.numerics.exponent
    empty = subtracted == -jnp.inf
    subtracted = jnp.where(empty, jnp.float32(0), subtracted)
    if exponent == "whole_max":
        p = power(s, unit * LOG2E, subtracted)
    elif exponent in ("scale_first", "unfused"):
        of_statistic = 1.0 if inverse_l is None else unit
        p = powers(s, subtracted, unit, of_statistic, exponent)
    elif inverse_l is None:
        p = jnp.exp(sinks.astype(jnp.float32) - subtracted)
    else:
        p = jnp.exp((s - subtracted) * jnp.float32(unit))
    p = jnp.where(empty, jnp.float32(0), p)
    return p if inverse_l is None else p * inverse_l


def _in_unit(sinks: Array, unit: float) -> Array:
    sinks = sinks.astype(jnp.float32)
    return sinks if unit == 1 else sinks / jnp.float32(unit)


class SinkColumn(NamedTuple):
    """The sink column of rows in the backward pass, [B, K, G, T, 1].

    Attributes:
      p: P_sink; 0 in rows beyond the query lengths, which do not exist.
      sees: whether a row sees a key.
    """

    p: Array
    sees: Array

    def seen(self, x: Array) -> Array:
        """Returns dO or dlse with 0 in rows that see no key, so that their values reach no key."""
        return jnp.where(self.sees, x, jnp.zeros((), x.dtype))

    def gradient(self, delta: Array, dlse: Array) -> Array:
        """Returns P_sink (dlse − δ) of each row, or P_sink dlse in rows that see no key.

        Args:
          delta: δ − dlse of the rows, unrounded.
          dlse: the gradient of lse as the call received it.
        """
        of_row = self.p * jnp.where(self.sees, -delta, dlse)
        return jnp.where(self.p == 0, jnp.float32(0), of_row)


def column(
    statistics: RowStatistics, sees: Array, rows: Array, unit: float, spec: Spec, extras: Extras
) -> SinkColumn:
    """Returns the column of the call's grouped sinks, for rows [T, 1] with these statistics."""
    assert extras.sinks is not None
    p = probabilities(extras.sinks, statistics, unit, spec)
    valid = within_lengths(rows, extras)
    p = p if valid is None else jnp.where(valid, p, jnp.float32(0))
    return SinkColumn(p, jnp.broadcast_to(sees, p.shape))


def within_lengths(rows: Array, extras: Extras) -> Array | None:
    """Which of the rows [T, 1] exist, as [B, 1, 1, T, 1]; None if all do."""
    if extras.query_lengths is None:
        return None
    return rows[None, None, None] < extras.query_lengths.reshape(-1, 1, 1, 1, 1)
