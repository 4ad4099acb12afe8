"""What the trainer's kernels should compute, in float64 NumPy."""

import jax.numpy as jnp
import numpy as np

# Half an ulp of bfloat16, with room for the float32 arithmetic before the rounding.
BFLOAT16 = 2.0**-8 * 1.01


def logits_and_targets(width, rows=5, dtype="float32"):
    rng = np.random.default_rng(width)
    logits = 4 * rng.standard_normal((rows, width))
    logits[1] += 500
    logits[2] -= 500
    logits[3, width // 2] = 80  # one column has all the weight
    targets = np.array([0, width - 1, width // 2, width // 3, 2 * width // 3])
    return jnp.asarray(logits, dtype), jnp.asarray(targets, jnp.int32)


def exact_cross_entropy(logits, targets):
    logits, rows = np.asarray(logits, np.float64), np.arange(len(targets))
    m = logits.max(axis=-1, keepdims=True)
    lse = m + np.log(np.exp(logits - m).sum(axis=-1, keepdims=True))
    gradient = np.exp(logits - lse)
    gradient[rows, targets] -= 1
    return (lse - logits)[rows, targets], gradient


def exact_gelu(x):
    """GELU and its slope in float64."""
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    d_u = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    half = (1 + np.tanh(u)) / 2
    return x * half, half + x * d_u * (1 - np.tanh(u) ** 2) / 2
