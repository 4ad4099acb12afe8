"""Cross-entropy of the output layer, without holding the logits of the whole batch."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lowprec_attn.gpt2.kernels import cross_entropy_rows, kernel_or

# Bytes of logits per chunk. The gradient of the logits takes the same number of bytes for bfloat16
# logits, and half of it for float32 logits.
_BYTES_PER_CHUNK = 2**31
# Number of unrolled chunks. Unrolling leaves a GPU no gaps between their kernels.
_UNROLLED = 8


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    hidden: Float[Array, "B T d"],
    embedding: Float[Array, "V d"],
    targets: Int[Array, "B T"],
    logits_dtype: str = "float32",
    z_loss: float = 0.0,
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of logits = hidden · embeddingᵀ.

    The products take operands in hidden's dtype and accumulate in float32. Logits are rounded to
    `logits_dtype`; log-sum-exp and the sum over rows are float32.

    Gradients are formed together with the loss, chunk by chunk, so that no logits are kept or
    formed twice. The products of the gradients take softmax − onehot in hidden's dtype. When
    lowered for CUDA, one kernel turns logits into losses and softmax − onehot.

    With z_loss = c > 0, the gradients are taken of cross-entropy + c · mean log²Z, where log Z is
    the log-sum-exp of a row's logits (PaLM, arXiv 2204.02311, section 5: c = 1e-4). The returned
    value is still the cross-entropy, so that losses with and without z_loss can be compared.

    Args:
      hidden: last hidden state.
      embedding: table of the output layer.
      targets: ids below V.
      logits_dtype: `float32`; or `bfloat16`, if hidden is bfloat16 and V even.
      z_loss: c ≥ 0.
    """
    table = embedding.astype(hidden.dtype)

    def chunk_loss(total: Array, chunk: _Chunk) -> tuple[Array, None]:
        losses, _ = _plain_losses(_logits(chunk, table, logits_dtype), chunk.targets)
        return total + jnp.sum(losses), None

    total, _ = lax.scan(chunk_loss, jnp.float32(0), _chunks(hidden, targets, table, logits_dtype))
    return total / jnp.float32(targets.size)


def _forward(
    hidden: Array, embedding: Array, targets: Array, logits_dtype: str, z_loss: float
) -> tuple[Array, tuple[Array, Array]]:
    """The mean loss, and the gradients of the summed loss."""
    table = embedding.astype(hidden.dtype)
    both = cross_entropy_rows, _plain_rows
    of_rows = kernel_or(*(partial(f, dtype=table.dtype, z_loss=z_loss) for f in both))

    def chunk_loss(sums: _Sums, chunk: _Chunk) -> tuple[_Sums, Array]:
        logits = _logits(chunk, sums.table, logits_dtype)
        losses, d_logits = of_rows(logits, chunk.targets)
        d_hidden = jnp.einsum("nv,vd->nd", d_logits, sums.table, **_IN_FLOAT32)
        # The product is the left operand of the sum, because XLA's GPU compiler then lets every
        # product add to the sum in place.
        d_table = jnp.einsum("nv,nd->vd", d_logits, chunk.hidden, **_IN_FLOAT32) + sums.d_table
        sums = _Sums(sums.loss + jnp.sum(losses), d_table, sums.table)
        # The barrier completes each chunk before the next. Otherwise XLA delays the products with
        # d_logits, and keeps the d_logits of many chunks.
        return lax.optimization_barrier(sums), d_hidden.astype(table.dtype)

    sums = _Sums(jnp.float32(0), jnp.zeros(table.shape, jnp.float32), table)
    chunks = _chunks(hidden, targets, table, logits_dtype)
    sums, d_hidden = lax.scan(chunk_loss, sums, chunks, unroll=_UNROLLED)
    mean = sums.loss / jnp.float32(targets.size)
    return mean, (d_hidden.reshape(hidden.shape), sums.d_table)


def _backward(
    logits_dtype: str, z_loss: float, residuals: tuple[Array, Array], d_loss: Array
) -> tuple[Array, Array, None]:
    d_hidden, d_table = residuals
    # The factor 1/n of the mean comes last, in float32, so that softmax − onehot keeps its range in
    # any format.
    factor = d_loss / jnp.float32(d_hidden.shape[0] * d_hidden.shape[1])
    return (d_hidden.astype(jnp.float32) * factor).astype(d_hidden.dtype), d_table * factor, None


cross_entropy.defvjp(_forward, _backward)

_IN_FLOAT32 = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}


class _Sums(NamedTuple):
    """Float32 sums of the loss and the table's gradient [V, d] over chunks so far; the table."""

    loss: Array
    d_table: Array
    table: Array


class _Chunk(NamedTuple):
    """Some rows: hidden [n, d], targets [n]; a scan takes them stacked over chunks."""

    hidden: Array
    targets: Array


def _chunks(hidden: Array, targets: Array, table: Array, logits_dtype: str) -> _Chunk:
    count = _chunk_count(targets.size, table.shape[0] * jnp.dtype(logits_dtype).itemsize)
    return _Chunk(hidden.reshape(count, -1, hidden.shape[-1]), targets.reshape(count, -1))


def _chunk_count(rows: int, bytes_per_row: int) -> int:
    """Returns the smallest number of equal chunks that take at most _BYTES_PER_CHUNK each.

    If no number suffices, every row is a chunk.
    """
    for count in range(1, rows):
        if rows % count == 0 and rows // count * bytes_per_row <= _BYTES_PER_CHUNK:
            return count
    return rows


def _logits(chunk: _Chunk, table: Array, dtype: str) -> Array:
    """Logits [n, V] of a chunk, in `dtype`."""
    # The product rounds its float32 sums as it writes them. A separate pass would cost more.
    options = {**_IN_FLOAT32, "preferred_element_type": jnp.dtype(dtype)}
    return jnp.einsum("nd,vd->nv", chunk.hidden, table, **options)


def _plain_losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """The loss and the log-sum-exp of each row [n]."""
    logits = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return lse - picked, lse


def _plain_rows(logits: Array, targets: Array, *, dtype: Any, z_loss: float) -> tuple[Array, Array]:
    """`cross_entropy_rows` in plain JAX."""
    losses, lse = _plain_losses(logits, targets)
    columns = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    onehot = (columns[None] == targets[:, None]).astype(jnp.float32)
    softmax = jnp.exp(logits.astype(jnp.float32) - lse[:, None])
    if z_loss:
        softmax *= 1 + jnp.float32(2 * z_loss) * lse[:, None]
    return losses, (softmax - onehot).astype(dtype)
