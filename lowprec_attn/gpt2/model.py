"""GPT-2 in Flax NNX: pre-norm blocks, biases on request, tied embeddings, unrolled layers.

Parameters and the residual stream are float32. Matrix products round their operands to
`activation_dtype`, as autocast does.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import planes
from lowprec_attn.arithmetic.transforms import CHECKPOINT_NAME
from lowprec_attn.gpt2.layers import LayerNorm, embed, mlp
from lowprec_attn.gpt2.settings import AttentionSettings, ModelSettings, Remat


@dataclasses.dataclass(frozen=True)
class Attend:
    """Attention as the model calls it.

    Attributes:
      function: `lowprec_attn.attention.dot_product_attention`, or its form for a mesh.
      packed: whether one product forms q, k and v, and attention takes its result as one array.
        This is for kernels that read such an array. Others would have to split it by copies.
      max_logit: whether attention also returns the largest scores.
    """

    function: Callable[..., Any]
    packed: bool = False
    max_logit: bool = False

    def __call__(self, *qkv: Array, tap: Array | None, **options: Any) -> "Given":
        """Calls the function, and adds the tap to O if there is one."""
        if tap is not None:
            options["return_residual"] = True
        if self.max_logit:
            options["return_max_logit"] = True
        given = self.function(*qkv, **options)
        o, *others = given if isinstance(given, tuple) else (given,)
        lse = None if tap is None else others.pop(0)
        o = o if tap is None else o + tap.astype(o.dtype)
        return Given(o, lse, others[0] if self.max_logit else None)


class Given(NamedTuple):
    """The results of attention: O, lse if there is a tap, the largest scores if requested."""

    o: Array
    lse: Array | None
    max_logit: Array | None


class LayerRecord(NamedTuple):
    """Arrays of one layer, for diagnostics and for the search for a non-finite value.

    Attributes:
      x: normalised input of the attention, [B, T, d] (the X of arXiv 2510.04212).
      q, k, v: projections of x as attention takes them, [B, T, N, H].
      o: attention output as handed to the projection, [B, T, N, H].
      residual: the residual stream after the layer, [B, T, d].
      lse: log of the row sums of exp(scores), float32 [B, T, N]; None without a tap.
      projected: x W_Q if a norm or a rotation turns it into q, else None; see `query_of`.
      max_logit: the largest score of every head, float32 [B, N]; None if it was not requested.
    """

    x: Array
    q: Array
    k: Array
    v: Array
    o: Array
    residual: Array
    lse: Array | None = None
    projected: Array | None = None
    max_logit: Array | None = None


class Attended(NamedTuple):
    """The results of a block's attention: its projected output, and fields of `LayerRecord`."""

    y: Array
    q: Array
    k: Array
    v: Array
    given: Given
    projected: Array | None


class _Linear(nnx.Linear):
    """An `nnx.Linear` that reshapes its input to one matrix of rows.

    On a CPU, JAX 0.11 multiplies one bfloat16 matrix twenty times faster than a stack of matrices.
    """

    def __call__(self, inputs: Array, *args: Any, **kwargs: Any) -> Array:
        rows = super().__call__(inputs.reshape(-1, inputs.shape[-1]), *args, **kwargs)
        return rows.reshape(*inputs.shape[:-1], rows.shape[-1])


def linear(
    settings: Any, features_in: int, features_out: int, rngs: nnx.Rngs, divisor: float = 1
) -> nnx.Linear:
    """Returns x W + b with float32 parameters and operands in `activation_dtype`.

    W starts as N(0, σ²), with σ = `init_std` / `divisor`. `biases` says whether there is a b.
    """
    dtype = jnp.dtype(settings.activation_dtype)
    return _Linear(
        features_in,
        features_out,
        use_bias=bool(settings.biases),
        dtype=dtype,
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(init_std(settings) / divisor),
        # By default JAX computes a float32 product in TF32 on a GPU, and in bfloat16 on a TPU.
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        rngs=rngs,
    )


def init_std(settings: Any) -> float:
    """Standard deviation of a model's initial weights; see `ModelSettings.init`."""
    d = settings.width
    stds = {"gpt2": 0.02, "small_init": math.sqrt(2 / (5 * d)), "lecun_uniform": (3 * d) ** -0.5}
    return stds[settings.init]


