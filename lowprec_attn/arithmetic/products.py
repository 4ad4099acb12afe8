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
    """A matrix product with float32 accumulation.

    Operands that both live in one 16-bit format go in as such. Otherwise both go in as float32 and
    are multiplied as float32, never as TF32 or bfloat16.

    Args:
      equation: as `jnp.einsum` takes it.
      a, b: operands, float32 or as stored.
      a_format, b_format: the formats that hold their values.
    """
    # Tensor cores take two operands of one 16-bit format.
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
    """`dot` without the terms of hidden pairs: there a is 0, and 0 · NaN would be NaN.

    A term of a pair that is seen stays as it is: NaN and infinities arrive.

    Args:
      equation, a, b, a_format, b_format: as `dot` takes them; a is [B, K, G, T, S].
      seen: broadcasts to a; None: every pair is.
    """

    if seen is None:
        return dot(equation, a, b, a_format, b_format)
    finite, float32 = jnp.isfinite(b), get_format("float32")
    # Outside of the condition: a product, which is long where its sums round, compiles once.
    terms = dot(equation, a, jnp.where(finite, b, jnp.zeros_like(b)), a_format, b_format)

    def with_others(terms: Array, a: Array, b: Array, seen: Array) -> Array:
        """Adds the terms that are not finite."""
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
    """One answer for all elements: a condition for each would compute both of its branches."""
    return _all_finite(x), False


def query_key_products(q: Array, k: Array) -> Array:
    """q kᵀ of arrays grouped as in `layout`, [B, K, G, T, S]."""
    return dot("bkgth,bksh->bkgts", q, k, format_of(q), format_of(k))


LOG2E = math.log2(math.e)


def counts_in_scale(spec: Spec, extras: Extras) -> bool:
    """Whether products q kᵀ stand for S = scale · q kᵀ, where they are multiplied once.

    With a soft cap c it is tanh(S / c) that stands for c · tanh(S / c).

    Where S is rounded, or a bias added to it, it has to be formed; likewise where m, its maximum,
    is rounded, and where the scale is not known to be positive. With `whole_max` m is a number of
    its own, M, and may be rounded.
    """
    n = spec.numerics
    unit = _unit(spec, extras)
    in_range = unit is not None and 2.0**-64 < unit < 2.0**24
    m_is_a_score = n.exponent in ("scale_first", "unfused") and n.stats.is_identity
    counts = m_is_a_score or n.exponent == "whole_max"
    return counts and in_range and n.scores.is_identity and extras.bias is None


def score_unit(spec: Spec, extras: Extras) -> float:
    """What scores and, but with `whole_max`, m count in: the scale, the soft cap, or 1."""
    unit = _unit(spec, extras)
    return unit if unit is not None and counts_in_scale(spec, extras) else 1.0


def _unit(spec: Spec, extras: Extras) -> float | None:
    """What scores would count in; None where it is not known before the call is compiled."""
    if spec.soft_cap is not None:
        return spec.soft_cap
    return spec.scale if extras.scale is None else None


def capped(products: Array, spec: Spec, extras: Extras) -> Array:
    """tanh(scale · q kᵀ / c) of products q kᵀ, float32; scale / c is one factor, rounded once."""
    assert spec.soft_cap is not None
    if extras.scale is None:
        return jnp.tanh(products * jnp.float32(spec.scale / spec.soft_cap))
    return jnp.tanh(products * (extras.scale / jnp.float32(spec.soft_cap)))


def cap_slope(t: Array) -> Array:
    """The derivative of c · tanh(x / c) at t = tanh(x / c), 1 − t²."""
    # Of t near 1 the difference is exact, and 1 − t · t would round t · t first.
    return (jnp.float32(1) - t) * (jnp.float32(1) + t)


def powers(s: Array, m: Array, unit: float, of_m: float, exponent: str) -> Array:
    """2^(c s − c_m m), c = unit · log2 e and c_m = of_m · log2 e; the last product is rounded.

    Args:
      s: scores.
      m: what is subtracted, m or lse, broadcasts to s.
      unit, of_m: what scores and m count in.
      exponent: `scale_first`, the first product and the sum rounded once; or `unfused`, each.
    """
    if exponent == "unfused":
        subtracted = rounded_product(m, of_m * LOG2E)
        return jnp.exp2(rounded_product(s, unit * LOG2E) - subtracted)
    return jnp.exp2(multiply_add(s, unit * LOG2E, -(m * jnp.float32(of_m * LOG2E))))


def m_in_scores(m: Array, spec: Spec, extras: Extras) -> Array:
    """m as a step keeps it, in units of S."""
    unit = LN2 if spec.numerics.exponent == "whole_max" else score_unit(spec, extras)
    return m if unit == 1 else m * jnp.float32(unit)


def scale_of(spec: Spec, extras: Extras) -> Array:
    """The factor of q kᵀ: known before the call is compiled, or an array."""
    return jnp.float32(spec.scale) if extras.scale is None else extras.scale
