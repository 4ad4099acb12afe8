"""Writes step.npz: q, k, v and dO of every attention layer of an NNX model, from one step.

python docs/examples/capture_nnx.py && lowprec-attn diagnose step.npz
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lowprec_attn import attention, diagnostics

LAYERS, HEADS, WIDTH, WORDS, LENGTH = 2, 4, 128, 256, 256


class Block(nnx.Module):
    """A layer of attention behind a norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            dtype=jnp.bfloat16,
            decode=False,
            attention_fn=attention.attention_fn(is_causal=True),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x + attention(norm(x)), [B, T, WIDTH]."""
        return x + self.attend(self.norm(x))


class Model(nnx.Module):
    """Embedding, layers of attention, projection to logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, T] to [B, T, WORDS]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: Model, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of each next token."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


model = Model(nnx.Rngs(0))
tokens = jax.random.randint(jax.random.key(0), (2, LENGTH + 1), 0, WORDS)

with diagnostics.capture() as taken:
    gradients = nnx.jit(nnx.grad(loss))(model, tokens)
taken.save("step.npz")
