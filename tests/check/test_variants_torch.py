"""`check` of PyTorch's functions, and of eager attention functions as in transformers."""

import functools
import sys
import types
import warnings

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from torch.nn.attention import flex_attention  # noqa: E402

from lowprec_attn import check  # noqa: E402
from lowprec_attn.check import libraries, measure, problems, shrink  # noqa: E402
from lowprec_attn.check.functions import refusal_of  # noqa: E402
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


def one_way(q, k, v):
    """Leaves the last key out, without a backward pass."""
    with torch.no_grad():
        scores = masked_scores(q, k, q.shape[-1] ** -0.5, True, None).float()
        scores[..., -1] = torch.where(scores[..., -1] > -1e30, -1e30, scores[..., -1])
        return torch.matmul(torch.softmax(scores, -1).to(v.dtype), v)


def test_a_kernel_without_a_backward_pass_has_a_bug_and_a_script(few_candidates, tmp_path, shown):
    options = {"causal": True, "framework": "torch", "layout": "BNTH", "groups": False, **SMALL}
    with pytest.raises(check.TargetError, match=r"does not require grad.* or --no-backward"):
        check.check(check.of_function(one_way, check.Options(**options)))
    target = check.of_function(one_way, check.Options(backward=False, **options))
    report = check.check(target, out=tmp_path)
    assert report.state == "bug" and report.bugs[0].results == ("o",)
    errors = shown(report.bugs[0].files[1])
    assert {*errors} == {"o"} and errors["o"] > 0.01


def with_constant_keys(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k.detach(), v, is_causal=True)


