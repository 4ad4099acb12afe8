"""Launches GPU kernels on small shapes, for `compute-sanitizer`.

    python tests/support/gpu_launches.py flash     # attention with a preset and every rule
    python tests/support/gpu_launches.py trainer   # cross-entropy, LayerNorm and GELU
    python tests/support/gpu_launches.py hopper    # the Hopper kernels of attention
    python tests/support/gpu_launches.py hopper_trainer  # those of cross-entropy and of the MLP
    python tests/support/gpu_launches.py beyond    # a kernel that stores outside its array
    python tests/support/gpu_launches.py race      # warps that write one word of shared memory

Forward and backward are separate executables. With XLA's `platform` allocator, q, k, v, O, lse and
the gradients are then separate allocations, so the sanitizer knows where each ends. `record_gpu.py`
sets the environment that this needs.
"""

import argparse
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from harness import Case
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from kernel_calls import PRESETS, RULES, Call, call_of, operands_of

from lowprec_attn.numerics import (
    AUXILIARY_OUTPUT,
    CORRECTED_AFTER_CAST,
    FLASH,
    FLOAT32_OUTPUT,
    MATCHED,
    MATCHED_FLOAT32_OUTPUT,
    NORMALIZED_DELTA,
    PUBLISHED,
    DynamicMax,
    StandardMax,
)
from pallas_kernels.gpu import gelu, layer_norm
from pallas_kernels.gpu.cross_entropy import cross_entropy_rows

# Lengths that are no multiple of the tile, grouped heads, keys that no row sees, and default tiles.
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
# q, k and v are one array; the backward kernels write the gradients into one array in turn.
PACKED = Case(batch=2, rows=77, keys=77, head_size=64, dtype="bfloat16", is_causal=True)
# A head size between powers of two, operands that are split, and tiles that are fully visible.
SPLIT = Case(batch=1, rows=130, keys=100, head_size=40)

# For the Hopper kernels: rows that end within a tile of 128.
ROWS_OF_THREE_WARPGROUPS = Case(
    batch=1, rows=192, keys=192, head_size=64, dtype="bfloat16", is_causal=True
)


def launch_preset(preset: str) -> int:
    """Runs forward and backward with every rule; returns the number of calls."""
    calls = [(LENGTHS, call_of(LENGTHS, PRESETS[preset], rule, None)) for rule in RULES.values()]
    calls.append((SPLIT, call_of(SPLIT, PRESETS[preset], sizes=None)))
    calls.append((PACKED, call_of(PACKED, PRESETS[preset], sizes=None, packed=True)))
    for case, call in calls:
        jax.block_until_ready(launch(case, call))
    return len(calls)


def launch(case: Case, call: Call) -> Any:
    """Runs a forward and a backward executable and returns their results."""

    @jax.jit
    def forward(extras: Any, *qkv: jax.Array) -> Any:
        return jax.vjp(partial(call.attend, extras), *qkv)

    @jax.jit
    def backward(pullback: Any, *cotangents: jax.Array) -> Any:
        return pullback(cotangents)

    arrays, extras = operands_of(case)
    (out, lse), pullback = forward(extras, *call.qkv(arrays))
    return out, lse, backward(pullback, arrays["do"].astype(out.dtype), arrays["dlse"])


def launch_trainer() -> int:
    """Runs the trainer's kernels on shapes off their tiles; returns the number of calls."""
    logits, targets = jnp.ones((3, 9000)), jnp.array([0, 4500, 8999])
    residual, y, scale = jnp.ones((70, 96)), jnp.ones((70, 96), jnp.bfloat16), jnp.ones(96)
    x = jnp.ones(5000, jnp.bfloat16)
    results = [
        cross_entropy_rows(logits, targets, jnp.bfloat16),
        cross_entropy_rows(logits.astype(jnp.bfloat16), targets, jnp.bfloat16),
        layer_norm.add_norm(residual, y, scale, y.dtype),
        layer_norm.add_norm_gradients(residual, scale, residual, y, adds=True),
        gelu.gelu(x),
        gelu.gelu_gradient(x, x),
    ]
    jax.block_until_ready(results)
    return len(results)


