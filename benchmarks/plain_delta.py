"""Trains with an error of δ of one sign, without this library's arithmetic or trainer.

`python -m benchmarks.plain_delta` trains a small GPT in plain JAX and float32. The backward pass of
its attention is written out, and δ = rowsum(dO ∘ O) is off by `--size` of itself: never, always
upwards, always downwards, or with a random sign per row. It prints the loss and the largest score.
This checks results/failure/delta_size_cpu independently: with upward errors the scores and then the
loss run away, and otherwise they do not. There are four runs per seed, of about 20 seconds each on
two CPU cores.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.data import builtin_text

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 2, 4, 64, 64, 8
VOCABULARY = 257  # bytes, and the end of a text
HEAD = WIDTH // HEADS
RATE, WARM_UP, B1, B2 = 4e-3, 100, 0.9, 0.95
SIGNS = ("none", "positive", "negative", "random")
SEEN = np.tril(np.ones((CONTEXT, CONTEXT), bool))


def scores(q: Array, k: Array) -> Array:
    """Returns the scores [B, N, T, T] of all keys, without a causal mask."""
    return jnp.einsum("bnth,bnsh->bnts", q, k) / HEAD**0.5


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(q: Array, k: Array, v: Array, key: Array, sign: str, size: float) -> Array:
    """Returns O of causal attention of q, k, v [B, N, T, H]; δ is wrong in the backward pass."""
    return _forward(q, k, v, key, sign, size)[0]


def _forward(q: Array, k: Array, v: Array, key: Array, sign: str, size: float) -> tuple[Array, Any]:
    s = jnp.where(SEEN, scores(q, k), -1e30)
    p = jax.nn.softmax(s)
    o = jnp.einsum("bnts,bnsh->bnth", p, v)
    return o, (q, k, v, p, o, key)


def _backward(sign: str, size: float, saved: Any, do: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, p, o, key = saved
    dp = jnp.einsum("bnth,bnsh->bnts", do, v)
    delta = jnp.sum(do * o, axis=-1, keepdims=True)
    signs = {
        "none": jnp.zeros_like(delta),
        "positive": jnp.ones_like(delta),
        "negative": -jnp.ones_like(delta),
        "random": jax.random.rademacher(key, delta.shape, jnp.float32),
    }
    delta = delta + signs[sign] * size * jnp.abs(delta)
    ds = p * (dp - delta) / HEAD**0.5
    dq = jnp.einsum("bnts,bnsh->bnth", ds, k)
    dk = jnp.einsum("bnts,bnth->bnsh", ds, q)
    return dq, dk, jnp.einsum("bnts,bnth->bnsh", p, do), None


attend.defvjp(_forward, _backward)


def parameters(key: Array) -> Any:
    """Draws the initial weights from a normal distribution.

    Its standard deviation is 0.02, and less for projections into the residual stream. The embedding
    is also the output head.
    """
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def normal(*shape: int, of: float = 0.02) -> Array:
        return of * jax.random.normal(next(keys), shape)

    def block() -> dict[str, Array]:
        one, less = jnp.ones(WIDTH), 0.02 / (2 * LAYERS) ** 0.5
        return {
            "norm": one,
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH, of=less),
            "norm_mlp": one,
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH, of=less),
        }

    embedding, places = normal(VOCABULARY, WIDTH), normal(CONTEXT, WIDTH)
    return {
        "embedding": embedding,
        "places": places,
        "blocks": [block() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
    }


def normalized(x: Array, gain: Array) -> Array:
    """Applies LayerNorm without a bias."""
    x = x - x.mean(axis=-1, keepdims=True)
    return gain * x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def loss(w: Any, text: Array, key: Array, sign: str, size: float) -> tuple[Array, Array]:
    """Returns the mean cross-entropy of the bytes [B, T + 1], and the largest |score|."""
    x, largest = w["embedding"][text[:, :-1]] + w["places"], jnp.float32(0)
    for i, block in enumerate(w["blocks"]):
        parts = jnp.split(normalized(x, block["norm"]) @ block["qkv"], 3, axis=-1)
        q, k, v = (y.reshape(BATCH, CONTEXT, HEADS, HEAD).swapaxes(1, 2) for y in parts)
        seen = jnp.where(SEEN, jnp.abs(jax.lax.stop_gradient(scores(q, k))), 0)
        largest = jnp.maximum(largest, seen.max())
        o = attend(q, k, v, jax.random.fold_in(key, i), sign, size)
        x = x + o.swapaxes(1, 2).reshape(BATCH, CONTEXT, WIDTH) @ block["out"]
        x = x + jax.nn.gelu(normalized(x, block["norm_mlp"]) @ block["up"]) @ block["down"]
    logits = jax.nn.log_softmax(normalized(x, w["norm"]) @ w["embedding"].T)
    return -jnp.take_along_axis(logits, text[:, 1:, None], axis=-1).mean(), largest


@partial(jax.jit, static_argnames=("sign", "size"))
def step(state: Any, text: Array, key: Array, *, sign: str, size: float) -> tuple[Any, Array]:
    """Takes a step of Adam with the gradient clipped at norm 1; returns state, (loss, |score|).

    The score is the largest of all layers.
    """
    w, mean, square, t = state
    (value, largest), g = jax.value_and_grad(loss, has_aux=True)(w, text, key, sign, size)
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(g)))
    g = jax.tree.map(lambda x: x / jnp.maximum(norm, 1.0), g)
    mean = jax.tree.map(lambda m, x: B1 * m + (1 - B1) * x, mean, g)
    square = jax.tree.map(lambda v, x: B2 * v + (1 - B2) * x * x, square, g)
    t = t + 1
    rate = RATE * jnp.minimum(1, t / WARM_UP)

    def update(x: Array, m: Array, v: Array) -> Array:
        return x - rate * (m / (1 - B1**t)) / (jnp.sqrt(v / (1 - B2**t)) + 1e-8)

    return (jax.tree.map(update, w, mean, square), mean, square, t), jnp.stack([value, largest])


def batches(seed: int) -> Iterator[np.ndarray]:
    """Yields random windows of the built-in text, bytes [B, T + 1], without end."""
    text, rng = builtin_text.load().train.ids, np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        yield np.stack([text[i : i + CONTEXT + 1] for i in starts]).astype(np.int32)


def train(sign: str, size: float, seed: int, steps: int) -> np.ndarray:
    """Trains, and returns the loss and the largest |score| of every step [steps, 2]."""
    w = parameters(jax.random.key(seed))
    zeros = jax.tree.map(jnp.zeros_like, w)
    state, text, seen = (w, zeros, zeros, jnp.float32(0)), batches(seed), []
    for t in range(steps):
        key = jax.random.fold_in(jax.random.key(seed), t)
        state, measured = step(state, jnp.asarray(next(text)), key, sign=sign, size=size)
        seen.append(measured)
    return np.asarray(jnp.stack(seen))


def main() -> None:
    """Trains with each sign and seed, and prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=0.0014, help="of δ (bfloat16's: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--signs", nargs="+", choices=SIGNS, default=SIGNS)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    for seed in args.seeds:
        for sign in args.signs:
            measured = train(sign, args.size, seed, args.steps)
            least, last = measured[:, 0].min(), measured[-50:, 0].mean()
            print(
                f"seed {seed}, {sign:8}  loss {last:.2f} (least {least:.2f}),"
                f" largest score {measured[-1, 1]:,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
