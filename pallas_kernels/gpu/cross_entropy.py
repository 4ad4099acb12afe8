"""Cross-entropy of rows of logits, and its gradient, in one kernel.

A program owns a row. It keeps the first columns in registers and loops over the others with an
online log-sum-exp. Then it goes back over them to write softmax − onehot. It starts with the
columns that it read last, because they are most likely still in the L2 cache. bfloat16 logits and
their gradient are read and written as words of two columns.

The floor for 16,384 rows of 50,304 logits with a bfloat16 gradient on one H200 at 4.3 TB/s, and the
measured times (results/training_speed/step_variants_h200.jsonl):

  float32 logits   move 4.9 GB: 1.15 ms    the kernel takes 1.76 ms
  bfloat16 logits  move 3.3 GB: 0.77 ms    the kernel takes 1.10 ms

The kernel exceeds the floor because the cache moves every column but the kept ones once more. With
bfloat16 logits and z_loss, only one program instead of two fits on a multiprocessor; that has not
been timed.
"""

import dataclasses
import operator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int

from lowprec_attn.arithmetic.places import span
from pallas_kernels.gpu.instructions import exp2, from_bfloat16_pairs, to_bfloat16_pairs
from pallas_kernels.gpu.problem import LOG2E
from pallas_kernels.gpu.triton import plt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """How a program loops over its row. It changes only speed and the order of float32 sums.

    Attributes:
      held: words that stay in registers between the passes, 0 or a power of two. A row with fewer
        words keeps none. A word is one float32 logit or two bfloat16 logits.
      tile: words that one step of the loop over the others takes, a power of two.
      warps: warps per program.
    """

    held: int
    tile: int
    warps: int


# The fastest schedules that were timed on one H200.
_FLOAT32 = Columns(held=16384, tile=8192, warps=8)
_BFLOAT16 = Columns(held=4096, tile=8192, warps=8)

# The int32 word of two bfloat16 −inf.
_TWICE_MINUS_INFINITY = 0xFF80FF80 - 2**32


