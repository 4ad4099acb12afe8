"""A Llama-style decoder in Flax NNX: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The model follows Touvron et al. (arXiv 2302.13971, 2307.09288). Residual stream, formats and
initialisation are the same as in `gpt2.model`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.gpt2.layers import embed
from lowprec_attn.gpt2.model import (
    Attend,
    Attended,
    Block,
    Decoder,
    about_common_vector,
    init_std,
    linear,
    require_shape,
    three_times,
)
from lowprec_attn.gpt2.settings import AttentionSettings
from lowprec_attn.llama.layers import RMSNorm, normalize_and_rotate, rotation, swiglu
from lowprec_attn.llama.settings import LlamaSettings


class LlamaAttention(nnx.Module):
    """Grouped-query causal attention; each group of query heads has an arithmetic of its own."""

    def __init__(
        self, settings: LlamaSettings, arithmetic: tuple[HeadGroup, ...], rngs: nnx.Rngs
    ) -> None:
        d, n, h = settings.width, settings.heads, settings.head_size
        k, v = settings.kv_heads, settings.value_size
        self.query = linear(settings, d, n * h, rngs)
        self.key = linear(settings, d, k * h, rngs)
        self.value = linear(settings, d, k * v, rngs)
        self.out = linear(settings, n * v, d, rngs, math.sqrt(2 * settings.layers))
        if settings.qk_norm:
            self.query_norm = nnx.Param(jnp.ones((h,), jnp.float32))
            self.key_norm = nnx.Param(jnp.ones((h,), jnp.float32))
        if settings.sinks:
            self.sinks = nnx.Param(jnp.zeros((n,), jnp.float32))
        self.settings = settings
        self.arithmetic = arithmetic

    def __call__(
        self, x: Array, attend: Attend, key: Key[Array, ""] | None, tap: Array | None
    ) -> Attended:
        """Returns the output and its intermediates. `tap` is added to O, so its gradient is dO."""
        of, (b, t, _) = self.settings, x.shape
        with jax.named_scope("projections"):
            of_query, of_key, of_value = three_times(x)
            projected = self.query(of_query).reshape(b, t, of.heads, of.head_size)
            k = self.key(of_key).reshape(b, t, of.kv_heads, of.head_size)
            v = self.value(of_value).reshape(b, t, of.kv_heads, of.value_size)
        with jax.named_scope("rotation"):
            norms = (self.query_norm[...], self.key_norm[...]) if of.qk_norm else (None, None)
            q, k = (
                _rotated(of, norm, t)(array).astype(x.dtype)
                for array, norm in zip((projected, k), norms, strict=True)
            )
        with jax.named_scope("attention"):
            given = attend(
                q,
                k,
                v,
                is_causal=True,
                scale=score_scale(of)[0],
                logits_soft_cap=of.soft_cap,
                sinks=self.sinks[...] if of.sinks else None,
                numerics=self.arithmetic,
                rng_key=key,
                tap=tap,
            )
        with jax.named_scope("projections"):
            return Attended(self.out(given.o.reshape(b, t, -1)), q, k, v, given, projected)


class LlamaBlock(Block):
    """x + attention(norm(x)), then x + W_out swiglu(W_gate norm(x), W_in norm(x))."""

    def __init__(
        self, settings: LlamaSettings, arithmetic: tuple[HeadGroup, ...], rngs: nnx.Rngs
    ) -> None:
        d, f, dtype = settings.width, settings.hidden, settings.activation_dtype
        self.norm_1 = RMSNorm(d, settings.norm_eps, dtype, rngs)
        self.attention = LlamaAttention(settings, arithmetic, rngs)
        self.norm_2 = RMSNorm(d, settings.norm_eps, dtype, rngs)
        self.mlp_gate = linear(settings, d, f, rngs)
        self.mlp_in = linear(settings, d, f, rngs)
        self.mlp_out = linear(settings, f, d, rngs, math.sqrt(2 * settings.layers))

    def mlp(self, x: Array) -> Array:
        """The second half of the block, [B, T, d]."""
        return self.mlp_out(swiglu(self.mlp_gate(x), self.mlp_in(x)))


class Llama(Decoder):
    """The decoder.

    Args:
      settings: shape and initialisation.
      attention: arithmetic of every query head of every layer.
      rngs: source of the initial weights.

    Raises:
      ValueError: `attention` does not fit the shape.
    """

    def __init__(
        self, settings: LlamaSettings, attention: AttentionSettings, rngs: nnx.Rngs
    ) -> None:
        require_shape(settings, attention)
        normal = nnx.initializers.normal(init_std(settings))
        rows = about_common_vector(normal, c) if (c := settings.embedding_mean) else normal
        table = {"param_dtype": jnp.float32, "dtype": jnp.float32, "embedding_init": rows}
        shape = (settings.vocab_size, settings.width)
        self.tokens = nnx.Embed(*shape, **table, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(settings, layer, rngs) for layer in attention.layers])
        self.norm = RMSNorm(settings.width, settings.norm_eps, settings.activation_dtype, rngs)
        if not settings.tied:
            self.head = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.tied = settings.tied
        self.remat = settings.remat

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """The rows of the embedding table."""
        return embed(self.tokens.embedding[...], None, tokens)

    @property
    def output_table(self) -> Float[Array, "V d"]:
        """The output layer, or the embedding table if the two are tied."""
        return (self.tokens.embedding if self.tied else self.head)[...]


def _rotated(settings: LlamaSettings, norm: Array | None, length: int) -> Partial:
    tables = rotation(length, settings.head_size, settings.rope_theta)
    of_norm = None if norm is None else (norm, jnp.float32(settings.norm_eps))
    return Partial(normalize_and_rotate, tables, of_norm)


def query_of(settings: LlamaSettings, weights: Any, length: int) -> Partial:
    """Returns a function from X W_Q to q [B, T, N, H]: a norm, if there is one, and the rotation.

    Args:
      settings: settings of the model.
      weights: the parameters of the attention of a layer.
      length: T.
    """
    return _rotated(settings, weights["query_norm"][...] if settings.qk_norm else None, length)


def score_scale(settings: LlamaSettings) -> tuple[float, float]:
    """Returns the factor of q·k in a score, and 1, because `query_of` is never None here."""
    return float(settings.head_size**-0.5), 1.0


def parameter_count(settings: LlamaSettings) -> int:
    """Number of weights of the blocks, the last norm, the embedding and an untied output layer.

    A block has W_Q, W_K, W_V, W_O, the three matrices of the MLP and the scales of two norms. It
    may also have the scales of the norms of q and k, and sinks.
    """
    s = settings
    queries_and_keys = (s.heads + s.kv_heads) * s.head_size
    values_and_outputs = (s.heads + s.kv_heads) * s.value_size
    block = s.width * (queries_and_keys + values_and_outputs + 3 * s.hidden + 2)
    block += 2 * s.head_size * s.qk_norm + s.heads * s.sinks
    tables = (1 if s.tied else 2) * s.vocab_size * s.width
    return s.layers * block + tables + s.width


def product_weights(settings: LlamaSettings) -> int:
    """Number of weights without a table that is only looked up; the others enter matrix products.

    Norms and sinks, which are few, count too.
    """
    looked_up = 0 if settings.tied else settings.vocab_size * settings.width
    return parameter_count(settings) - looked_up


def kept_values(settings: LlamaSettings) -> int:
    """Number of values per token and layer that the backward pass reads and no compiler recomputes.

    They are the inputs of both halves of a block, q, k, v and O, and gate and up of the MLP.
    """
    s = settings
    return 2 * s.width + (s.heads + s.kv_heads) * (s.head_size + s.value_size) + 2 * s.hidden
