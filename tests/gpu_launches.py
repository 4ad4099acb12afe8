"""Launches the GPU kernels of one preset with every rule on small shapes, for `compute-sanitizer`.

    python tests/gpu_launches.py flash
    python tests/gpu_launches.py beyond    # a kernel that stores outside its array
    python tests/gpu_launches.py race      # a kernel whose warps write one word of shared memory

Forward and backward are executables of their own, so that with XLA's `platform` allocator q, k,
v, O, lse and the gradients are allocations of their own, whose ends the sanitizer knows.
`record_gpu.py` sets the environment that this needs.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from harness import Case
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from kernel_calls import PRESETS, RULES, Call, call_of, operands_of

# Lengths off the tile, grouped heads, keys that no row sees; default tiles.
LENGTHS = Case(
    batch=1,
    rows=77,
    keys=90,
    kv_heads=1,
    head_size=64,
    dtype="bfloat16",
    is_causal=True,
    query_lengths=(70,),
    key_lengths=(75,),
    values="repeated_maxima",
)
# A head size between powers of two, operands that are split, tiles that are all seen in full.
SPLIT = Case(batch=1, rows=130, keys=100, head_size=40)


def launch_preset(preset: str) -> int:
    """Runs forward and backward with every rule; the number of calls."""
    calls = [(LENGTHS, call_of(LENGTHS, PRESETS[preset], rule, None)) for rule in RULES.values()]
    calls.append((SPLIT, call_of(SPLIT, PRESETS[preset], sizes=None)))
    for case, call in calls:
        jax.block_until_ready(launch(case, call))
    return len(calls)


def launch(case: Case, call: Call) -> Any:
    """The results of a forward and a backward executable."""

    @jax.jit
    def forward(extras: Any, *qkv: jax.Array) -> Any:
        return jax.vjp(partial(call.attend, extras), *qkv)

    @jax.jit
    def backward(pullback: Any, *cotangents: jax.Array) -> Any:
        return pullback(cotangents)

    arrays, extras = operands_of(case)
    (out, lse), pullback = forward(extras, *(arrays[x] for x in "qkv"))
    return out, lse, backward(pullback, arrays["do"].astype(out.dtype), arrays["dlse"])


_SIZE = 1024
_ONE_WORD = """{
    .shared .align 4 .b32 word;
    st.shared.f32 [word], $1;
    ld.shared.f32 $0, [word];
}"""


def _beyond(x_ref: Any, out_ref: Any) -> None:
    start = (pl.program_id(0) + 1) * 2**20
    plt.store(out_ref.at[pl.ds(start, _SIZE)], x_ref[...])


def _race(x_ref: Any, out_ref: Any) -> None:
    shape = jax.ShapeDtypeStruct((_SIZE,), jnp.float32)
    (out_ref[...],) = plt.elementwise_inline_asm(
        _ONE_WORD, args=[x_ref[...]], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )


FAULTS = {"beyond": _beyond, "race": _race}


def launch_fault(fault: str) -> int:
    """Runs a kernel that a sanitizer must complain of."""
    block = pl.BlockSpec((_SIZE,), lambda i: (0,))
    run = pl.pallas_call(
        FAULTS[fault],
        grid=(1,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((_SIZE,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )
    jax.block_until_ready(run(jnp.arange(_SIZE, dtype=jnp.float32)))
    return 1


def main() -> None:
    """Launches what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*PRESETS, *FAULTS])
    what = parser.parse_args().what
    count = launch_fault(what) if what in FAULTS else launch_preset(what)
    print(f"launched {what}: {count} calls")


if __name__ == "__main__":
    main()
