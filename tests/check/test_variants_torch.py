"""`check` of PyTorch's functions, and of eager attention functions as in transformers."""

import functools
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.attention import flex_attention  # noqa: E402

from lowprec_attn import check  # noqa: E402
from lowprec_attn.check import libraries  # noqa: E402
from lowprec_attn.commands.main import main  # noqa: E402

SMALL = {"tokens": 64, "head_size": 16}
SINKS = {"causal": "is_causal", "scale": "scaling", "mask": "attention_mask", "sinks": "s_aux"}
SOFT_CAP = {"causal": "is_causal", "scale": "scaling", "mask": "attention_mask",
            "soft_cap": "softcap", "window": "sliding_window"}  # fmt: skip


@pytest.mark.parametrize(("backend", "state", "name"), [
    ("math", "right", "exact"), ("flash", "risk", "flash"),
])  # fmt: skip
def test_sdpa_has_no_bug(backend, state, name):
    options = check.Options(tokens=64, head_size=32)
    report = check.check(check.find(f"torch.sdpa:{backend}", options))
    assert (report.state, report.bugs) == (state, ())
    assert name in (report.arithmetic.name, *report.arithmetic.alike)
    assert ("additive bias" in report.errors) == (backend == "math")


def test_a_function_with_the_parameters_of_sdpa_is_called_as_that(few_candidates):
    from lowprec_attn.torch import attention_fn

    options = check.Options(tokens=64, head_size=16)
    target = check.of_function(attention_fn(numerics="exact"), options)
    report = check.check(target)
    assert (report.state, report.bugs) == ("right", ())
    assert "grouped heads" in report.errors  # so it was called with enable_gqa
    assert any("called as scaled_dot_product_attention" in note for note in report.notes)
    assert target.can >= {"causal", "full", "scale"}


def masked_scores(q, k, scaling, is_causal, attention_mask, sliding_window=None, softcap=None):
    s = torch.matmul(q, k.transpose(2, 3)) * scaling
    if softcap is not None:
        s = torch.tanh(s / softcap) * softcap
    at, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = cols <= at if is_causal else cols >= 0
    if sliding_window is not None:
        seen = seen & (at - cols <= sliding_window[0]) & (cols - at <= sliding_window[1])
    seen = seen if attention_mask is None else seen & attention_mask
    return s.masked_fill(~seen, torch.finfo(s.dtype).min)


def repeated(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def gpt_oss(q, k, v, *, is_causal, scaling, attention_mask=None, s_aux=None):
    """Eager attention as in gpt-oss: sinks are one more column; softmax runs in the input dtype."""
    k, v = repeated(k, q), repeated(v, q)
    s = masked_scores(q, k, scaling, is_causal, attention_mask)
    if s_aux is not None:
        column = s_aux.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        s = torch.cat([s, column], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    p = torch.softmax(s, dim=-1, dtype=s.dtype)[..., : k.shape[2]]
    return torch.matmul(p, v), p


def gemma_2(q, k, v, *, is_causal, scaling, attention_mask=None, softcap=None, sliding_window=None):
    """Eager attention as in Gemma 2, with a soft cap; softmax runs in float32."""
    k, v = repeated(k, q), repeated(v, q)
    s = masked_scores(q, k, scaling, is_causal, attention_mask, sliding_window, softcap)
    p = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(p, v), p


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize(("function", "keywords"), [(gpt_oss, SINKS), (gemma_2, SOFT_CAP)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eager_functions_of_transformers_have_no_bug(function, keywords, dtype):
    options = check.Options(layout="BNTH", keywords=keywords, framework="torch", **SMALL)
    report = check.check(check.of_function(function, options), dtype)
    assert report.bugs == () and report.refused == {}
    assert ("attention sinks" if function is gpt_oss else "soft cap") in report.errors


def detached(q, k, v, *, s_aux=None, **rest):
    return gpt_oss(q, k, v, s_aux=None if s_aux is None else s_aux.detach(), **rest)


def negated(q, k, v, *, s_aux=None, **rest):
    turned = None if s_aux is None else 2 * s_aux.detach() - s_aux
    return gpt_oss(q, k, v, s_aux=turned, **rest)


@pytest.mark.usefixtures("few_candidates")
def test_sinks_without_a_gradient_are_refused_and_with_a_wrong_one_a_bug():
    options = check.Options(layout="BNTH", keywords=SINKS, framework="torch", **SMALL)
    report = check.check(check.of_function(detached, options), "float32")
    assert report.bugs == ()
    assert "no gradient reaches sinks" in report.refused["attention sinks"]
    report = check.check(check.of_function(negated, options), "float32")
    assert [bug.name for bug in report.bugs] == ["dsinks has the wrong sign"]


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
def test_flex_attention_has_no_bug(monkeypatch):
    """Runs the unfused form, whose backward pass only `_validate_device` forbids on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    report = check.check(check.find("torch.flex", check.Options(**SMALL)), "float32")
    assert report.bugs == () and report.refused == {}
    assert set(report.not_tried) == {"attention sinks", "gradient of lse, sinks"}
    assert {"local window", "soft cap", "additive bias", "gradient of lse"} <= set(report.errors)


def test_flex_attention_is_compiled_for_every_problem(monkeypatch):
    """PyTorch warns where it falls back to the unfused form, and a warning is an error here."""
    is_available, found = torch.cuda.is_available, []

    def on_a_gpu():  # true only for calls from the tested function
        found.append(sys._getframe(1).f_code is libraries.flex_attention.__code__)
        return found[-1] or is_available()

    monkeypatch.setattr(torch.cuda, "is_available", on_a_gpu)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for tokens in range(33, 43):  # more lengths than PyTorch compiles for one function
        q = torch.randn(1, 2, tokens, 16)
        o, _ = libraries.flex_attention(q, q, q, is_causal=True, scale=0.25)
        assert o.shape == q.shape
    assert sum(found) == 10


def test_flex_attention_on_a_cpu_says_why_not(capsys):
    if torch.cuda.is_available():
        pytest.skip("only where there is no GPU")
    assert main(["check", "torch.flex", "--tokens=64"]) == 1
    assert "does not support backward on CPU" in capsys.readouterr().err
