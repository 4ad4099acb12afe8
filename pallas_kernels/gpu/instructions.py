"""Single PTX instructions that the compiler does not choose by itself (sm_80 and newer).

The Triton lowering marks every float32 operation `.rn`, so it never contracts a multiplication and
an addition; it converts to bfloat16 one value at a time where two would do; and it keeps subnormal
powers of two, at three more instructions each. In the interpreter the same functions are plain
JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from lowprec_attn.numerics import row_max

# The first of a pair is the lower half of a word, and a bfloat16 is the upper half of a float32.
_ROUND_PAIR = """{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}"""


def _instruction(
    text: str, constraints: str, *args: Array, dtype: Any = jnp.float32, pack: int = 1
) -> Array:
    """PTX on arrays of one shape, `pack` elements at a time; the result has that shape too."""
    return plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]


def round_to_bfloat16(x: Array) -> Array:
    """Nearest-even float32 values that bfloat16 holds; compiled code only."""
    return _instruction(_ROUND_PAIR, "=f,=f,f,f", x, pack=2)


def as_bfloat16(x: Array) -> Array:
    """float32 as bfloat16, to nearest-even, two at a time even where both are extended again."""
    return _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", x, dtype=jnp.bfloat16, pack=2)


def from_bfloat16_pairs(
    words: Array, after: Array | None = None, *, interpret: bool
) -> tuple[Array, Array]:
    """The lower and the upper halves of words of two bfloat16 numbers, as float32.

    Args:
      words: int32.
      after: a value that is to be known first, broadcast to `words`. The compiler then keeps the
        words until there, not what it unpacked before, which takes twice the registers.
      interpret: plain JAX.
    """
    if interpret or after is None:
        lower, upper = words << 16, words & jnp.int32(-(2**16))
        return _as_float32(lower), _as_float32(upper)
    after = jnp.broadcast_to(after, words.shape)
    lower = _instruction("shl.b32 $0, $1, 16;", "=f,r,f", words, after)
    upper = _instruction("and.b32 $0, $1, 0xffff0000;", "=f,r,f", words, after)
    return lower, upper


def _as_float32(words: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def to_bfloat16_pairs(lower: Array, upper: Array, *, interpret: bool) -> Array:
    """Words, int32, of two float32 numbers each, rounded to bfloat16, to nearest-even."""
    if interpret:
        pairs = jnp.stack([lower, upper], axis=-1).astype(jnp.bfloat16)
        return jax.lax.bitcast_convert_type(pairs, jnp.int32)
    return _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", lower, upper, dtype=jnp.int32)


def multiply_add(x: Array, factor: np.float32, y: Array, *, interpret: bool) -> Array:
    """x · factor + y, rounded once where compiled; y broadcasts to x."""
    if interpret:
        return x * factor + y
    bits = int(np.float32(factor).view(np.uint32))
    y = jnp.broadcast_to(y, x.shape)
    return _instruction(f"fma.rn.f32 $0, $1, 0f{bits:08X}, $2;", "=f,f,f", x, y)


def exp2(x: Array, *, interpret: bool) -> Array:
    """2^x within 2 ulp; where compiled, powers below the smallest normal number are 0."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)


def is_repeated(below: Array, tolerance: float, *, interpret: bool) -> Array:
    """The same as `row_max.is_repeated`, in less than one instruction per score instead of two.

    An entry is far where the sign bit of below + tolerance is set. One instruction spreads the
    signs of two rows' entries over the halves of a word, −1 or 0 each; integers are added three at
    a time; and what threads exchange counts two rows at once, those 8 apart, which one thread
    holds. A row's maximum is alone where all of its entries but one are far.
    """
    if interpret:
        return row_max.is_repeated(below, tolerance)
    distance = below if tolerance == 0 else below + jnp.float32(tolerance)
    rows, entries = distance.shape
    pairs = jnp.split(distance.reshape(rows // 16, 16, entries), 2, axis=1)
    words = _instruction("prmt.b32 $0, $1, $2, 0xFFBB;", "=r,r,r", *pairs, dtype=jnp.int32)
    # A word is 2^16 − 1 where the first row's entry is far, −2^16 the second's, −1 both. The sum
    # of words + 1 is 2^16 (near₂ − near₁) + near₁; times 2^16 + 1, modulo 2^32, it holds near₂
    # in its upper half and near₁ in its lower one.
    total = jnp.sum(words + 1, axis=-1)
    near = (total + (total << 16))[:, None]
    which = jax.lax.broadcasted_iota(jnp.int32, (1, 2, 1), 1)
    near = jnp.where(which == 0, near & jnp.int32(2**16 - 1), near >> 16)
    return (near > 1).reshape(rows, 1)