def test_a_lacking_gradient_of_k_is_no_refusal_of_the_sizes():
    options = {"causal": True, "framework": "torch", "layout": "BNTH", **SMALL}
    with pytest.raises(check.TargetError, match=r"^no gradient of with_constant_keys reaches k; "):
        check.check(check.of_function(with_constant_keys, check.Options(**options)))


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
    assert "no gradient of detached reaches sinks" in report.refused["attention sinks"]
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


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False,
                    window_size=(-1, -1), softcap=0.0):  # fmt: skip
    """A stand-in for FlashAttention's function: rows first, aligned with the last row and key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("btnh,bsnh->bnts", q.float(), k.float()) * softmax_scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    rows, keys = s.shape[-2:]
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    left, right = (keys if side < 0 else side for side in window_size)
    seen = (distance >= -left) & (distance <= (0 if causal else right))
    p = torch.softmax(s.masked_fill(~seen, -1e30), -1).where(seen, 0)
    return torch.einsum("bnts,bsnh->btnh", p, v.float()).to(q.dtype)


@pytest.fixture(params=["flash_attn", "flash_attn_interface"])
def flash(request, monkeypatch):
    """The name of a module with the stand-in."""
    module = types.ModuleType(request.param)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param


def test_flash_attn_is_called_by_its_own_names(flash, monkeypatch, capsys):
    target = check.find(flash, check.Options(**SMALL))
    script = "\n".join(target.script(problems.features("bfloat16", causal=True)[0], "case.npz")[1])
    assert f"import {flash}\n" in script and f"{flash}.flash_attn_func(q, k, v, causal=" in script
    # Its other functions are checked as anybody's.
    given = check.Options(causal=True, framework="torch")
    assert check.find(f"{flash}:flash_attn_func", given).name == f"{flash}:flash_attn_func"
    monkeypatch.setitem(sys.modules, flash, None)
    assert main(["check", flash]) == 1
    assert f"{flash} is not installed: " in capsys.readouterr().err


def with_lse(q, k, v, is_causal, scaling, attention_mask=None):
    """Returns O and lse in base 2."""
    s = masked_scores(q, repeated(k, q), scaling, is_causal, attention_mask)
    o = torch.softmax(s, -1) @ repeated(v, q)
    return o, torch.logsumexp(s, -1) / np.log(2)


@pytest.mark.parametrize("feature", ["right padding", "gradient of lse", "grouped heads"])
def test_a_script_shows_the_errors_that_check_finds(feature, tmp_path, monkeypatch, capsys):
    keywords = {"causal": "is_causal", "scale": "scaling", "mask": "attention_mask"}
    options = check.Options(layout="BNTH", framework="torch", keywords=keywords, **SMALL)
    target = check.find(f"{__name__}:with_lse", options)
    made = problems.features("float32", causal=True, head_size=16)
    problem = next(p for p in made if feature in p.name)
    _, script = shrink.save(problem, target, tmp_path, "case")
    exec(script.read_text(), {"__file__": str(script)})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    errors = {words[0]: float(words[3]) for words in printed}
    assert max(errors[name] for name in ("o", "dv")) < 1e-4
    if feature == "gradient of lse":
        assert min(errors[name] for name in ("lse", "dq", "dk")) > 0.1
    else:
        assert max(errors.values()) < 1e-4 and "lse" not in errors
    assert len(script.read_text().splitlines()) <= 25


@pytest.mark.parametrize(
    ("given", "absent"), [({"bias": True}, "soft_cap"), ({"soft_cap": 5.0}, "bias"), ({}, None)]
)
def test_tokamax_has_no_problem_with_soft_cap_and_bias(given, absent, monkeypatch):
    """It adds the bias before the soft cap, which is a convention and no bug."""
    module = types.ModuleType("tokamax")
    module.dot_product_attention = with_lse
    monkeypatch.setitem(sys.modules, "tokamax", module)
    target = check.find("tokamax:xla", check.Options(**given))
    assert {"bias", "soft_cap"} - target.can == ({absent} if absent else set())
    assert any("before the soft cap" in note for note in target.notes) == bool(absent)


def test_tokamax_in_chunks_is_called_by_its_own_names():
    pytest.importorskip("tokamax", reason="needs tokamax")
    target = check.find("tokamax:xla_chunked", check.Options())
    for problem in problems.features("bfloat16", causal=True, head_size=16):
        if problem.needs <= target.can:
            of = measure.exact(problem)
            with jax.numpy_rank_promotion("allow"):  # tokamax promotes masks
                found = target.call(problem)
            errors = measure.row_errors(found, of)
            assert max(error.max() for error in errors.values()) < 0.02, problem.name


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("flash", ["flash_attn"], indirect=True)
def test_flash_attn_has_no_bug(flash):
    report = check.check(check.find(flash, check.Options(**SMALL)))
    assert report.bugs == () and report.refused == {}
    assert report.arithmetic.name == "exact"
    assert {"fewer queries", "fewer keys", "local window", "soft cap"} <= set(report.errors)


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


def test_a_refusal_says_what_pytorch_warns_of():
    """A PyTorch for CUDA says in warnings what each kernel lacks; these are its words."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in (
            "Flash attention kernel not used because: (Triggered internally at a.cpp:988.)",
            "Flash Attention does not support non-null attn_mask. (Triggered internally at b.h:2.)",
            "CuDNN attention kernel not used because: (Triggered internally at a.cpp:990.)",
            "cuDNN attention has been runtime disabled. (Triggered internally at a.cpp:558.)",
        ):
            warnings.warn(text, UserWarning, stacklevel=1)
    error = RuntimeError("No available kernel. Aborting execution.")
    assert refusal_of(error, said) == (
        "RuntimeError: No available kernel. Aborting execution. "
        "Flash Attention does not support non-null attn_mask."
    )
    assert refusal_of(RuntimeError("Expected 4 axes"), said) == "RuntimeError: Expected 4 axes"


def test_a_warning_of_a_call_that_succeeds_is_given(few_candidates):
    def attend(q, k, v, *, is_causal):
        warnings.warn("slow", UserWarning, stacklevel=1)
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=is_causal)

    keywords = {"causal": "is_causal"}
    options = check.Options(layout="BNTH", keywords=keywords, framework="torch", **SMALL)
    with pytest.warns(UserWarning, match="slow") as given:
        check.check(check.of_function(attend, options))
    assert len(given) == 1  # of many calls
