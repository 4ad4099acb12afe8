"""Size and sign of an error, per head."""

import jax.numpy as jnp
from jaxtyping import Array, Float32


def signed_error(
    low: Float32[Array, "B T N F"], high: Float32[Array, "B T N F"]
) -> dict[str, Float32[Array, "N"]]:
    """Returns the mean, RMS, largest size and coherence of x = low − high, per head.

    The sums run over the n = B·T rows, each a vector x_t of F features (F = 1 for δ):

      mean       Σ x / (n F)                   signed
      rms        √(Σ ‖x_t‖² / (n F))           size (Golden et al., arXiv 2405.02803)
      max        max |x|
      coherence  ‖Σ_t x_t‖ / √(Σ_t ‖x_t‖²)     persistence of sign (arXiv 2510.04212)

    Coherence lies in [0, √n]. It is √n if every row has the same error, about 1 if signs are
    random, and 0 where there is no error at all. For independent random signs, whatever the sizes
    and F, P(coherence > t) is at most 2 exp(−t²/2) (Pinelis, Ann. Probab. 22, 1994, Theorem 3.5 in
    a Hilbert space). Cost: O(n F).
    """
    x = low - high
    squares = jnp.sum(x * x, axis=(0, 1, 3))
    total = jnp.sum(x, axis=(0, 1))
    norm = jnp.sqrt(jnp.sum(total * total, axis=-1))
    size = jnp.sqrt(jnp.where(squares == 0, jnp.float32(1), squares))
    return {
        "mean": jnp.mean(x, axis=(0, 1, 3)),
        "rms": root_mean_square(x),
        "max": jnp.max(jnp.abs(x), axis=(0, 1, 3)),
        "coherence": jnp.where(squares == 0, jnp.float32(0), norm / size),
    }


def root_mean_square(x: Float32[Array, "B T N F"]) -> Float32[Array, "N"]:
    """Returns √(Σ x² / (B T F)) per head, the size that an error is compared with."""
    return jnp.sqrt(jnp.mean(x * x, axis=(0, 1, 3)))
