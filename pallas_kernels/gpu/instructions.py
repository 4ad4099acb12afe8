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
    """The same as `row_max.is_repeated`, in 0.8 instructions per score instead of 2.

    A NaN may count otherwise: its row becomes NaN in either case. An entry is near where
    below + tolerance is not negative; one of a row always is, its maximum. Threads exchange the
    counts of two rows in one word, those 8 apart, which one thread holds.
    """
    if interpret:
        return row_max.is_repeated(below, tolerance)
    distance = below if tolerance == 0 else below + jnp.float32(tolerance)
    rows, entries = distance.shape
    # A thread holds columns 8j + 2t + e of a row, t its own. In the order j, e, t it holds one
    # entry of every four that follow each other.
    columns = distance.reshape(rows, entries // 8, 4, 2).transpose(0, 1, 3, 2)
    first, second = jnp.split(columns.reshape(rows // 16, 16, entries), 2, axis=1)
    signed = tolerance > 0
    far = _count_negative(first, signed) + (_count_negative(second, signed) << 16)
    near = entries * (2**16 + 1) - jnp.sum(far, axis=-1)[:, None]
    # ≠ 1 takes less time than > 1 in the lower half. They differ where no entry is near: all scores
    # are −∞, and no rule's m depends on the answer.
    which = jax.lax.broadcasted_iota(jnp.int32, (1, 2, 1), 1)
    repeated = jnp.where(which == 0, near & jnp.int32(2**16 - 1) != 1, near >= 2 * 2**16)
    return repeated.reshape(rows, 1)


def _count_negative(x: Array, signed: bool) -> Array:
    """How many numbers are negative among those of a row that a thread holds, int32 [.., .., 4].

    One instruction saturates two numbers, as integers of the same bits, to two bits each and
    shifts them into a word: 10 where negative, 00 for +0, 01 where positive; −0, which S − r_m is
    not, would be 10.

    Args:
      x: float32 [.., .., n], n divisible by 8; of each four numbers a thread holds one.
      signed: whether x holds positive numbers.
    """
    quarters = jnp.split(x, x.shape[-1] // 4, axis=-1)
    counts = []
    for some in (quarters[i : i + 16] for i in range(0, len(quarters), 16)):
        pairs = (f"${i}, ${i + 1}" for i in range(1, len(some), 2))
        lines = [f"cvt.pack.sat.s2.s32.b32 word, {pair}, word;" for pair in pairs]
        if signed:
            lines.append("and.b32 word, word, 0xaaaaaaaa;")
        text = "\n    ".join([".reg .b32 word;", "mov.b32 word, 0;", *lines, "popc.b32 $0, word;"])
        constraints = "=r" + ",r" * len(some)
        counts.append(_instruction(f"{{\n    {text}\n}}", constraints, *some, dtype=jnp.int32))
    return sum(counts[1:], start=counts[0])
