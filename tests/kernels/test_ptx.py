"""The GPU kernels compiled for an H200 without a GPU: the roundings are in the machine code.

This needs jax-cuda13-plugin, nvidia-cuda-nvcc and nvidia-nvvm, but no device. `pytest -m ptx`.
"""

import functools
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.targets import A100, B200, H200, L4, Target, devices_of, lowered
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny import tiny_settings

from lowprec_attn import attention, numerics
from lowprec_attn.arithmetic.request import Extras, Spec
from lowprec_attn.gpt2 import loss
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.numerics import EXACT, FLASH, MATCHED, Numerics, RowMax, StandardMax
from lowprec_attn.training.devices import compiler_options
from lowprec_attn.training.step import make_steps, root_key
from pallas_kernels.gpu import attention as gpu
from pallas_kernels.gpu.cross_entropy import cross_entropy_rows
from pallas_kernels.gpu.hopper import attention as hopper

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin")
nvidia = pytest.importorskip("nvidia", reason="needs nvidia-cuda-nvcc and nvidia-nvvm")

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


FEWER_REGISTERS_SINCE_0_11 = pytest.mark.xfail(
    jax.__version_info__ < (0, 11), reason="JAX 0.10's compiler takes more: slower, not wrong"
)

KERNELS = ("forward", "key_gradients", "query_gradients")
KEY, QUERY = "key_gradients", "query_gradients"

# Points and the kernels that round at them; `output` and `grads` are cast when they are stored.
ROUNDED_IN = {
    "scores": set(KERNELS),
    "shift": {"forward"},
    "probs": {"forward"},
    "value": set(KERNELS),
    "pv": {"forward"},
    "rescale": {"forward"},
    "accumulator": {"forward"},
    "stats": {"forward"},
    "normalizer": {"forward"},
    "lse": {"forward"},
    "output": {"forward"},
    "output_bwd": {QUERY},
    "delta_value": {QUERY},
    "probs_bwd": {KEY},
    "dp": {KEY, QUERY},
    "ds": {KEY, QUERY},
    "tile_grads": {KEY, QUERY},
    "grads": {KEY, QUERY},
}


