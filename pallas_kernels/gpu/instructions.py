"""Single PTX instructions that the compiler does not choose by itself (sm_80 and newer).

The Triton lowering marks every float32 operation `.rn`, so it never contracts a multiplication and
an addition. It converts to bfloat16 one value at a time, although one instruction converts two. It
keeps subnormal powers of two, at the cost of three more instructions each. In the interpreter the
functions of this module are plain JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic import fused, powers
from lowprec_attn.numerics import row_max
from pallas_kernels.gpu.triton import plt

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
    """Runs PTX on arrays of one shape, `pack` elements at a time; the result has that shape too."""
    return plt.elementwise_inline_asm(
        text,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )[0]


def anew(x: Array, *, interpret: bool) -> Array:
    """Returns x, an int32, as a value whose origin the compiler does not know.

    Values derived from it are recomputed where they are used, instead of kept in registers.
    """
    if interpret:
        return x
    one = jnp.broadcast_to(x, (1,))
    return jnp.max(_instruction("mov.b32 $0, $1;", "=r,r", one, dtype=x.dtype))


def round_to_bfloat16(x: Array) -> Array:
    """x rounded to bfloat16 values, to nearest-even, and kept as float32; compiled code only."""
    return _instruction(_ROUND_PAIR, "=f,=f,f,f", x, pack=2)


def as_bfloat16(x: Array) -> Array:
    """Converts float32 to bfloat16, to nearest-even.

    It converts two values at a time, even where both are extended to float32 again.
    """
    return _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", x, dtype=jnp.bfloat16, pack=2)


def from_bfloat16_pairs(
    words: Array, after: Array | None = None, *, interpret: bool
) -> tuple[Array, Array]:
    """The lower and the upper bfloat16 number of each word, as float32.

    Args:
      words: int32.
      after: a value that must be computed first; it broadcasts to `words`. The compiler then keeps
        the words in registers until that point. It would otherwise unpack them early and keep the
        unpacked numbers, which take twice the registers.
      interpret: use plain JAX.
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
    """int32 words that each hold two float32 numbers, rounded to bfloat16, to nearest-even."""
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


def fused_multiply_add(x: Array, factor: np.float32, y: Array, *, interpret: bool) -> Array:
    """x · factor + y, rounded once in the interpreter too, where that takes fifty operations."""
    if interpret:
        return fused.multiply_add_in_kernel(x, float(factor), y)
    return multiply_add(x, factor, y, interpret=False)