def launch_hopper() -> int:
    """Runs every Hopper kernel of attention, with the tiles of short and of long calls."""
    from pallas_kernels.gpu.hopper import attention as hopper
    from pallas_kernels.gpu.hopper.block_sizes import default_block_sizes

    calls = []
    for head_size in hopper.HEAD_SIZES:
        long = default_block_sizes(head_size, long=True)
        calls += [
            (head_size, FLASH, StandardMax(), None),
            (head_size, FLASH, DynamicMax(), long),
            (head_size, FLASH, DynamicMax(), None),  # tiles overlap at head size 64
            (head_size, FLOAT32_OUTPUT, StandardMax(), None),
            (head_size, NORMALIZED_DELTA, StandardMax(), None),
            (head_size, CORRECTED_AFTER_CAST, StandardMax(), None),
            (head_size, MATCHED, StandardMax(), None),
            (head_size, MATCHED_FLOAT32_OUTPUT, DynamicMax(), None),
        ]
        if head_size < 256:
            unordered = default_block_sizes(head_size, unordered=True)
            calls.append((head_size, FLASH, StandardMax(), unordered))
            calls.append((head_size, AUXILIARY_OUTPUT, StandardMax(), None))
    calls += [(64, PUBLISHED, rule, None) for rule in (StandardMax(), DynamicMax())]
    for head_size, chosen, rule, sizes in calls:
        case = dataclasses.replace(ROWS_OF_THREE_WARPGROUPS, head_size=head_size)
        kv_block = 128 if chosen == PUBLISHED else None
        call = call_of(case, chosen, rule, sizes, kv_block=kv_block, implementation=hopper)
        jax.block_until_ready(launch(case, call))
    return len(calls)


def launch_hopper_trainer() -> int:
    """Runs the trainer's Hopper kernels, with rows beyond a tile; returns the number of calls."""
    from pallas_kernels.gpu.hopper import cross_entropy, gelu_products

    logits = jax.random.normal(jax.random.key(0), (5, 128 * 73), jnp.bfloat16)
    x, w = jnp.ones((304, 192), jnp.bfloat16), jnp.ones((192, 512), jnp.bfloat16)
    tile = gelu_products.Tile(programs=4)  # two clusters, each with several tiles
    h, y = gelu_products.product_and_gelu(x, w, tile=tile)
    results = [
        (h, y),
        gelu_products.gelu_gradient_of_product(x, w.T, h, tile=tile),
        cross_entropy.cross_entropy_rows(logits, jnp.arange(5), programs=2),
    ]
    jax.block_until_ready(results)
    return len(results)


# Launches whose names are not presets.
OTHERS = {
    "trainer": launch_trainer,
    "hopper": launch_hopper,
    "hopper_trainer": launch_hopper_trainer,
}

_SIZE = 1024
# Without `volatile` each thread would keep the word that it wrote, and nothing would be read.
_ONE_WORD = """{
    .shared .align 4 .b32 word;
    st.volatile.shared.f32 [word], $1;
    ld.volatile.shared.f32 $0, [word];
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
    """Runs a kernel that a sanitizer must report."""
    block = pl.BlockSpec((_SIZE,), lambda i: (0,))
    run = pl.pallas_call(
        FAULTS[fault],
        grid=(1,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((_SIZE,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="attention_fault",  # the sanitizer checks only kernels named so
    )
    jax.block_until_ready(run(jnp.arange(_SIZE, dtype=jnp.float32)))
    return 1


def main() -> None:
    """Runs the launch that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=[*PRESETS, *OTHERS, *FAULTS])
    what = parser.parse_args().what
    if what in OTHERS:
        count = OTHERS[what]()
    else:
        count = launch_fault(what) if what in FAULTS else launch_preset(what)
    print(f"launched {what}: {count} calls")


if __name__ == "__main__":
    main()