@functools.cache
def ptx(
    chosen: Numerics,
    rule: RowMax = StandardMax(),  # noqa: B008 (frozen)
    head_size: int = 64,
    dtype: str = "bfloat16",
    target: Target = H200,
    soft_cap: float | None = None,
) -> dict[str, str]:
    """The PTX of each kernel of a causal forward and backward pass."""
    x = jax.ShapeDtypeStruct((1, 256, 2, head_size), jnp.dtype(dtype))
    spec = Spec(numerics=chosen, row_max=rule, scale=0.1, soft_cap=soft_cap, is_causal=True)

    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def attend(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            return gpu.attention(*qkv, Extras(), spec)

        (out, lse), pullback = jax.vjp(attend, q, k, v)
        return out, pullback((jnp.ones_like(out), lse))

    result = {}
    for text in dumped(lowered(step, x, x, x, target=target)):
        if found := re.search(r"\.entry attention_(\w+)", text):
            result[found.group(1)] = text
    assert set(KERNELS) <= result.keys()
    return result


def dumped(program: Any) -> list[str]:
    """The PTX of a lowered program: one text per Pallas kernel or group of XLA's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        program.compile(compiler_options={"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"})
        return [path.read_text() for path in Path(folder).glob("*.ptx")]


def conversions(text: str, fmt: str) -> int:
    """The number of values that the code rounds to a format."""
    pairs, singles = (
        len(re.findall(rf"cvt\.rn\.{name}\.f32", text))
        for name in ({"bfloat16": ("bf16x2", "bf16"), "float16": ("f16x2", "f16")}[fmt])
    )
    return 2 * pairs + singles


def changed(before: dict[str, str], after: dict[str, str], fmt: str) -> set[str]:
    return {k for k in KERNELS if conversions(after[k], fmt) > conversions(before[k], fmt)}


@pytest.mark.parametrize("point", ROUNDED_IN)
def test_float16_roundings_are_there(point: str) -> None:
    """`exact` splits operands into bfloat16 terms, so it has no other conversion to float16."""
    assert (
        changed(ptx(EXACT), ptx(EXACT.replace(**{point: "float16"})), "float16")
        == ROUNDED_IN[point]
    )


# `grads` and `value` already have the format of q and v.
IN_BFLOAT16 = set(ROUNDED_IN) - {"grads", "value"}


@pytest.mark.parametrize(
    "point", [p for p in ROUNDED_IN if getattr(FLASH, p) == getattr(EXACT, p) and p in IN_BFLOAT16]
)
def test_bfloat16_roundings_are_there(point: str) -> None:
    assert (
        changed(ptx(FLASH), ptx(FLASH.replace(**{point: "bfloat16"})), "bfloat16")
        == ROUNDED_IN[point]
    )


@pytest.mark.parametrize(("target", "spilled"), [(H200, 0), (A100, 32)], ids=["H200", "A100"])
@pytest.mark.parametrize("preset", ["flash", "normalized_delta"])
def test_a_soft_cap_is_a_tanh_of_float32(preset: str, target: Target, spilled: int) -> None:
    """`tanh.approx` has an error of 2^-11, which is 0.02 of an exponent at a cap of 50."""
    chosen = numerics.PRESETS[preset]
    texts = ptx(chosen, target=target, soft_cap=50.0)
    for name, text in texts.items():
        assert "tanh.approx" not in text, name
        # tanh x = 1 − 2 / (1 + exp 2x) needs one reciprocal per score.
        assert len(re.findall(r"rcp\.approx|div\.full", text)) > 8, name
        report = assembled(text)
        assert sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= spilled, name


@pytest.mark.parametrize(("preset", "spilled"), [("flash", 0), ("normalized_delta", 64)])
def test_values_of_another_head_size_fit(preset: str, spilled: int) -> None:
    """Head sizes 192 and 128, as in multi-head latent attention, use the tiles of 256."""
    q, v = (jax.ShapeDtypeStruct((1, 256, 2, size), jnp.bfloat16) for size in (192, 128))
    spec = Spec(
        numerics=numerics.PRESETS[preset], row_max=StandardMax(), scale=0.07, is_causal=True
    )

    def step(*qkv: jax.Array) -> Any:
        (out, lse), pullback = jax.vjp(lambda *x: gpu.attention(*x, Extras(), spec), *qkv)
        return out, pullback((jnp.ones_like(out), lse))

    texts = [x for x in dumped(lowered(step, q, q, v, target=H200)) if ".entry attention_" in x]
    assert len(texts) == len(KERNELS)
    for text in texts:
        report = assembled(text)
        assert sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= spilled


def test_sinks_cost_the_kernels_no_spills() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    sinks = jax.ShapeDtypeStruct((2,), jnp.float32)
    for preset in ("flash", "normalized_delta"):
        spec = Spec(
            numerics=numerics.PRESETS[preset], row_max=StandardMax(), scale=0.1, is_causal=True
        )

        def step(*arrays: jax.Array, spec: Spec = spec) -> Any:
            def attend(q: Any, k: Any, v: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
                return gpu.attention(q, k, v, Extras(sinks=sinks), spec)

            (out, lse), pullback = jax.vjp(attend, *arrays)
            return out, pullback((jnp.ones_like(out), lse))

        texts = [
            x
            for x in dumped(lowered(step, x, x, x, sinks, target=H200))
            if ".entry attention_" in x
        ]
        assert len(texts) == len(KERNELS)
        for text in texts:
            assert not any(int(n) for n in re.findall(r"(\d+) bytes spill", assembled(text)))


def test_matched_rounds_its_probs_in_every_kernel() -> None:
    """In pairs. The backward kernels round P̄ in addition to P, which is an operand, and dS."""
    texts = ptx(MATCHED.replace(saved_output="float32"))
    once = ptx(MATCHED.replace(saved_output="float32", recomputed_probs="unrounded"))
    assert changed(once, texts, "bfloat16") == {KEY, QUERY}
    for name, text in texts.items():
        assert "cvt.rn.bf16.f32" not in text, name
        assert set(re.findall(r"ex2\.\S+", text)) == {"ex2.approx.ftz.f32"}, name


@pytest.mark.parametrize("point", ROUNDED_IN)
def test_shortened_significands_are_rounded_on_their_bits(point: str) -> None:
    """bf16_m3 drops twenty bits of a float32, and first adds half of their range, less one."""
    texts = ptx(EXACT.replace(**{point: "bf16_m3"}))
    half = re.compile(rf"add\.s32\s.*\b{2**19 - 1};")
    assert {name for name in KERNELS if half.search(texts[name])} == ROUNDED_IN[point]
    assert not any(half.search(text) for text in ptx(EXACT).values())


def test_flash_rounds_its_operands_once() -> None:
    """P̄, P and dS enter the products as pairs; stores have the other conversions."""
    for name, text in ptx(FLASH).items():
        assert conversions(text, "bfloat16") > 0, name
        assert "cvt.rn.bf16.f32" not in text, name


@pytest.mark.parametrize("preset", ["flash", "exact", "published"])
def test_products_are_on_the_tensor_cores_and_never_tf32(preset: str) -> None:
    for name, text in ptx(numerics.PRESETS[preset]).items():
        products = Counter(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.\S+", text))
        assert products, name
        assert all("f32.bf16.bf16" in product for product in products), (name, products)


@pytest.mark.parametrize(
    ("preset", "head_size", "dtype", "spilled"),
    [
        ("flash", 32, "float16", 0),
        ("flash", 64, "bfloat16", 0),
        ("flash", 128, "bfloat16", 512),  # dK and dV
        ("flash", 256, "bfloat16", 0),
        ("published", 64, "bfloat16", 256),
        ("published", 80, "bfloat16", 2048),  # products of dK and dV are kept apart from their sums
        ("published_eager", 64, "bfloat16", 256),
        ("normalized_delta", 64, "bfloat16", 0),
        ("normalized_delta", 128, "bfloat16", 768),
        ("matched", 64, "bfloat16", 0),
        ("matched", 128, "bfloat16", 768),  # dK and dV
        ("matched", 256, "bfloat16", 0),
        # Three terms of an operand need room. These were the fastest tiles nevertheless.
        ("exact", 64, "bfloat16", 64),
        ("exact", 128, "bfloat16", 4096),
        ("exact", 256, "float32", 16384),
    ],
)
def test_default_tiles_fit_shared_memory_and_registers(
    preset: str, head_size: int, dtype: str, spilled: int
) -> None:
    chosen = numerics.PRESETS[preset]
    for name, text in ptx(chosen, head_size=head_size, dtype=dtype).items():
        report = assembled(text)
        assert sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= spilled, name


@pytest.mark.parametrize("target", [A100, L4, B200], ids=["A100", "L4", "B200"])
@pytest.mark.parametrize(
    ("preset", "head_size", "dtype", "spilled"),
    [
        ("flash", 64, "bfloat16", 0),
        ("flash", 128, "bfloat16", 0),
        pytest.param("flash", 256, "bfloat16", 256, marks=FEWER_REGISTERS_SINCE_0_11),
        ("exact", 64, "bfloat16", 0),
        ("exact", 128, "float32", 8192),
    ],
)
def test_tiles_of_untuned_gpus_fit(
    target: Target, preset: str, head_size: int, dtype: str, spilled: int
) -> None:
    chosen = numerics.PRESETS[preset]
    for name, text in ptx(chosen, StandardMax(), head_size, dtype, target).items():
        report = assembled(text)
        assert sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= spilled, name


@pytest.mark.parametrize("rule", [StandardMax(), numerics.DynamicMax()], ids=str)
@pytest.mark.parametrize("preset", ["flash", "exact", "published"])
def test_products_on_blackwell(preset: str, rule: RowMax) -> None:
    """With Blackwell's tensor cores or, for some tiles, those of a warp, but never Hopper's."""
    chosen = numerics.PRESETS[preset].replace(kv_block=None)
    texts = ptx(chosen, rule, target=B200)
    for name, text in texts.items():
        assert ".target sm_100" in text, name
        assert "wgmma" not in text, name
        assert "tf32" not in text, name
        own = re.findall(r"tcgen05\.mma\.\S+", text)
        assert all("kind::f16" in product for product in own), name  # 16-bit operands
        warps = re.findall(r"mma\.sync\.\S+", text)
        assert all("f32.bf16.bf16.f32" in product for product in warps), name
        assert own or warps, name
    assert "tcgen05.mma" in texts["forward"]


@pytest.mark.parametrize(
    ("preset", "head_size"), [("flash", 64), ("flash", 128), ("published", 64)]
)
def test_products_run_beside_other_instructions(preset: str, head_size: int) -> None:
    """`ptxas` reports where it makes each tensor-core instruction wait for the one before."""
    for name, text in ptx(numerics.PRESETS[preset], head_size=head_size).items():
        assert "serialized" not in assembled(text), name


@pytest.mark.parametrize(
    ("dtype", "z_loss", "programs"),
    [
        ("float32", 0.0, 2),
        ("float32", 1e-4, 2),
        pytest.param("bfloat16", 0.0, 2, marks=FEWER_REGISTERS_SINCE_0_11),
        ("bfloat16", 1e-4, 1),  # 199 registers instead of 128
    ],
)
def test_programs_of_the_cross_entropy_share_a_multiprocessor(
    dtype: str, z_loss: float, programs: int
) -> None:
    """One program reads while another computes; with fewer programs the kernel waits for memory."""
    logits = jax.ShapeDtypeStruct((64, 50304), jnp.dtype(dtype))
    targets = jax.ShapeDtypeStruct((64,), jnp.int32)
    rows = functools.partial(cross_entropy_rows, dtype=jnp.bfloat16, z_loss=z_loss)
    (text,) = (
        text
        for text in dumped(lowered(rows, logits, targets, target=H200))
        if ".entry cross_entropy_rows" in text
    )
    assert programs_at_once(text) >= programs


@pytest.mark.parametrize(("preset", "kv_block"), [("flash", 64), ("flash", 512), ("matched", 64)])
def test_four_programs_of_the_forward_kernel_share_a_multiprocessor(
    preset: str, kv_block: int
) -> None:
    """With one tile per step or eight. With two programs the kernel would take a third longer."""
    chosen = numerics.PRESETS[preset].replace(kv_block=kv_block)
    q = jax.ShapeDtypeStruct((16, 1024, 12, 64), jnp.bfloat16)
    spec = Spec(numerics=chosen, row_max=StandardMax(), scale=0.125, is_causal=True)

    def attend(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gpu.attention(*qkv, Extras(), spec)

    texts = dumped(lowered(attend, q, q, q, target=H200))
    (text,) = (text for text in texts if ".entry attention_forward" in text)
    assert not any(int(n) for n in re.findall(r"(\d+) bytes spill", assembled(text)))
    assert programs_at_once(text) >= 4


def programs_at_once(text: str) -> int:
    """The number of programs of a kernel whose registers fit a multiprocessor."""
    threads, registers = (
        int(re.findall(pattern, report)[0])
        for pattern, report in ((r"\.reqntid (\d+)", text), (r"Used (\d+)", assembled(text)))
    )
    # A thread gets registers in groups of eight, from the 65,536 of a multiprocessor.
    return 65536 // (threads * -(-registers // 8) * 8)


@pytest.mark.parametrize(
    ("preset", "head_size", "dtype"),
    [
        ("flash", 64, "bfloat16"),
        ("flash", 80, "float16"),
        ("flash", 64, "float32"),
        ("flash", 128, "bfloat16"),
        ("published", 64, "bfloat16"),
    ],
)
def test_ties_are_counted_where_the_product_left_the_scores(
    preset: str, head_size: int, dtype: str
) -> None:
    """If threads exchanged scores first, they would count scores of other rows."""
    kv_block = 64 if preset == "published" else None  # longer steps count ties once per step
    chosen = numerics.PRESETS[preset].replace(kv_block=kv_block)
    standard = ptx(chosen, StandardMax(), head_size, dtype)["forward"]
    for rule in (numerics.DynamicMax(), numerics.PublishedMax()):
        text = ptx(chosen, rule, head_size, dtype)["forward"]
        assert len(re.findall(r"mma\.sync\S+\.b1\.b1\S+\.and\.popc", text)) == 2  # one per loop
        assert "shfl.sync.idx" not in text
        assert text.count("st.shared") <= standard.count("st.shared")


def test_powers_of_two_are_single_instructions() -> None:
    """Without `.ftz` the assembler adds three instructions, for results that are subnormal."""
    for name, text in ptx(FLASH).items():
        assert set(re.findall(r"ex2\.\S+", text)) == {"ex2.approx.ftz.f32"}, name


def assembled(text: str) -> str:
    """The report of `ptxas` about registers and spills."""
    (ptxas,) = (found for root in nvidia.__path__ for found in Path(root).glob("*/bin/ptxas"))
    target = re.search(r"\.target (\w+)", text)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        return subprocess.run(
            [ptxas, "-v", f"-arch={target.group(1)}", file.name, "-o", "/dev/null"],
            check=True,
            capture_output=True,
            text=True,
        ).stderr


@pytest.mark.parametrize(
    ("logits", "chunks", "packed"), [("float32", 4, False), ("bfloat16", 2, True)]
)
def test_a_training_step_has_no_loops_and_adds_products_in_place(
    logits: str, chunks: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop would split the CUDA graph of a step; a separate sum of products is one more pass.

    These sums are added in place: the chunks of the loss after the first, in the gradient of the
    embedding; and the gradients of a norm through two of three projections (packed projections are
    one). q, k, v and their gradients are not copied. Products write logits of either format. GELU
    is fused into the product before it, and none of its operations remains in bfloat16. Where JAX
    has Mosaic GPU, a kernel of this project does that, with a fused gradient as well; elsewhere
    cuBLAS does.
    """
    settings = tiny_settings(
        model__layers=1,
        model__width=128,
        model__context=128,
        model__vocab_size=512,
        model__logits_dtype=logits,
    )
    monkeypatch.setattr(loss, "_BYTES_PER_CHUNK", 4 * 256 * 512)
    steps = make_steps(settings, Attend(attention.dot_product_attention, packed))
    ids = jax.ShapeDtypeStruct((1, 8, 128), jnp.int32)
    root = root_key(settings)
    state = jax.eval_shape(steps.init, root)
    step = lowered(steps.train, state, ids, ids, root, target=H200)
    options = {**compiler_options("gpu"), "xla_gpu_autotune_level": 0}
    text = step.compile(compiler_options=options).as_text()
    assert not re.search(r" while\(", text)
    assert len(re.findall(r'"beta":1[,.}]', text)) == chunks - 1 + (0 if packed else 2)
    if packed:
        entry = text[text.index("\nENTRY") :]
        assert not re.findall(r"= bf16\[(?:8,128|1024),\S+ (?:copy|fusion)\(", entry)
    ours = "mosaic_gpu" in text
    assert text.count('"epilogue":"GELU_AUX"') == (0 if ours else 1)
    assert ours == hopper.is_available()
    assert "tanh" not in text
    short = {"float32": "f32", "bfloat16": "bf16"}[logits]
    products = re.findall(rf"\({short}\[{1024 // chunks},512\].* custom-call\(.*__cublas", text)
    assert len(products) == chunks


def test_gradients_are_reduced_where_they_lie() -> None:
    """One all-reduce takes several arrays, which XLA does not copy into one array and out again."""
    mesh = Mesh(np.array(devices_of(H200, 2)), ("data",))
    whole = PartitionSpec()
    mean = jax.shard_map(
        lambda *x: lax.pmean(x, "data"),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    shapes = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, whole))
        for shape in ((768, 3072), (768,), (3072, 768))
    )
    program = jax.jit(mean).trace(*shapes).lower(lowering_platforms=("cuda",))
    text = program.compile(compiler_options=compiler_options("gpu")).as_text()
    assert len(re.findall(r"= .* all-reduce(?:-start)?\(", text)) == 1
    assert "concatenate" not in text
