"""cuDNN's attention in our trainer: asked for by name alone, for one arithmetic alone."""

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks import cudnn_attention
from lowprec_attn import numerics
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.attention import dispatch
from lowprec_attn.lab import runner

SPEC = Spec(
    numerics=cudnn_attention.SERVED.replace(kv_block=64),
    row_max=numerics.StandardMax(),
    scale=0.125,
    is_causal=True,
)
SERVED = Request(
    spec=SPEC,
    q_shape=(1, 128, 2, 64),
    kv_shape=(1, 128, 2, 64),
    dtype=jnp.dtype("bfloat16"),
    platform="cuda",
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(runner, "TRAIN", runner.TRAIN)
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, cudnn_attention.NAME, None)
    cudnn_attention.register()


def test_it_is_taken_where_it_is_named_and_never_else():
    assert dispatch.resolve(SERVED, "cudnn") == "cudnn"
    assert dispatch.resolve(SERVED) != "cudnn"
    assert dispatch.exponent_of(SERVED, "cudnn") == SPEC.numerics.exponent
    assert [*runner.TRAIN][-2:] == ["benchmarks.cudnn_attention", "train"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"numerics": numerics.EXACT}, "any arithmetic but `flash`"),
        ({"numerics": SPEC.numerics.replace(exponent="scale_first")}, "exponent='shift_first'"),
        ({"numerics": SPEC.numerics.replace(ds="float32")}, "nothing in it can be chosen"),
        ({"row_max": numerics.DynamicMax()}, "row_max=DynamicMax"),
        ({"is_causal": False}, "plain causal attention"),
        ({"window": (4, 0)}, "plain causal attention"),
    ],
)
def test_what_it_cannot_have_is_refused(change, reason):
    request = dataclasses.replace(SERVED, spec=dataclasses.replace(SPEC, **change))
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        dispatch.resolve(request, "cudnn")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "default"}, "needs a CUDA GPU"),
        ({"dtype": jnp.dtype("float32")}, "float32 inputs"),
        ({"has_lengths": True}, "no bias, mask, window, lengths"),
        ({"mask_shape": (1, 1, 128, 128)}, "no bias, mask, window, lengths"),
    ],
)
def test_calls_that_it_cannot_serve_are_refused(change, reason):
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        dispatch.resolve(dataclasses.replace(SERVED, **change), "cudnn")
