"""Matrix products with float32 accumulation."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.fused import multiply_add, rounded_product
from lowprec_attn.arithmetic.powers import LN2
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.numerics import Format, get_format


def format_of(x: Array) -> Format:
    """The format of an array's dtype."""
    return get_format(x.dtype.name)


def dot(equation: str, a: Array, b: Array, a_format: Format, b_format: Format) -> Array:
    """Computes a matrix product with float32 accumulation.

    If both operands have the same 16-bit format, they are multiplied in that format. Otherwise both
    are converted to float32 and multiplied as float32, never as TF32 or bfloat16.

    Args:
      equation: the equation of `jnp.einsum`.
      a, b: operands, in float32 or in the dtype in which they are stored.
      a_format, b_format: formats that hold the values of a and b.
    """
    # Tensor cores need both operands in one 16-bit format.
    dtype = a_format.dtype
    if a_format.dtype != b_format.dtype or dtype.itemsize != 2:
        dtype = jnp.dtype(jnp.float32)
    return jnp.einsum(
        equation,
        a.astype(dtype),
        b.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def seen_dot(
    equation: str, a: Array, b: Array, a_format: Format, b_format: Format, seen: Array | None
) -> Array:
    """Computes `dot` without the terms of hidden pairs, where a is 0 and 0 · NaN would be NaN.

    The terms of pairs that are seen do not change, so their NaN and infinities reach the result.

    Args:
      equation, a, b, a_format, b_format: as in `dot`; a is [B, K, G, T, S].
      seen: True where a pair is seen, broadcastable to a; None if every pair is seen.
    """

    if seen is None:
        return dot(equation, a, b, a_format, b_format)
    finite, float32 = jnp.isfinite(b), get_format("float32")
    # This product stays outside of the condition, so that it compiles only once: its code is long
    # if its sums are rounded.
    terms = dot(equation, a, jnp.where(finite, b, jnp.zeros_like(b)), a_format, b_format)

    def with_others(terms: Array, a: Array, b: Array, seen: Array) -> Array:
        """Adds the terms of seen pairs that are not finite."""
        shown = jnp.broadcast_to(seen, a.shape)
        ones, signs = shown.astype(jnp.float32), jnp.where(shown, jnp.sign(a), jnp.zeros_like(a))
        infinite = jnp.where(jnp.isinf(b), jnp.sign(b), jnp.zeros_like(b)).astype(jnp.float32)
        # How many terms are not finite, and how many more of them are +inf than −inf.
        count = dot(equation, ones, (~jnp.isfinite(b)).astype(jnp.float32), float32, float32)
        excess = dot(equation, signs.astype(jnp.float32), infinite, float32, float32)
        infinity = jnp.where(excess > 0, jnp.inf, -jnp.inf)
        sums = jnp.where(jnp.abs(excess) == count, infinity, jnp.nan)
        return terms + jnp.where(count == 0, jnp.float32(0), sums)

    all_finite = _all_finite(lax.stop_gradient(b))
    return lax.cond(all_finite, lambda terms, *_: terms, with_others, terms, a, b, seen)


@jax.custom_batching.custom_vmap
def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x))


@_all_finite.def_vmap
def _all_finite_of_batch(size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    """Answers once for the whole batch; one answer per element would compute both branches."""
    return _all_finite(x), False


def query_key_products(q: Array, k: Array) -> Array:
    """The products q kᵀ [B, K, G, T, S] of arrays grouped as in `layout`."""
    return dot("bkgth,bksh->bkgts", q, k, format_of(q), format_of(k))


LOG2E = math.log2(math.e)


def counts_in_scale(spec: Spec, extras: Extras) -> bool:
    """Whether the products q kᵀ are kept in place of S = scale · q kᵀ.

    The factor scale · log2 e then multiplies them once, in the exponent. With a soft cap c,
    tanh(scale · q kᵀ / c) is kept in place of c · tanh(scale · q kᵀ / c).

    S itself must be formed if it is rounded or if a bias is added to it, if its maximum m is
    rounded, or if the scale is not known to be positive. With `whole_max`, m may be rounded,
    because it is then a separate number M.
    """
    n = spec.numerics
    unit = _unit(spec, extras)
    in_range = unit is not None and 2.0**-64 < unit < 2.0**24
    m_is_a_score = n.exponent in ("scale_first", "unfused") and n.stats.is_identity
    counts = m_is_a_score or n.exponent == "whole_max"
    return counts and in_range and n.scores.is_identity and extras.bias is None


def score_unit(spec: Spec, extras: Extras) -> float:
    """The unit of the scores as they are kept: the scale, the soft cap, or 1.

    m has the same unit, except with `whole_max`.
    """
    unit = _unit(spec, extras)
    return unit if unit is not None and counts_in_scale(spec, extras) else 1.0


def _unit(spec: Spec, extras: Extras) -> float | None:
    """The unit of q kᵀ or of tanh in S; None if it is not known when the call is compiled."""
    if spec.soft_cap is not None:
        return spec.soft_cap
    return spec.scale if extras.scale is None else None


def capped(products: Array, spec: Spec, extras: Extras) -> Array:
    """Returns tanh(scale · q kᵀ / c) in float32, where scale / c is one factor, rounded once."""
    assert spec.soft_cap is not None
    if extras.scale is None:
        return jnp.tanh(products * jnp.float32(spec.scale / spec.soft_cap))
    return jnp.tanh(products * (extras.scale / jnp.float32(spec.soft_cap)))


def cap_slope(t: Array) -> Array:
    """The derivative of c · tanh(x / c) at t = tanh(x / c), 1 − t²."""
    # For t near 1 the difference 1 − t is exact, whereas 1 − t · t would round t · t first.
    return (jnp.float32(1) - t) * (jnp.float32(1) + t)


def powers(s: Array, m: Array, unit: float, of_m: float, exponent: str) -> Array:
    """Returns 2^(c s − c_m m) with c = unit · log2 e and c_m = of_m · log2 e; c_m m is rounded.

    Args:
      s: scores.
      m: what is subtracted, m or lse; broadcasts to s.
      unit, of_m: the units of the scores and of m.
      exponent: `scale_first` rounds c s − c_m m once, as a fused multiply-add; `unfused` rounds c s
        and the difference each. If c s or c_m m is beyond float32, (unit · s − of_m · m) · log2 e
        is the exponent in both.
    """
    if exponent == "unfused":
        subtracted = rounded_product(m, of_m * LOG2E)
        log2_p = rounded_product(s, unit * LOG2E) - subtracted
    else:
        subtracted = m * jnp.float32(of_m * LOG2E)
        log2_p = multiply_add(s, unit * LOG2E, -subtracted)
    # The lowest finite scores, which an additive mask produces, are beyond float32 in base 2. The
    # difference of two of them is not.
    fits = jnp.isfinite(s * jnp.float32(unit * LOG2E)) & jnp.isfinite(subtracted)
    difference = s * jnp.float32(unit) - m * jnp.float32(of_m)
    return jnp.exp2(jnp.where(fits, log2_p, difference * jnp.float32(LOG2E)))


def m_in_scores(m: Array, spec: Spec, extras: Extras) -> Array:
    """Converts m, in the unit in which a step keeps it, to units of S."""
    unit = LN2 if spec.numerics.exponent == "whole_max" else score_unit(spec, extras)
    return m if unit == 1 else m * jnp.float32(unit)


def scale_of(spec: Spec, extras: Extras) -> Array:
    """The factor of q kᵀ as a float32 scalar, which is traced if the caller's scale is traced."""
    return jnp.float32(spec.scale) if extras.scale is None else extras.scale