def cross_entropy_rows(
    logits: Float[Array, "n V"],
    targets: Int[Array, "n"],
    dtype: Any,
    *,
    z_loss: float = 0.0,
    columns: Columns | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "n"], Float[Array, "n V"]]:
    """The losses, lse − logit of the target, and softmax − onehot, rounded once to `dtype`.

    With z_loss = c > 0 the gradient is that of loss + c · lse², softmax · (1 + 2 c lse) − onehot.
    The returned losses do not contain c · lse². A row with a NaN or +inf has a loss that is not
    finite.

    Args:
      logits: float32, or bfloat16 with an even number of columns.
      targets: the column of each row's target, below V.
      dtype: dtype of the gradient; it must be bfloat16 if the logits are.
      z_loss: c ≥ 0.
      columns: the schedule, None for the tuned one.
      interpret: run in the interpreter.

    Raises:
      ValueError: bfloat16 logits with an odd number of columns, or a gradient of another dtype.
    """
    n, width = logits.shape
    words, out_dtype = logits, jnp.dtype(dtype)
    if packed := logits.dtype == jnp.bfloat16:
        if width % 2 or out_dtype != jnp.bfloat16:
            raise ValueError(
                "bfloat16 logits must have an even number of columns and a bfloat16 gradient, "
                f"got {width} columns and {out_dtype}"
            )
        words = lax.bitcast_convert_type(logits.reshape(n, width // 2, 2), jnp.int32)
        out_dtype = jnp.dtype(jnp.int32)
    width = words.shape[1]
    columns = columns or (_BFLOAT16 if packed else _FLOAT32)
    if width < columns.held:
        columns = dataclasses.replace(columns, held=0)
    # Blocks may reach beyond the array; columns beyond it are masked.
    row = pl.BlockSpec((None, width + columns.tile), lambda i: (i, 0))
    losses, gradient = pl.pallas_call(
        partial(_row, width=width, z_loss=z_loss, columns=columns, interpret=interpret),
        grid=(n,),
        in_specs=(row, pl.BlockSpec((1,), lambda i: (i,))),
        out_specs=(pl.BlockSpec((1,), lambda i: (i,)), row),
        out_shape=(
            jax.ShapeDtypeStruct((n,), jnp.float32),
            jax.ShapeDtypeStruct((n, width), out_dtype),
        ),
        compiler_params=plt.CompilerParams(num_warps=columns.warps, num_stages=1),
        interpret=interpret,
        name="cross_entropy_rows",
    )(words, targets.astype(jnp.int32))
    if packed:
        gradient = lax.bitcast_convert_type(gradient, jnp.bfloat16).reshape(logits.shape)
    return losses, gradient


def _row(
    logits_ref: Any,
    target_ref: Any,
    loss_ref: Any,
    gradient_ref: Any,
    *,
    width: int,
    z_loss: float,
    columns: Columns,
    interpret: bool,
) -> None:
    held, tile = columns.held, columns.tile
    tiles, rest = divmod(width - held, tile)
    packed = logits_ref.dtype == jnp.int32
    target = target_ref[...]

    def power(x: Array) -> Array:
        return exp2(x * jnp.float32(LOG2E), interpret=interpret)

    def values(words: Array, after: Array | None = None) -> tuple[Array, ...]:
        """The logits in some words, as one array for each column of a word."""
        return from_bfloat16_pairs(words, after, interpret=interpret) if packed else (words,)

    def load(start: Array | int, policy: str) -> Array:
        return plt.load(logits_ref.at[pl.ds(start, tile)], eviction_policy=policy)

    def add(words: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds columns to the running maximum m [1] and to l = Σ exp(x − m) [1]."""
        m, l = state
        largest = reduce(jnp.maximum, values(words))
        new = jnp.maximum(m, jnp.max(largest, axis=0, keepdims=True))
        # Scaling l after the sum would cost the registers of a second program per multiprocessor.
        l = l * power(m - new)
        terms = reduce(operator.add, (power(x - new) for x in values(words, new)))
        return new, l + jnp.sum(terms, axis=0, keepdims=True)

    def store(words: Array, start: Array | int, mask: Array | None = None) -> None:
        logits = values(words, lse)
        place = len(logits) * span(start, words.size)
        onehot = [(place + i == target).astype(jnp.float32) for i in range(len(logits))]
        softmax = [power(x - lse) for x in logits]
        if z_loss:
            softmax = [p * (1 + jnp.float32(2 * z_loss) * lse) for p in softmax]
        gradients = [p - y for p, y in zip(softmax, onehot, strict=True)]
        if packed:
            out = to_bfloat16_pairs(*gradients, interpret=interpret)
        else:
            out = gradients[0].astype(gradient_ref.dtype)
        window = gradient_ref.at[pl.ds(start, words.size)]
        plt.store(window, out, mask=mask, eviction_policy="evict_first")

    # m starts finite, because −inf − (−inf) would be NaN where the first columns are all −inf.
    lowest = float(jnp.finfo(jnp.float32).min)
    state = (jnp.full((1,), lowest, jnp.float32), jnp.zeros((1,), jnp.float32))
    if held:
        kept = plt.load(logits_ref.at[pl.ds(0, held)], eviction_policy="evict_first")
        state = add(kept, state)
    # The cache should keep what this loop reads until the second pass.
    m, l = lax.fori_loop(0, tiles, lambda j, s: add(load(held + j * tile, "evict_last"), s), state)
    # The remainder is read last. Loaded before the loop, it would cost the registers of a second
    # program per multiprocessor.
    if rest:
        last = width - rest
        inside = span(last, 1 << (rest - 1).bit_length()) < width
        window = logits_ref.at[pl.ds(last, inside.size)]
        other = _TWICE_MINUS_INFINITY if packed else -jnp.inf
        remainder = plt.load(window, mask=inside, other=other, eviction_policy="evict_first")
        m, l = add(remainder, (m, l))
    lse = m + jnp.log(l)
    per_word = 2 if packed else 1
    of_target = values(logits_ref[pl.ds(target_ref[0] // per_word, 1)])
    loss_ref[...] = lse - jnp.where(target % 2 == 0, of_target[0], of_target[-1])

    if rest:
        store(remainder, last, inside)
    if held:
        store(kept, 0)

    def go_back(j: Array, _: None) -> None:
        start = held + (tiles - 1 - j) * tile
        store(load(start, "evict_first"), start)

    lax.fori_loop(0, tiles, go_back, None)
