"""`lowprec_attn.torch`: PyTorch's function with this library's arithmetic, eager and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention as jax_attention

torch = pytest.importorskip("torch", reason="needs torch")

from lowprec_attn import torch as ours  # noqa: E402 (only where there is torch)
from lowprec_attn.torch import bridge  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def qkv(heads=4, kv_heads=None, length=48, size=32, dtype=torch.bfloat16, batch=(2,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(*batch, n, length, size, generator=generator).to(dtype).requires_grad_()
        for n in (heads, kv_heads or heads, kv_heads or heads)
    ]


def gradients(function, arrays, **options):
    """O, dQ, dK and dV, for the same dO with every function."""
    out = function(*arrays, **options)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    return out, *torch.autograd.grad(out, arrays, do)


def in_jax(arrays, numerics, **options):
    """The same results from the JAX function, as tensors."""

    def array(x):
        return jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype)[6:]).swapaxes(-3, -2)

    attend = functools.partial(jax_attention.dot_product_attention, numerics=numerics, **options)
    out, vjp = jax.vjp(attend, *map(array, arrays))
    shape = tuple(np.swapaxes(np.empty(out.shape), -3, -2).shape)
    do = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(arrays[0].dtype)
    return [
        torch.from_numpy(np.array(x.swapaxes(-3, -2).astype(jnp.float32)))
        for x in (out, *vjp(array(do).astype(out.dtype)))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("numerics", ["normalized_delta", "matched", "exact"])
def test_it_is_our_function_of_jax(dtype, causal, numerics):
    """Except for a few bits, where the two programs fuse differently."""
    if numerics == "matched" and dtype == "float16":
        pytest.skip("matched is of bfloat16")
    arrays = qkv(kv_heads=2, dtype=DTYPES[dtype])
    attend = ours.attention_fn(numerics=numerics)
    found = gradients(attend, arrays, is_causal=causal, enable_gqa=True)
    for x, expected in zip(found, in_jax(arrays, numerics, is_causal=causal), strict=True):
        assert x.dtype == DTYPES[dtype]
        torch.testing.assert_close(x.float(), expected, rtol=2**-7, atol=1e-6)
        assert (x.float() != expected).float().mean() < 1e-3


def test_a_soft_cap_is_that_of_the_formula():
    """Compared with PyTorch's own derivatives in float64."""

    def capped(q, k, v):
        s = 3 * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / 3)
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)
        return s.softmax(-1) @ v

    arrays = qkv(dtype=torch.float32)
    exact = [x.detach().double().requires_grad_() for x in arrays]
    attend = ours.attention_fn(numerics="exact", logits_soft_cap=3.0)
    found = gradients(attend, arrays, is_causal=True)
    out = capped(*exact)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).double()
    for x, expected in zip(found, (out, *torch.autograd.grad(out, exact, do)), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_axes_before_the_heads_are_any(batch):
    arrays = qkv(batch=batch)
    found = gradients(ours.attention, arrays, is_causal=True, scale=0.2)
    usual = torch.nn.functional.scaled_dot_product_attention
    for x, expected in zip(found, gradients(usual, arrays, is_causal=True, scale=0.2), strict=True):
        assert x.shape == expected.shape
        torch.testing.assert_close(x, expected, rtol=0.05, atol=0.05)


def test_compiled_in_one_graph_it_has_the_same_bits():
    arrays = qkv()

    def step(*arrays):
        return ours.attention(*(x * 2 for x in arrays), is_causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, expected in zip(gradients(compiled, arrays), gradients(step, arrays), strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_it_is_an_operator_as_pytorch_wants_them():
    q, k, v = (x.transpose(1, 2).detach().contiguous().requires_grad_() for x in qkv(length=16))
    torch.library.opcheck(bridge._forward, (q, k, v, 0, True, 0.1))


def test_autocast_sets_the_format():
    arrays = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, dq, *_ = gradients(ours.attention, arrays, is_causal=True)
    assert (out.dtype, dq.dtype) == (torch.bfloat16, torch.float32)


def test_tensors_are_handed_over_without_a_copy():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    array = bridge._to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert torch.from_dlpack(array).data_ptr() == x.data_ptr()


def test_it_cures_what_flash_attention_does_to_dq():
    """Keys have a common part, so the error of δ moves dQ along their mean."""
    arrays = qkv(heads=2, length=128, size=64)
    with torch.no_grad():
        arrays[1] += 6.0  # k
        arrays[2] += 3.0  # v
    usual = torch.nn.functional.scaled_dot_product_attention
    exact = gradients(usual, [x.detach().double().requires_grad_() for x in arrays])[1]

    def error(numerics):
        found = gradients(ours.attention_fn(numerics=numerics), arrays)[1].double()
        return float((found - exact).norm() / exact.norm())

    assert error("normalized_delta") < error("flash") / 10


def test_a_model_trains_with_it_in_place_of_pytorchs(monkeypatch):
    """As in nanoGPT: one product for q, k and v, then heads by a view and a transpose."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

        def forward(self, x):
            parts = self.qkv(x).split(32, dim=2)
            q, k, v = (y.view(*y.shape[:2], 4, 8).transpose(1, 2) for y in parts)
            attend = torch.nn.functional.scaled_dot_product_attention
            y = attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
            return x + self.out(y.transpose(1, 2).contiguous().view(x.shape))

    def losses():
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(Block(), Block()), torch.randn(2, 24, 32)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(5):
            loss = (model(x)[:, 1:] - x[:, :-1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    usual = [*losses()]
    exact = ours.attention_fn(numerics="exact")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", exact)
    np.testing.assert_allclose([*losses()], usual, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_mask": torch.ones(48, 48, dtype=torch.bool)}, "attn_mask and dropout_p"),
        ({"dropout_p": 0.1}, "attn_mask and dropout_p"),
    ],
)
def test_what_it_cannot_serve_is_refused(change, message):
    with pytest.raises(ours.TorchAttentionError, match=message):
        ours.attention(*qkv(), **change)


def test_other_dtypes_and_groups_that_are_not_asked_for_are_refused():
    with pytest.raises(ours.TorchAttentionError, match="float32, got torch"):
        ours.attention(*qkv(dtype=torch.float64))
    with pytest.raises(ours.TorchAttentionError, match="query has 4 heads and key 2: pass enable"):
        ours.attention(*qkv(kv_heads=2))


@pytest.mark.parametrize(
    ("query", "others"),
    [((2, 1), (1, 2)), ((2, 3), (3, 2)), ((2, 3), (6,)), ((), (1,)), ((2,), (1,))],
)
def test_axes_before_the_heads_that_differ_are_refused(query, others):
    """PyTorch broadcasts some of these, and refuses the others."""
    (q, _, _), (_, k, v) = qkv(batch=query), qkv(batch=others)
    with pytest.raises(ours.TorchAttentionError, match="the same axes before the heads, got"):
        ours.attention(q, k, v)


def test_arrays_without_heads_and_empty_ones_are_refused():
    with pytest.raises(ours.TorchAttentionError, match=r"got \(48, 32\), \(48, 32\)"):
        ours.attention(*(x[0, 0] for x in qkv()))
    for empty in ({"length": 0}, {"batch": (0,)}):
        with pytest.raises(ValueError, match="query has an empty axis"):
            ours.attention(*qkv(**empty))


def test_numerics_that_draw_bits_are_refused():
    with pytest.raises(ours.TorchAttentionError, match="draws random bits"):
        ours.attention_fn(numerics="stochastic_output")


@pytest.mark.parametrize(("numerics", "statistics"), [("flash", 1), ("normalized_delta", 2)])
def test_kernels_keep_row_statistics_beside_o_for_the_backward_pass(numerics, statistics):
    """They read q, k and v from the caller's tensors. The statistics are lse, or m and 1 / l."""
    shape = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    arithmetic = bridge._arithmetic(bridge._Arithmetic(numerics, "standard", None, None))
    with jax_attention.compiled_for("H100"):
        program = bridge._program((shape,) * 3, "cuda", arithmetic, True, 0.125)
    assert [(x.shape, str(x.dtype)) for x in program.outputs] == [
        ((2, 256, 4, 64), "bfloat16"),  # O
        *[((2, 4, 256), "float32")] * statistics,
    ]


def test_an_output_that_a_called_function_returns_twice_is_one_output():
    @jax.jit
    def called(x, y):
        z = x + y
        return y, z, x, z

    jaxpr = jax.make_jaxpr(lambda x, y: (*called(x, y), 1.0, called(y, y)[0]))(1.0, 2.0).jaxpr
    x, y = jaxpr.invars
    found = bridge._origins(jaxpr)
    assert [found[i] for i in (0, 2, 5)] == [y, x, y]
    assert found[4] is None
    assert found[1] is found[3]
    assert found[1] not in (x, y)