def about_common_vector(init: Callable[..., Array], size: float) -> Callable[..., Array]:
    """Returns an initialiser that adds one random vector of entries ±`size` to all rows."""

    def rows(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
        of_rows, of_signs = jax.random.split(key)
        signs = jax.random.rademacher(of_signs, (1, shape[1]), dtype)
        return init(of_rows, shape, dtype) + dtype(size) * signs

    return rows


@jax.custom_vjp
def three_times(x: Array) -> tuple[Array, Array, Array]:
    """Returns x for three products, and fixes the order in which their gradients are added."""
    return x, x, x


def _sum_of_gradients(_: None, gradients: tuple[Array, Array, Array]) -> tuple[Array]:
    """Adds the gradients in an order that needs no separate pass on a GPU."""
    # If the left operand of a sum is a product, XLA's GPU compiler lets the product add to the
    # right operand. JAX would put the sum of the last two gradients on the left.
    first, second, third = gradients
    return (first + (second + third),)


three_times.defvjp(lambda x: (three_times(x), None), _sum_of_gradients)


class HeadNorm(nnx.Module):
    """x / √(mean x² + 1e-6) · g over the H channels of a head; all heads share the learned g.

    Applied to queries and keys, it bounds the scores. Its place before the scale 1/√H and the shape
    of g follow Dehghani et al. (arXiv 2302.05442), who also subtract the mean. Henry et al.
    (arXiv 2010.04245) divide by the norm, and learn one number in place of 1/√H. The norm is
    computed in float32 and rounded once, to `dtype`.

    Args:
      head_size: H.
      dtype: dtype of the result.
      rngs: random streams, which every layer takes; g starts at 1.
    """

    def __init__(self, head_size: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(
            head_size, epsilon=1e-6, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs
        )
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Normalises x for every head and token."""
        with jax.numpy_rank_promotion("allow"):  # Flax leaves out the leading axes of g
            return self.norm(x.astype(jnp.float32)).astype(self.dtype)


class CausalSelfAttention(nnx.Module):
    """Multi-head causal attention; each group of heads has an arithmetic of its own."""

    def __init__(
        self, settings: ModelSettings, arithmetic: tuple[HeadGroup, ...], rngs: nnx.Rngs
    ) -> None:
        d = settings.width
        self.query = linear(settings, d, d, rngs)
        self.key = linear(settings, d, d, rngs)
        self.value = linear(settings, d, d, rngs)
        self.out = linear(settings, d, d, rngs, math.sqrt(2 * settings.layers))
        self.qk_norm = settings.qk_norm
        if self.qk_norm:
            dtype = jnp.dtype(settings.activation_dtype)
            self.query_norm = HeadNorm(d // settings.heads, dtype, rngs)
            self.key_norm = HeadNorm(d // settings.heads, dtype, rngs)
        self.num_heads = settings.heads
        self.scale_placement = settings.scale_placement
        self.arithmetic = arithmetic

    def __call__(
        self, x: Array, attend: Attend, key: Key[Array, ""] | None, tap: Array | None
    ) -> Attended:
        """Returns the output and its intermediates. `tap` is added to O, so its gradient is dO."""
        b, t, d = x.shape
        scale = (d // self.num_heads) ** -0.5
        with jax.named_scope("projections"):
            project = self._packed_projection if attend.packed else self._projections
            qkv: tuple[Array, ...] = project(x)
            projected = None
            if self.qk_norm:
                projected = planes(*qkv)[0]
                qkv = self._normalized(qkv)
            if self.scale_placement == "qk":
                qkv, scale = _scaled_qk(qkv, math.sqrt(scale)), 1.0
        with jax.named_scope("attention"):
            given = attend(
                *qkv, tap=tap, is_causal=True, scale=scale, numerics=self.arithmetic, rng_key=key
            )
        with jax.named_scope("projections"):
            return Attended(self.out(given.o.reshape(b, t, d)), *planes(*qkv), given, projected)

    def _projections(self, x: Array) -> tuple[Array, Array, Array]:
        """Returns q, k and v [B, T, N, H], formed by three products."""
        heads = (*x.shape[:2], self.num_heads, -1)
        of_query, of_key, of_value = three_times(x)
        return (
            self.query(of_query).reshape(heads),
            self.key(of_key).reshape(heads),
            self.value(of_value).reshape(heads),
        )

    def _packed_projection(self, x: Array) -> tuple[Array]:
        """Returns q, k and v as one array [B, T, 3, N, H], formed by one product.

        x is read once, and its gradient is one float32 sum, rounded once.
        """
        linears = (self.query, self.key, self.value)
        weights = jnp.concatenate([linear.kernel[...] for linear in linears], axis=1)
        qkv = jnp.matmul(x, weights.astype(x.dtype), precision=self.query.precision)
        biases = [linear.bias[...] for linear in linears if linear.bias is not None]
        if biases:
            qkv = qkv + jnp.concatenate(biases).astype(x.dtype)[None, None]
        return (qkv.reshape(*x.shape[:2], 3, self.num_heads, -1),)

    def _normalized(self, qkv: tuple[Array, ...]) -> tuple[Array, ...]:
        """Returns normalised q and k, and v; packed if the argument is packed."""
        q, k, v = planes(*qkv)
        normalized = (self.query_norm(q), self.key_norm(k), v)
        return (jnp.stack(normalized, axis=2),) if len(qkv) == 1 else normalized


def _scaled_qk(qkv: tuple[Array, ...], factor: float) -> tuple[Array, ...]:
    """Multiplies q and k by a factor in their dtype, and keeps v; q, k and v may be packed."""
    factors = np.array([factor, factor, 1])
    if len(qkv) == 1:
        return (qkv[0] * jnp.asarray(factors.reshape(1, 1, 3, 1, 1), qkv[0].dtype),)
    return tuple(x * jnp.asarray(f, x.dtype) for x, f in zip(qkv, factors, strict=True))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the norm after it adds the last term."""

    norm_1: Any  # blocks of different models have norms and attentions of different classes
    attention: Any
    norm_2: Any

    def __init__(
        self, settings: ModelSettings, arithmetic: tuple[HeadGroup, ...], rngs: nnx.Rngs
    ) -> None:
        d, dtype = settings.width, jnp.dtype(settings.activation_dtype)
        biased = bool(settings.biases)
        self.norm_1 = LayerNorm(d, dtype, rngs, biased)
        self.attention = CausalSelfAttention(settings, arithmetic, rngs)
        self.norm_2 = LayerNorm(d, dtype, rngs, biased)
        self.mlp_in = linear(settings, d, 4 * d, rngs)
        self.mlp_out = linear(settings, 4 * d, d, rngs, math.sqrt(2 * settings.layers))

    def __call__(
        self,
        residual: Array,
        y: Array | None,
        attend: Attend,
        key: Key[Array, ""] | None,
        tap: Array | None,
    ) -> tuple[Array, Array, LayerRecord]:
        """Returns the residual stream, the term still to be added to it, and the layer's record.

        Args:
          residual: the stream [B, T, d], float32.
          y: the last term of the block before [B, T, d], None if there is none. The first norm adds
            it in the same pass over the stream.
          attend: attention.
          key: PRNG key of the layer, None if nothing draws bits.
          tap: array added to the attention output, None to add nothing.
        """
        with jax.named_scope("norm"):
            residual, x = self.norm_1(residual, y)
        attended = self.attention(x, attend, key, tap)
        with jax.named_scope("norm"):
            residual, x_2 = self.norm_2(residual, attended.y)
        with jax.named_scope("mlp"):
            y = self.mlp(x_2)
        # Only the record holds this sum, so XLA drops it if no record is read.
        after = residual + y.astype(jnp.float32)
        q, k, v, (o, lse, max_logit), projected = attended[1:]
        return residual, y, LayerRecord(x, q, k, v, o, after, lse, projected, max_logit)

    def mlp(self, x: Array) -> Array:
        """The second half of the block, [B, T, d]."""
        return mlp(x, self.mlp_in, self.mlp_out)


class Decoder(nnx.Module, abc.ABC):
    """Blocks over a residual stream, and a last norm: the base class of the trainer's models.

    Attributes:
      blocks: `Block`s.
      norm: the last norm.
      remat: see `ModelSettings.remat`.
    """

    blocks: nnx.List
    norm: Any
    remat: Remat | None

    @abc.abstractmethod
    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """The residual stream that the first block reads, float32."""

    @property
    @abc.abstractmethod
    def output_table(self) -> Float[Array, "V d"]:
        """The table in logits = hidden · tableᵀ."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        attend: Attend,
        key: Key[Array, ""] | None = None,
        taps: tuple[Float[Array, "B T N V"], ...] | None = None,
    ) -> tuple[Float[Array, "B T d"], tuple[LayerRecord, ...]]:
        """Returns the normalised last hidden state, and one record per layer.

        Args:
          tokens: ids below vocab_size.
          attend: attention.
          key: PRNG key for stochastic rounding.
          taps: arrays added to the attention outputs of the layers: zeros, whose gradients are dO.
        """
        with jax.named_scope("embedding"):
            residual = self.embedded(tokens)
        y, records = None, []
        for i, block in enumerate(self.blocks):
            block_key = None if key is None else jax.random.fold_in(key, i)
            tap = None if taps is None else taps[i]
            run = _block(block, attend, self.remat)
            residual, y, record = run(residual, y, block_key, tap)
            records.append(record)
        with jax.named_scope("norm"):
            return self.norm(residual, y)[1], tuple(records)


def _block(block: Block, attend: Attend, remat: Remat | None) -> Callable[..., Any]:
    """Returns a function (residual, y, key, tap) that runs `block`, recomputed as `remat` says."""
    if remat is None:
        return lambda residual, y, key, tap: block(residual, y, attend, key, tap)
    graph, weights = nnx.split(block)
    # The weights are arguments, because every policy would save the weights of a closure.
    run = jax.checkpoint(
        lambda weights, residual, y, key, tap: nnx.merge(graph, weights)(
            residual, y, attend, key, tap
        ),
        policy=_policy(remat),
    )
    return functools.partial(run, weights)


def _policy(remat: Remat) -> Callable[..., Any]:
    if remat == "attention_saveable":
        return jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
    return getattr(jax.checkpoint_policies, remat)


def require_shape(settings: Any, attention: AttentionSettings) -> None:
    """Raises ValueError unless `attention` has the layers and heads of the model."""
    shape = [sum(len(group.heads) for group in layer) for layer in attention.layers]
    if shape != [settings.heads] * settings.layers:
        raise ValueError(
            f"attention has heads {shape}, the model {settings.layers} layers of {settings.heads}"
        )


class GPT2(Decoder):
    """The decoder of Radford et al. (2019), with biases where `settings` ask for them.

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
        require_shape(settings, attention)
        dtype = jnp.dtype(settings.activation_dtype)
        normal = nnx.initializers.normal(init_std(settings))
        embed = {"dtype": jnp.float32, "param_dtype": jnp.float32, "embedding_init": normal}
        self.tokens = nnx.Embed(settings.vocab_size, settings.width, **embed, rngs=rngs)
        if settings.embedding_mean:
            embed["embedding_init"] = about_common_vector(normal, settings.embedding_mean)
        self.positions = nnx.Embed(settings.context, settings.width, **embed, rngs=rngs)
        self.blocks = nnx.List([Block(settings, layer, rngs) for layer in attention.layers])
        self.norm = LayerNorm(settings.width, dtype, rngs, bool(settings.biases))
        self.remat = settings.remat

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T d"]:
        """The rows of the token table plus those of the positions."""
        return embed(self.tokens.embedding[...], self.positions.embedding[...], tokens)

    @property
    def output_table(self) -> Float[Array, "V d"]:
        """The embedding table, which is also the output layer."""
        return self.tokens.embedding[...]


def zero_taps(settings: Any, batch: int, length: int) -> tuple[Float[Array, "B T N V"], ...]:
    """Returns zero taps for all layers; the gradient of the loss by a layer's tap is its dO."""
    shape = (batch, length, settings.heads, settings.value_size)
    return tuple(jnp.zeros(shape, jnp.float32) for _ in range(settings.layers))


def score_scale(settings: ModelSettings) -> tuple[float, float]:
    """Returns the factor of q·k in a score, and the factor of X W_Q in q if `query_of` is None."""
    head_size = settings.width // settings.heads
    if settings.scale_placement == "qk":  # q carries the scale already
        return 1.0, float(head_size**-0.25)
    return float(head_size**-0.5), 1.0


def query_of(settings: ModelSettings, weights: Any, length: int) -> jax.tree_util.Partial | None:
    """Returns a function from X W_Q to q [B, T, N, H], or None if q is a multiple of X W_Q.

    Args:
      settings: settings of the model.
      weights: the parameters of the attention of a layer.
      length: T.
    """
    del length
    if not settings.qk_norm:
        return None
    factor = jnp.float32(score_scale(settings)[1])
    scale = weights["query_norm"]["norm"]["scale"][...]
    return jax.tree_util.Partial(_normalized_query, scale, factor)


def _normalized_query(scale: Array, factor: Array, values: Array) -> Array:
    """`HeadNorm` in float32, times the factor."""
    mean = jnp.mean(values * values, axis=-1, keepdims=True)
    return factor * values * jax.lax.rsqrt(mean + jnp.float32(1e-6)) * scale[None, None, None]


def parameter_count(settings: ModelSettings) -> int:
    """Number of weights: embeddings, 12 d² per block, scales of 2 L + 1 norms, of q and of k.

    Biases, if there are any, add 11 d per block and d for the last norm.
    """
    d, layers = settings.width, settings.layers
    embeddings = (settings.vocab_size + settings.context) * d
    of_heads = 2 * layers * (d // settings.heads) if settings.qk_norm else 0
    biases = (11 * layers + 1) * d if settings.biases else 0
    return embeddings + layers * 12 * d * d + (2 * layers + 1) * d + of_heads + biases


def product_weights(settings: ModelSettings) -> int:
    """Number of weights without the positions; the others enter matrix products.

    The token table enters one as the output layer. Norms and biases, which are few, count too.
    """
    return parameter_count(settings) - settings.context * settings.width


def kept_values(settings: ModelSettings) -> int:
    """Number of values per token and layer that the backward pass reads and no compiler recomputes.

    They are the inputs of both halves of a block, q, k, v and O (6 d), and the hidden layer of the
    MLP (4 d).
    """
    return 10 * settings.width