def exp2(x: Array, *, interpret: bool) -> Array:
    """2^x within 2 ulp; where compiled, powers below the smallest normal number are 0."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)


def whole_exp2(x: Array, *, interpret: bool) -> Array:
    """2^x such that 2^(x + 1) is exactly twice 2^x.

    The instruction has this property where x is a multiple of 2^-17.
    """
    return powers.exp2(x) if interpret else exp2(x, interpret=False)


def is_repeated(below: Array, tolerance: float, *, interpret: bool) -> Array:
    """Computes `row_max.is_repeated` in 0.8 instructions per score instead of 2.

    An entry counts as near the maximum if S − r_m ≥ −tolerance; the maximum itself always counts.
    A NaN may count differently, but its row becomes NaN in either case. Threads exchange the counts
    of two rows in one word. The two rows lie 8 apart, and one thread holds both.
    """
    if interpret:
        return row_max.is_repeated(below, tolerance)
    rows, entries = below.shape
    columns = _by_thread(_distance(below, tolerance)).reshape(rows // 16, 16, entries)
    first, second = (_in_fours(x) for x in jnp.split(columns, 2, axis=1))
    far = _count(_negative, first) + (_count(_negative, second) << 16)
    near = entries * (2**16 + 1) - jnp.sum(far, axis=-1)[:, None]
    # In the lower half ≠ 1 takes less time than > 1. The two differ only where no entry is near.
    # All scores are −∞ there, and no rule's m depends on the answer.
    which = jax.lax.broadcasted_iota(jnp.int32, (1, 2, 1), 1)
    repeated = jnp.where(which == 0, near & jnp.int32(2**16 - 1) != 1, near >= 2 * 2**16)
    return repeated.reshape(rows, 1)


def is_repeated_by_warp(below: Array, tolerance: float, *, interpret: bool) -> Array:
    """`is_repeated` in 0.6 instructions per score, without an exchange; four copies, [rows, 4].

    The answer is right only where `Problem.counts_ties_by_warp` holds: threads 4i … 4i + 3 of a
    warp then hold all of rows i and i + 8 of sixteen, with columns 8j + 2t + e in thread t. The
    signs form a binary matrix. One tensor-core product counts the bits of every row and gives the
    count to the row's four threads.
    """
    if interpret:
        return row_max.is_repeated(below, tolerance)
    columns = _in_fours(_by_thread(_distance(below, tolerance)))
    return _count(_negative_of_four_threads, columns) < below.shape[1] - 1


def _distance(below: Array, tolerance: float) -> Array:
    return below if tolerance == 0 else below + jnp.float32(tolerance)


def _by_thread(x: Array) -> Array:
    """Sorts columns 8j + 2t + e by j, e, t: of every four neighbours, each thread t owns one."""
    rows, columns = x.shape
    return x.reshape(rows, columns // 8, 4, 2).transpose(0, 1, 3, 2).reshape(rows, columns)


def _in_fours(x: Array) -> Sequence[Array]:
    return jnp.split(x, x.shape[-1] // 4, axis=-1)


def _count(negative: Callable[[Sequence[Array]], Array], x: Sequence[Array]) -> Array:
    """Sums what `negative` counts in groups of 16 arrays, the number that a word has room for."""
    counts = [negative(x[i : i + 16]) for i in range(0, len(x), 16)]
    return sum(counts[1:], start=counts[0])


# One instruction reads the bits of two numbers as integers, saturates each to two bits and shifts
# them into a word: 10 where negative, 00 for +0, 01 where positive. −0 would give 10, but S − r_m
# is never −0.
_SIGNS = "cvt.pack.sat.s2.s32.b32 {word}, ${first}, ${second}, {word};"
_NEGATIVE = "0xaaaaaaaa"


def _negative(x: Sequence[Array]) -> Array:
    """Counts, for each entry, in how many of up to 16 arrays it is negative, int32."""
    n = len(x)
    lines = [".reg .b32 word;", "mov.b32 word, 0;"]
    lines += [_SIGNS.format(word="word", first=i, second=i + 1) for i in range(1, n, 2)]
    lines += [f"and.b32 word, word, {_NEGATIVE};", "popc.b32 $0, word;"]
    return _instruction(_block(lines), "=r" + ",r" * n, *x, dtype=jnp.int32)


def _negative_of_four_threads(x: Sequence[Array]) -> Array:
    """`_negative` summed over the four entries of a row, [rows, 4]."""
    n = len(x)
    lines = [".reg .b32 first, second, ones, c0, c1, c2, c3;"]
    lines += ["mov.b32 first, 0;", "mov.b32 second, 0;"]
    # A thread puts two entries of each array, of rows i and i + 8, into the words of these rows.
    for i in range(2, 2 + 2 * n, 4):
        lines.append(_SIGNS.format(word="first", first=i, second=i + 2))
        lines.append(_SIGNS.format(word="second", first=i + 1, second=i + 3))
    # All columns of B are ones, so c0 and c1 count row i, and c2 and c3 count row i + 8.
    lines += [
        f"mov.b32 ones, {_NEGATIVE};",
        "mov.b32 c0, 0;",
        "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
        " {c0, c1, c2, c3}, {first, second}, {ones}, {c0, c0, c0, c0};",
        "mov.b32 $0, c0;",
        "mov.b32 $1, c2;",
    ]
    return _instruction(_block(lines), "=r,=r" + ",r" * 2 * n, *x, dtype=jnp.int32, pack=2)


def _block(lines: Sequence[str]) -> str:
    return "{\n    " + "\n    ".join(lines) + "\n}"
