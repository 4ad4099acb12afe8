"""The GPU kernels in the interpreter, on any machine: cases, tiles, random bits, refusals.

Presets and rules are tested in `test_gpu_presets.py`, numerics points in `test_gpu_points.py`, and
what a device computes in `test_gpu_device.py`.
"""

import dataclasses
import re
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import CASES, CAUSAL, INTERPRETED, REPEATED, TALL, call_of, run, run_plain

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import tiled
from lowprec_attn.attention.dispatch import resolve
from lowprec_attn.numerics import EXACT, POINTS, Numerics, StandardMax
from pallas_kernels.block_sizes import Tile
from pallas_kernels.gpu import attention as gpu

pytestmark = [
    pytest.mark.usefixtures("strict_promotion"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

# Compilation takes the time here; the device runs every case.
SLOW = {"gqa_head_32", "one_row", "more_rows", "more_keys_head_64"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in SLOW])
def test_exact_arithmetic_is_as_accurate_as_plain_float32(case: str) -> None:
    problem, arrays = CASES[case], harness.inputs(CASES[case])
    call = call_of(problem, EXACT)
    harness.check(
        run(problem, call),
        run_plain(problem, call),
        harness.oracle(problem, arrays),
        noise=harness.score_noise(problem, arrays),
    )


STOCHASTIC = EXACT.replace(**dict.fromkeys(POINTS, "bfloat16:stochastic"))


def test_random_bits_are_those_of_tiled() -> None:
    case = dataclasses.replace(CAUSAL, heads=4, kv_heads=2)
    tiles = tiled.BlockSizes(query=5, kv_bwd=9)
    ours = run(case, call_of(case, STOCHASTIC))
    theirs = run(case, call_of(case, STOCHASTIC, sizes=tiles, implementation=tiled))
    for name, x in theirs.items():
        assert harness.share_of_other_roundings(ours[name], x) < 0.05, name


def test_tiles_do_not_change_the_arithmetic() -> None:
    a, b = (
        run(REPEATED, call_of(REPEATED, numerics.PUBLISHED, numerics.PublishedMax(), sizes))
        for sizes in (INTERPRETED, TALL)
    )
    harness.check_same(b, a, max(REPEATED.rows, REPEATED.keys))


def test_vmap_with_its_own_lengths_and_a_head_size_between_powers_of_two() -> None:
    case = harness.Case(batch=3, heads=1, kv_heads=1, head_size=24, key_lengths=(20, 0, 7))
    call = call_of(case, EXACT, backward=False)
    arrays = {name: jnp.asarray(x)[:, None] for name, x in harness.inputs(case).items()}
    mapped = jax.vmap(lambda x, lengths: call(x, Extras(key_lengths=lengths)), in_axes=(0, 0))(
        arrays, jnp.array(case.key_lengths, jnp.int32)[:, None]
    )
    expected = harness.oracle(case, harness.inputs(case))
    for name, x in mapped.items():
        assert harness.error(np.asarray(x)[:, 0], expected[name]) < 1e-5, name


def request(chosen: Numerics = numerics.FLASH, **options: Any) -> Request:
    """A request to compiled kernels on a GPU, unless the options say otherwise."""
    spec = Spec(
        numerics=chosen,
        row_max=StandardMax(),
        scale=1.0,
        block_sizes=options.pop("sizes", None),
    )
    shape = (1, options.pop("length", 8), 2, options.pop("head_size", 64))
    options = {"dtype": np.dtype("float32"), "platform": "cuda"} | options
    return Request(spec=spec, q_shape=shape, kv_shape=shape, **options)


@pytest.mark.parametrize("asked", [request(), request(sizes=INTERPRETED, platform="cpu")])
def test_forcing_the_kernels_where_they_serve(asked: Request) -> None:
    assert resolve(asked, "gpu") == "gpu"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(platform="cpu"), "this platform (it needs a CUDA GPU"),
        (request(EXACT.replace(pv="float8_e4m3fn")), "pv=float8_e4m3fn"),
        (request(EXACT.replace(output="float8_e5m2")), "output=float8_e5m2"),
        (request(has_bias=True), "a dense bias"),
        (request(has_mask=True), "a dense mask"),
        (request(head_size=8), "head size 8"),
        (request(head_size=320), "head size 320"),
    ],
)
def test_forcing_the_kernels_names_what_they_decline_and_who_serves_it(
    asked: Request, reason: str
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(f"'gpu' does not support {reason}")):
        resolve(asked, "gpu")
    assert gpu.unsupported(asked) is not None
    with pytest.raises(NotImplementedError, match=r"; use tiled or dense$"):
        resolve(asked, "gpu")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (request(numerics.STANDARD), r"'gpu' does not support normalize_probs.*; use dense$"),
        (
            request(EXACT.replace(kv_block=40), length=64),
            r"'gpu' does not support kv_block=40 .*multiples of 16.*; use tiled$",
        ),
        (request(sizes=tiled.BlockSizes()), r"'gpu' does not support block_sizes of .*; use tiled"),
    ],
)
def test_forcing_the_kernels_names_the_only_one_who_serves(asked: Request, named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        resolve(asked, "gpu")


def test_the_public_entry_raises_the_same_error() -> None:
    q = jnp.ones((1, 16, 2, 32))
    options = {"implementation": "gpu", "block_sizes": INTERPRETED}
    with pytest.raises(NotImplementedError, match=r"'gpu' does not support pv=float8_e4m3fn; "):
        attention.dot_product_attention(
            q, q, q, numerics=EXACT.replace(pv="float8_e4m3fn"), **options
        )
    with pytest.raises(NotImplementedError, match=r"'gpu' does not support a dense mask; "):
        attention.dot_product_attention(q, q, q, mask=jnp.ones((1, 2, 16, 16), bool), **options)


def test_block_sizes_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"query must be one of .* got 48"):
        Tile(query=48, kv=64)
    with pytest.raises(ValueError, match=r"warps .* got 3"):
        Tile(query=64, kv=64, warps=3)
