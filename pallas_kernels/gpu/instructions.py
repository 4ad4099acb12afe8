"""Single PTX instructions that the compiler does not choose by itself (sm_80 and newer).

The Triton lowering marks every float32 operation `.rn`, so it never contracts a multiplication and
an addition, and it converts to bfloat16 one value at a time where two would do. In the interpreter
the same functions are plain JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

# The first of a pair is the lower half of a word, and a bfloat16 is the upper half of a float32.
_ROUND_PAIR = """{
    .reg .b32 pair;
    cvt.rn.bf16x2.f32 pair, $3, $2;
    shl.b32 $0, pair, 16;
    and.b32 $1, pair, 0xffff0000;
}"""


def round_to_bfloat16(x: Array) -> Array:
    """Nearest-even float32 values that bfloat16 holds; compiled code only."""
    return plt.elementwise_inline_asm(
        _ROUND_PAIR,
        args=[x],
        constraints="=f,=f,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]


def multiply_add(x: Array, factor: np.float32, y: Array, *, interpret: bool) -> Array:
    """x · factor + y, rounded once where compiled; y broadcasts to x."""
    if interpret:
        return x * factor + y
    bits = int(np.float32(factor).view(np.uint32))
    return plt.elementwise_inline_asm(
        f"fma.rn.f32 $0, $1, 0f{bits:08X}, $2;",
        args=[x, jnp.broadcast_to(y, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]
