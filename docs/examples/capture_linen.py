"""Writes step.npz: q, k, v and dO of every attention layer of a Linen model, from one step.

python docs/examples/capture_linen.py && lowprec-attn diagnose step.npz
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from lowprec_attn import attention, diagnostics

LAYERS, HEADS, WIDTH, WORDS, LENGTH = 2, 4, 128, 256, 256


class Model(nn.Module):
    """Embedding, layers of attention, projection to logits."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, T] to [B, T, WORDS]."""
        x = nn.Embed(WORDS, WIDTH)(tokens)
        for _ in range(LAYERS):
            attend = nn.MultiHeadDotProductAttention(
                HEADS,
                dtype=jnp.bfloat16,
                # Instead of a mask: kernels skip the tiles above the diagonal.
                attention_fn=attention.attention_fn(is_causal=True),
            )
            x = x + attend(nn.LayerNorm()(x))
        return nn.Dense(WORDS)(x)


def loss(params: dict, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token."""
    logits = model.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


model = Model()
tokens = jax.random.randint(jax.random.key(0), (2, LENGTH + 1), 0, WORDS)
params = jax.jit(model.init)(jax.random.key(1), tokens)

with diagnostics.capture() as taken:
    gradients = jax.jit(jax.grad(loss))(params, tokens)
taken.save("step.npz")
