"""The effect of errors on W_Q, and how far weights have grown or drifted.

Weights of a projection are [D, N, H] as in Flax: model width, heads, head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


class Projection(NamedTuple):
    """How q follows from X W_Q where the two differ: by RoPE, QK-norm or a factor.

    Attributes:
      values: X W_Q, [B, T, N, H].
      query_of: returns q from such values, head by head, float32 to float32. It may be a
        `jax.tree_util.Partial` of a function and its arrays, which can be passed through `jit`.
    """

    values: Float[Array, "B T N H"]
    query_of: Callable[[Float32[Array, "B T n H"]], Float32[Array, "B T n H"]]

    def pullback(self) -> Callable[[Array], Array]:
        """Returns the linear map from a gradient by q, or a part of one, to a gradient by X W_Q."""
        _, pulled = jax.vjp(self.query_of, self.values.astype(jnp.float32))
        return lambda dq: pulled(dq)[0]


def query_weight_gradient(
    dq: Float32[Array, "B T N H"], x: Float[Array, "B T D"]
) -> Float32[Array, "D N H"]:
    """Returns dW_Q = Σ_T X[T] dQ[T]ᵀ for q = X W_Q, in float32. Cost: 2·B·T·N·H·D FLOP.

    Args:
      dq: the gradient of the loss by q, [B, T, N, H].
      x: the input of the query projection, [B, T, D].
    """
    return _einsum("btd,btnh->dnh", x, dq)


def outer_product_signals(
    pk: Float32[Array, "B T N H"], x: Float[Array, "B T D"]
) -> tuple[Float32[Array, "N"], Float32[Array, "N D H"]]:
    """Returns the mean cosine between different tokens' R_T = (PK)[T]ᵀ X[T], and M, per head.

    At 1 all tokens push W_Q along the same rank-one matrix, as arXiv 2510.04212 claims. At about 0
    errors with a persistent sign do not add up. It is NaN where n < 2.

    Let R̂_T = R_T / ‖R_T‖ for the n tokens where neither factor is 0. M = Σ_T R̂_T / n is the common
    direction, which is 0 for a head without such a token. ⟨M, M′⟩ of two steps is the mean cosine
    between R_T of one step and R_T of the other. No R̂_T is formed, because
    Σ_{T≠U} ⟨R̂_T, R̂_U⟩ = ‖Σ R̂_T‖² − n. Cost: 2·B·T·N·H·D FLOP, O(B T N H + D N H) memory.
    """
    total, n = _unit_outer_products(pk, x)
    common = total / jnp.maximum(n, jnp.float32(1))[None, :, None]
    similarity = (jnp.sum(total * total, axis=(0, 2)) - n) / (n * (n - 1))
    return similarity, jnp.moveaxis(common, 1, 0)


def across_steps(
    now: Float32[Array, "N D H"], before: Float32[Array, "N D H"]
) -> dict[str, Float32[Array, "N"]]:
    """Returns how similar the matrices (PK)[T]ᵀ X[T] of tokens T are at two steps, per head.

    arXiv 2510.04212 (section 3) claims that these matrices are nearly one matrix for all tokens
    *and all training steps*, so that Σ (δ_lp − δ_hp)[T] (PK)[T]ᵀ X[T] grows with every step where
    the errors of δ keep their sign. M and M′ are the means of these matrices, each divided by its
    norm, over the tokens of the two steps.

      outer_product_similarity_across_steps  ⟨M, M′⟩ in [−1, 1]: the mean cosine between the matrix
                                             of a token at one step and the matrix of a token at the
                                             other, over all pairs. Where it equals
                                             outer_product_similarity of `attention_signals`, tokens
                                             are equally alike across the two steps and within one.
      common_direction_across_steps          ⟨M, M′⟩ / (‖M‖ ‖M′‖) in [−1, 1]: whether the tokens of
                                             both steps share one direction. 0 where M or M′ is 0.

    Args:
      now: M, as `attention_signals(..., common_direction=True)` returns it.
      before: M′, the same of another step.
    """
    products = jnp.sum(now * before, axis=(1, 2))
    sizes = jnp.sqrt(jnp.sum(now * now, axis=(1, 2)) * jnp.sum(before * before, axis=(1, 2)))
    return {
        "outer_product_similarity_across_steps": products,
        "common_direction_across_steps": products / jnp.where(sizes == 0, jnp.float32(1), sizes),
    }


def _unit_outer_products(pk: Array, x: Array) -> tuple[Array, Array]:
    """Returns Σ R̂_T [D, N, H] and the number n [N] of tokens in the sum."""
    x = x.astype(jnp.float32)
    pk_size = jnp.sqrt(jnp.sum(pk * pk, axis=-1, keepdims=True))
    x_size = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    is_counted = (pk_size > 0) & (x_size[:, :, None] > 0)
    directions = jnp.where(is_counted, pk / jnp.where(pk_size > 0, pk_size, jnp.float32(1)), 0.0)
    total = query_weight_gradient(directions, x / jnp.where(x_size > 0, x_size, jnp.float32(1)))
    return total, jnp.sum(is_counted.astype(jnp.float32), axis=(0, 1, 3))


_SQUARINGS = 20


def spectral_norm(w: Float[Array, "D N H"]) -> Float32[Array, "N"]:
    """Returns the largest singular value of every head's [D, H] slice W.

    It is the square root of the largest eigenvalue of G = WᵀW, which is computed as
    λ = tr(Gᵖ G) / tr(Gᵖ) with p = 2²⁰, reached by squaring. λ is at most the largest eigenvalue.
    Its relative error is at most (H − 1) / (e p), whatever the spectrum: 9·10⁻⁵ for H = 256. Cost:
    2·D·N·H² + 40·N·H³ FLOP.

    Args:
      w: weights of a projection: model width, heads, head size.
    """
    # An eigenvalue solver would be a library call. On a CPU such a call was seen to block for ever
    # inside a larger jitted program.
    gram = _einsum("dnh,dnj->nhj", w, w)
    trace = jnp.trace(gram, axis1=1, axis2=2)[:, None, None]

    def square(_: Array | int, power: Array) -> Array:
        power = _einsum("nhi,nij->nhj", power, power)
        return power / jnp.trace(power, axis1=1, axis2=2)[:, None, None]

    unit = gram / jnp.where(trace > 0, trace, jnp.float32(1))
    power = lax.fori_loop(0, _SQUARINGS, square, unit)
    largest = jnp.sum(power * gram, axis=(1, 2))  # tr(Gᵖ G), both symmetric; tr(Gᵖ) = 1
    return jnp.where(trace[:, 0, 0] > 0, jnp.sqrt(largest), jnp.float32(0))


def first_share(w: Float[Array, "D N H"]) -> Float32[Array, "N"]:
    """Returns σ₁² / Σ σ² of every head's [D, H] slice: 1 for a matrix of rank one, 0 for zero."""
    total = frobenius_norm(w)
    share = spectral_norm(w) / jnp.where(total > 0, total, jnp.float32(1))
    return share * share


def frobenius_norm(w: Float[Array, "D N H"]) -> Float32[Array, "N"]:
    """Returns √(Σ w²) of every head's [D, H] slice."""
    w = w.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(w * w, axis=(0, 2)))


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        equation,
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
