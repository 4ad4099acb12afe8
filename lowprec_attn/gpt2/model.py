"""GPT-2 in Flax NNX: pre-norm blocks, no biases, tied embeddings, unrolled layers.

Parameters and the residual stream are float32; what enters a matrix product is rounded to
`activation_dtype` there, as autocast does.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Key

from lowprec_attn.gpt2.settings import AttentionSettings, HeadArithmetic, ModelSettings

# `lowprec_attn.attention.dot_product_attention`, or its form for a mesh.
Attend = Callable[..., Any]


class LayerRecord(NamedTuple):
    """What one layer computed: what diagnostics and the search for a non-finite value read.

    Attributes:
      x: normalised input of the attention, [B, T, d] (the X of arXiv 2510.04212).
      q, k, v: its projections, [B, T, N, H].
      o: attention output as handed to the projection, [B, T, N, H].
      residual: the residual stream after the layer, [B, T, d].
    """

    x: Array
    q: Array
    k: Array
    v: Array
    o: Array
    residual: Array


def _linear(
    features_in: int, features_out: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=False,
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(std),
        rngs=rngs,
    )


def _norm(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        width, epsilon=1e-5, use_bias=False, dtype=dtype, param_dtype=jnp.float32, rngs=rngs
    )


def init_std(settings: ModelSettings) -> float:
    """Standard deviation of the initial weights; see `ModelSettings.init`."""
    d = settings.width
    return {"gpt2": 0.02, "small_init": math.sqrt(2 / (5 * d)), "lecun_uniform": (3 * d) ** -0.5}[
        settings.init
    ]


class CausalSelfAttention(nnx.Module):
    """Multi-head causal attention with the arithmetic given per head."""

    def __init__(
        self, settings: ModelSettings, heads: tuple[HeadArithmetic, ...], rngs: nnx.Rngs
    ) -> None:
        d, dtype = settings.width, jnp.dtype(settings.activation_dtype)
        std = init_std(settings)
        self.qkv = _linear(d, 3 * d, std, dtype, rngs)
        self.out = _linear(d, d, std / math.sqrt(2 * settings.layers), dtype, rngs)
        self.num_heads = settings.heads
        self.scale_placement = settings.scale_placement
        self.numerics = tuple(head.numerics for head in heads)
        self.row_max = tuple(head.row_max for head in heads)

    def __call__(
        self, x: Array, attend: Attend, key: Key[Array, ""] | None, tap: Array | None
    ) -> tuple[Array, tuple[Array, Array, Array, Array]]:
        """The projected output, and q, k, v, O. `tap` is added to O: its gradient is dO."""
        b, t, d = x.shape
        head_size = d // self.num_heads
        q, k, v = (
            part.reshape(b, t, self.num_heads, head_size)
            for part in jnp.split(self.qkv(x), 3, axis=-1)
        )
        scale = head_size**-0.5
        if self.scale_placement == "qk":
            factor = jnp.asarray(math.sqrt(scale), q.dtype)
            q, k, scale = q * factor, k * factor, 1.0
        o = attend(
            q,
            k,
            v,
            is_causal=True,
            scale=scale,
            numerics=self.numerics,
            row_max=self.row_max,
            key=key,
        )
        if tap is not None:
            o = o + tap.astype(o.dtype)
        return self.out(o.reshape(b, t, d)), (q, k, v, o)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, settings: ModelSettings, heads: tuple[HeadArithmetic, ...], rngs: nnx.Rngs
    ) -> None:
        d, dtype = settings.width, jnp.dtype(settings.activation_dtype)
        std = init_std(settings)
        self.norm_1 = _norm(d, dtype, rngs)
        self.attention = CausalSelfAttention(settings, heads, rngs)
        self.norm_2 = _norm(d, dtype, rngs)
        self.mlp_in = _linear(d, 4 * d, std, dtype, rngs)
        self.mlp_out = _linear(4 * d, d, std / math.sqrt(2 * settings.layers), dtype, rngs)

    def __call__(
        self, residual: Array, attend: Attend, key: Key[Array, ""] | None, tap: Array | None
    ) -> tuple[Array, LayerRecord]:
        """The residual stream after the block, and the record of its attention."""
        x = self.norm_1(residual)
        y, (q, k, v, o) = self.attention(x, attend, key, tap)
        residual = residual + y.astype(jnp.float32)
        h = jax.nn.gelu(self.mlp_in(self.norm_2(residual)), approximate=True)
        residual = residual + self.mlp_out(h).astype(jnp.float32)
        return residual, LayerRecord(x, q, k, v, o, residual)


class GPT2(nnx.Module):
    """The decoder of Radford et al. (2019) without biases.

    Args:
      settings: shape and initialisation.
      attention: arithmetic of every head of every layer.
      rngs: source of the initial weights.

    Raises:
      ValueError: width is not a multiple of heads, or `attention` does not fit the shape.
    """

    def __init__(
        self, settings: ModelSettings, attention: AttentionSettings, rngs: nnx.Rngs
    ) -> None:
        if settings.width % settings.heads:
            raise ValueError(
                f"width {settings.width} does not divide into {settings.heads} heads; "
                "choose a multiple"
            )
        shape = [len(layer) for layer in attention.heads]
        if shape != [settings.heads] * settings.layers:
            raise ValueError(
                f"attention has heads {shape}, the model {settings.layers} layers "
                f"of {settings.heads}"
            )
        dtype = jnp.dtype(settings.activation_dtype)
        normal = nnx.initializers.normal(init_std(settings))
        embed = {"dtype": jnp.float32, "param_dtype": jnp.float32, "embedding_init": normal}
        self.tokens = nnx.Embed(settings.vocab_size, settings.width, **embed, rngs=rngs)
        self.positions = nnx.Embed(settings.context, settings.width, **embed, rngs=rngs)
        self.blocks = nnx.List([Block(settings, heads, rngs) for heads in attention.heads])
        self.norm = _norm(settings.width, dtype, rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        attend: Attend,
        key: Key[Array, ""] | None = None,
        taps: tuple[Float[Array, "B T N H"], ...] | None = None,
    ) -> tuple[Float[Array, "B T d"], tuple[LayerRecord, ...]]:
        """The normalised last hidden state, and one record per layer.

        Args:
          tokens: ids below vocab_size.
          attend: `attention.dot_product_attention` or its form for a mesh.
          key: PRNG key for stochastic rounding.
          taps: added to every layer's attention output; zeros whose gradients are dO.
        """
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        residual = self.tokens(tokens) + self.positions(positions)[None]
        records = []
        for i, block in enumerate(self.blocks):
            block_key = None if key is None else jax.random.fold_in(key, i)
            tap = None if taps is None else taps[i]
            residual, record = block(residual, attend, block_key, tap)
            records.append(record)
        return self.norm(residual), tuple(records)


def parameter_count(settings: ModelSettings) -> int:
    """Number of weights: embeddings, 12 d² per block, and the scales of 2 L + 1 norms."""
    d, layers = settings.width, settings.layers
    embeddings = (settings.vocab_size + settings.context) * d
    return embeddings + layers * 12 * d * d + (2 * layers + 1) * d


# Rows of logits are formed in chunks of about this many numbers, never all at once in float32.
_LOGITS_PER_CHUNK = 2**26


def cross_entropy(
    hidden: Float[Array, "B T d"], embedding: Float[Array, "V d"], targets: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of the tied output layer: logits = hidden · embeddingᵀ.

    The product takes operands in hidden's dtype and accumulates in float32; logits and the
    log-sum-exp are float32, formed and recomputed in chunks of the sequence axis.
    """
    b, t, d = hidden.shape
    table = embedding.astype(hidden.dtype)
    chunks = _chunks(t, b * embedding.shape[0])

    @jax.checkpoint
    def chunk_loss(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        x, y = chunk
        logits = jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(logits, y[..., None], axis=-1)[..., 0]
        return total + jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked), None

    xs = hidden.reshape(b, chunks, t // chunks, d).swapaxes(0, 1)
    ys = targets.reshape(b, chunks, t // chunks).swapaxes(0, 1)
    total, _ = lax.scan(chunk_loss, jnp.float32(0), (xs, ys))
    return total / jnp.float32(b * t)


def _chunks(length: int, logits_per_position: int) -> int:
    """The smallest divisor of length that keeps a chunk within _LOGITS_PER_CHUNK, if any does."""
    for chunks in range(1, length + 1):
        if length % chunks == 0 and length // chunks * logits_per_position <= _LOGITS_PER_CHUNK:
            return chunks
    return length
