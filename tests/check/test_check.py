"""`check` names planted bugs, recognises planted arithmetics and finds no fault in good libraries.

The kernels come from `benchmarks.planted` and are pure NumPy, without code of the library. The
problems are smaller than a user's, so that a check takes seconds; `benchmarks.check_confusion` runs
the full ones.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import check_confusion
from benchmarks.planted import ARITHMETICS, BUGS, OF_FULL, ONLY_WITH, Planted
from lowprec_attn import check
from lowprec_attn.attention import dot_product_attention
from lowprec_attn.check import bugs, candidates, inputs, limits, measure, problems, shrink, training
from lowprec_attn.check.target import Setting, aligned
from lowprec_attn.commands.main import main
from lowprec_attn.numerics import PRESETS
from lowprec_attn.testing import assert_attention

SMALL = {"tokens": 64, "head_size": 32}


def checked(name="flash", *, tile=48, dtype="bfloat16", seed=3, bug=None, **fields):
    rng = np.random.default_rng(seed)
    kernel = Planted(tile=tile, rng=rng, bug=bug, **ARITHMETICS[name], **fields)
    every = {"window": (12, 3), "soft_cap": 5.0, "sinks": True, "bias": True}
    setting = Setting(**{n: every[n] for n in ONLY_WITH.get(bug, ())})
    target = check_confusion.target(kernel, **SMALL, is_causal=bug not in OF_FULL, setting=setting)
    return check.check(target, dtype, seed=seed)


@pytest.fixture
def few_core_problems(monkeypatch):
    """Leaves out core problems that lie between others, so that all tests here share operations."""
    made = problems.core
    kept = {problems.up_to(score, "normal inputs") for score in (4e0, 1e4)}
    kept |= {problems.up_to(score) for score in (1e1, 1e2)}
    kept |= {"two keys a row", "all scores near +1,000"}
    monkeypatch.setattr(
        problems, "core", lambda *args, **of: [p for p in made(*args, **of) if p.name in kept]
    )


@pytest.fixture
def few_candidates(few_core_problems, monkeypatch):
    """Tries three presets only, and no tile, exponent or change of a preset."""
    presets = candidates.Emulation.presets

    def few(emulation):
        return [c for c in presets(emulation) if c.preset in ("exact", "flash", "jax_nn")]

    monkeypatch.setattr(candidates.Emulation, "presets", few)
    monkeypatch.setattr(candidates, "_changed", lambda *_: iter(()))
    monkeypatch.setattr(candidates, "_tiles_and_exponents", lambda *_: iter(()))


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "hidden scores are −1e4"])
def test_a_planted_bug_is_found_and_one_with_a_name_is_named(bug, request):
    if any(word in bug for word in ("window", "soft cap", "bias", "sink", "lse")):
        request.getfixturevalue("few_features")
    report = checked(bug=bug, backwards=len(bug) % 2 == 0)
    assert report.state == "bug"
    names = [found.name.lower() for found in report.bugs]
    assert any(BUGS[bug] in name for name in names), names


@pytest.mark.usefixtures("few_core_problems")
@pytest.mark.parametrize(
    "name", ["exact", "flash", "normalized_delta", "jax_nn", "flash with dp=bfloat16"]
)
def test_a_planted_arithmetic_is_told(name):
    report = checked(name, tile=32)
    assert report.bugs == ()
    found = report.arithmetic
    assert name in (found.name, *found.alike)
    assert found.explains
    has_risk = name in ("flash", "flash with dp=bfloat16")
    assert (report.state == "risk") == has_risk


def nothing_finite(q, k, v):
    return attention(q, k, v) * jnp.nan


@pytest.mark.usefixtures("few_candidates")
def test_a_kernel_of_nan_alone_is_a_bug_and_has_no_arithmetic():
    options = check.Options(causal=True, framework="jax", **SMALL)
    report = check.check(check.of_function(nothing_finite, options))
    assert report.state == "bug" and report.arithmetic is None
    assert report.bugs[0].name == "NaN or infinity at moderate scores"
    assert "not finite" in "\n".join(check.lines(report))
    # An infinite distance ends the search for a nearer arithmetic.
    assert candidates.Match(None, {}, {}).distance == np.inf


def nothing_written(q, k, v):
    return jnp.zeros_like(q)


@pytest.mark.usefixtures("few_candidates")
def test_a_kernel_of_zeros_alone_is_named_so():
    options = check.Options(causal=True, framework="jax", **SMALL)
    report = check.check(check.of_function(nothing_written, options))
    assert report.bugs[0].name == "every result is zero"


@pytest.fixture
def presets_alone(few_core_problems, monkeypatch):
    """Tries every preset, and no tile, exponent or change of one."""
    monkeypatch.setattr(candidates, "_changed", lambda *_: iter(()))
    monkeypatch.setattr(candidates, "_tiles_and_exponents", lambda *_: iter(()))


@pytest.mark.usefixtures("presets_alone")
def test_float16_is_told_from_its_presets():
    report = checked("delta_dp_p", dtype="float16")
    assert report.bugs == () and report.arithmetic.name == "delta_dp_p"


@pytest.mark.usefixtures("few_candidates")
def test_float32_without_roundings_is_exact():
    report = checked("exact", dtype="float32")
    assert report.state == "right" and report.arithmetic.name == "exact"


@pytest.mark.usefixtures("presets_alone")
def test_jax_nn_has_no_bug_and_its_report_fits_the_terminal(capsys, tmp_path):
    files = [f"--json={tmp_path / 'a.json'}", f"--html={tmp_path / 'a.html'}"]
    code = main(["check", "jax.nn:xla", "--tokens=64", "--head-size=32", *files])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.startswith("jax.nn:xla, bfloat16: right, no bug")
    assert "computes like jax_nn" in printed
    assert max(map(len, printed.splitlines())) <= 100
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["state"] == "right" and found["arithmetic"]["name"] == "jax_nn"
    assert "dP in bfloat16" in found["arithmetic"]["words"]
    assert set(found["errors"]["long"]) == set(measure.RESULTS)
    assert "jax_nn" in (tmp_path / "a.html").read_text()


@pytest.mark.usefixtures("presets_alone", "few_features")
def test_the_default_arithmetic_here_is_a_risk_with_its_cures(capsys):
    options = ["--tokens=64", "--head-size=32", "--numerics=flash"]
    assert main(["check", "lowprec_attn:tiled", *options]) == 3
    printed = capsys.readouterr().out
    assert "rows of dS do not sum to zero" in printed
    assert max(map(len, printed.splitlines())) <= 100
    lines = {line.split()[0]: line for line in printed.splitlines() if line}
    assert "still a risk" not in lines["corrected_after_cast"]
    assert "still a risk" in lines["float32_output"]


def attention(q, k, v, *, is_causal=True):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


@jax.custom_vjp
def without_last_keys(q, k, v):
    """Attention that does not write dV of the keys after the last full tile of 16."""
    return attention(q, k, v)


def _forward(q, k, v):
    o, pullback = jax.vjp(attention, q, k, v)
    return o, pullback


def _backward(pullback, do):
    dq, dk, dv = pullback(do)
    return dq, dk, dv.at[:, dv.shape[1] // 16 * 16 :].set(0)


without_last_keys.defvjp(_forward, _backward)


@jax.custom_vjp
def with_swapped_gradients(q, k, v):
    """Attention whose backward pass returns dV for dK, and dK for dV."""
    return attention(q, k, v)


def _backward_swapped(pullback, do):
    dq, dk, dv = pullback(do)
    return dq, dv, dk


with_swapped_gradients.defvjp(_forward, _backward_swapped)


@pytest.mark.usefixtures("few_candidates")
def test_swapped_gradients_are_named_so():
    options = check.Options(causal=True, framework="jax", **SMALL)
    report = check.check(check.of_function(with_swapped_gradients, options))
    assert [bug.name for bug in report.bugs] == ["dK and dV are swapped"]


def test_a_bug_of_several_results_is_named_in_one_sentence():
    exact = measure.exact(problem := problems.core("float32", causal=True, **SMALL)[0])
    found = {n: x * np.log2(np.e) for n, x in exact.found.items() if n != "lse"}
    for names, words in ((("dv", "o"), "each of O and dV has"), (("dk",), "dK has")):
        named = bugs.name(problem, exact, found, dict.fromkeys(names, 1e-6))
        assert named == (f"{words} a factor log2 e", frozenset(names))


@pytest.mark.usefixtures("few_candidates")
def test_a_bug_leaves_a_small_case_and_a_script_without_this_package(tmp_path, shown):
    options = check.Options(causal=True, framework="jax", **SMALL)
    target = check.of_function(without_last_keys, options)
    report = check.check(target, out=tmp_path)
    (bug,) = report.bugs
    assert bug.results == ("dv",)
    data, script = bug.files
    case = np.load(data)
    assert case["q"].shape[1] < 16 and case["k"].shape[2] == 1
    text = Path(script).read_text()
    assert "lowprec_attn" not in text and len(text.splitlines()) <= 25
    errors = shown(script)
    assert errors["dv"] > 0.1 > 10 * errors["o"]
    assert main(["check", f"{__name__}:without_last_keys", "--causal", "--framework=jax",
                 "--tokens=64", "--head-size=32", f"--out={tmp_path}"]) == 4  # fmt: skip


@jax.custom_vjp
def no_way_back(x):
    return x


def _refuse(x):
    raise NotImplementedError("no backward pass")


no_way_back.defvjp(_refuse, _refuse)


def one_way(q, k, v):
    o, lse = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    return no_way_back(o), lse


def one_way_in_base_2(q, k, v):
    o, lse = one_way(q, k, v)
    return o, lse / jnp.log(2)


FORWARD = {"causal": True, "framework": "jax", "backward": False, **SMALL}


@pytest.mark.usefixtures("few_candidates")
def test_a_kernel_without_a_backward_pass_is_judged_by_o_and_lse():
    report = assert_attention(one_way, arithmetic="flash", allow_risk=False, **FORWARD)
    with pytest.raises(check.TargetError, match=r"no backward pass; try .* or --no-backward"):
        assert_attention(one_way, **FORWARD | {"backward": True})
    assert report.effects == report.cures == {} and not report.backward
    assert {frozenset(errors) for errors in report.errors.values()} == {frozenset(("o", "lse"))}
    assert not any("gradient" in name for name in report.errors)
    words = "\n".join(check.lines(report))
    assert "bfloat16, forward pass alone: right, no bug" in words
    assert "S in float32, P̄ in bfloat16." in words and "dS" not in words


@pytest.mark.usefixtures("few_candidates")
def test_a_bug_of_the_forward_pass_alone_leaves_a_script(tmp_path, shown):
    report = check.check(
        check.of_function(one_way_in_base_2, check.Options(**FORWARD)), out=tmp_path
    )
    (bug,) = report.bugs
    assert (bug.name, bug.results) == ("lse is in base 2", ("lse",))
    data, script = bug.files
    assert not {"dq_float64", "dk_float64", "dv_float64"} & {*np.load(data)}
    errors = shown(script)
    assert {*errors} == {"o", "lse"} and errors["lse"] > 0.1 > 10 * errors["o"]


def test_changes_of_the_backward_pass_explain_no_forward_pass():
    """They would be listed as arithmetics that cannot be told apart."""
    flash = candidates.Candidate("flash", PRESETS["flash"], PRESETS["flash"])
    both, forward = (
        {field for c in candidates._changed(flash, "bfloat16", way) for field in c.changes}
        for way in (True, False)
    )
    assert both - forward == {"probs_bwd", "ds", "dp", "delta", "saved_output"}


@pytest.mark.usefixtures("few_candidates")
def test_a_race_that_spoils_one_call_is_said_to_be_one():
    """The second runs of `Dependences` come too late to see it."""
    kernel = Planted(tile=48, rng=np.random.default_rng(3), **ARITHMETICS["flash"])
    calls = []

    def racing(problem):
        found = kernel(problem)
        calls.append(problem)
        if len(calls) == 5:
            found["dq"][:, 16:32] = 0
        return found

    report = check.check(check_confusion.target(racing, **SMALL), seed=3)
    (bug,) = report.bugs
    assert bug.name == "two runs of the same call differ, by more than rounding"
    assert bug.results == ("dq",) and "to 31" in bug.where


class Kernel:
    """A kernel of a user whose calls are methods."""

    def attend(self, q, k, v):
        return attention(q, k, v)

    __call__ = attend


of_partial = functools.partial(attention, is_causal=True)
of_object = Kernel()


@pytest.mark.parametrize("name", ["of_partial", "of_object", "of_object.attend"])
def test_a_script_imports_what_the_target_names(name):
    options = check.Options(causal=True, framework="jax")
    problem = problems.features("float32", causal=True)[0]
    _, lines = check.find(f"{__name__}:{name}", options).script(problem, "case.npz")
    first, names = name.partition(".")[0], {}
    (imports,) = [line for line in lines if line.startswith("from ")]
    exec(imports, names)
    assert names[first] is globals()[first]
    assert f"    result = {name}(q, k, v)" in lines


def test_a_script_finds_its_case_and_its_function_from_any_folder(tmp_path, monkeypatch, shown):
    """Its function may be in the folder of the command, and the script in that of --out."""
    code = (
        "import jax\n\n\ndef attend(q, k, v):\n    return jax.nn.dot_product_attention(q, k, v)\n"
    )
    (tmp_path / "of_a_user.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    target = check.find("of_a_user:attend", check.Options(causal=True, **SMALL))
    monkeypatch.delitem(sys.modules, "of_a_user")
    problem = problems.features("float32", causal=True)[0]
    _, script = shrink.save(problem, target, Path("found"), "case")
    assert shown(script)["o"] > 0.1, "the function is not causal"


@pytest.mark.parametrize(
    "function",
    [functools.partial(attention, is_causal=True), of_object, of_object.attend, lambda q, k, v: q],
)
def test_a_script_of_a_function_without_a_name_is_refused(function, tmp_path):
    target = check.of_function(function, check.Options(causal=True, framework="jax"))
    with pytest.raises(check.TargetError, match="no script can import the function checked as"):
        check.check(target, out=tmp_path)
    assert check.of_function(attention, check.Options(causal=True, framework="jax")).script


def widened(q, k, v):
    return attention(q, k, v, is_causal=True).astype(jnp.float32)


@pytest.mark.usefixtures("few_candidates")
def test_a_dtype_of_o_that_is_not_the_arrays_is_noted_once():
    report = check.check(
        check.of_function(widened, check.Options(causal=True, framework="jax", **SMALL))
    )
    assert report.bugs == ()
    note = "O is float32, and q, k and v are bfloat16: what follows computes in float32"
    assert report.notes.count(note) == 1


def listed(q, k, v):
    return [attention(q, k, v), jnp.zeros(q.shape[:3])]


def test_results_in_a_list_are_read_as_those_in_a_tuple():
    problem = problems.features("float32", causal=True)[0]
    options = check.Options(causal=True, framework="jax")
    target, alone = (check.of_function(x, options) for x in (listed, attention))
    found, expected = target.call(problem), alone.call(problem)
    assert not found.pop("lse").any()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
    _, lines = target.script(problem, "case.npz")
    assert "    return result[0] if isinstance(result, (tuple, list)) else result" in lines


def test_a_partial_is_called_as_the_function_that_it_holds():
    target = check.of_function(of_partial, check.Options(causal=True))
    assert target.name == f"{__name__}:attention"
    assert target.notes == ("called with jax arrays, since its module imports jax",)


@pytest.mark.usefixtures("few_candidates")
def test_assert_attention_says_what_is_wrong():
    report = assert_attention(
        attention, keywords={"causal": "is_causal"}, arithmetic="jax_nn", **SMALL
    )
    assert report.state == "right"
    assert "another scale" in report.not_tried and "left padding" in report.not_tried
    with pytest.raises(AssertionError, match="expected the arithmetic flash"):
        assert_attention(attention, causal=True, arithmetic="flash", **SMALL)
    with pytest.raises(AssertionError, match="do not fill a tile"):
        assert_attention(without_last_keys, causal=True, framework="jax", **SMALL)


def lower_right(q, k, v):
    seen = np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], dtype=bool)
    o = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen)[None, None])
    return jnp.where(jnp.asarray(seen.any(-1))[None, :, None, None], o, jnp.zeros((), o.dtype))


OURS = """
import jax
def f(q, k, v): return jax.nn.dot_product_attention(q, k, v, is_causal=True)
def leaves(q, k, v): raise SystemExit(7)
def says(q, k, v): raise KeyError("\x1b[31m")
def names(q, k, v): return {"o": f(q, k, v)}
def merges(q, k, v): return f(q, k, v).reshape(*q.shape[:2], -1)
"""


@pytest.mark.usefixtures("few_candidates")
def test_alignment_is_seen_in_o_or_as_asked():
    options = {"causal": True, "framework": "jax", **SMALL}
    report = check.check(check.of_function(lower_right, check.Options(**options)))
    assert report.bugs == ()
    assert sum("aligned with the last row" in note for note in report.notes) == 2
    asked = check.Options(alignment="start", **options)
    report = check.check(check.of_function(lower_right, asked))
    assert [bug.name for bug in report.bugs] == [
        "the causal diagonal is aligned with the last row and key"
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jax.nnn"], "unknown target 'jax.nnn'; targets are jax.nn[:xla|cudnn]"),
        (["jax.nn:tpu"], "say jax.nn:xla or jax.nn:cudnn"),
        (["torch.sdpa:fast"], "torch"),
        (["lowprec_attn:tiled", "--numerics=fast"], "unknown numerics 'fast'"),
        (["no_such_module:f", "--causal"], "no module named no_such_module"),
        ([f"{__name__}:nothing", "--causal"], "has no 'nothing'"),
        ([f"{__name__}:attention"], "is attention causal?"),
        ([f"{__name__}:attention", "--keyword=causal"], "say NAME=KEYWORD"),
        ([f"{__name__}:attention", "--causal", "--keyword=x=y"], "is none of causal, scale, mask"),
        ([f"{__name__}:SMALL", "--causal"], "is no function but dict"),
        (["jax.nn", "--tokens=0"], "--tokens must be from 16 to 4096, got 0"),
        (["jax.nn", "--tokens=99999999999"], "--tokens must be from 16 to 4096, got 99999999999"),
        (["jax.nn", "--head-size=1000000000"], "--head-size must be from 1 to 1024, got"),
        (["jax.nn", "--seed=-1"], "--seed must be 0 or more and below 4294967296, got -1"),
        (["jax.nn", "--scale=0.5"], "--scale goes with MODULE:FUNCTION; leave it out for jax.nn"),
        (["jax.nn", "--layout=BNTH"], "--layout goes with MODULE:FUNCTION"),
        (["jax.nn", "--no-backward"], "--no-backward goes with MODULE:FUNCTION; leave it out for"),
        (["jax.nn", "--numerics=flash"], "--numerics goes with lowprec_attn; leave it out for jax"),
        *(
            ([f"{__name__}:attention", "--causal", f"--scale={scale}"], f"{of} 0, got {scale}")
            for scale, of in (("nan", "other than"), ("0.0", "other than"), ("1e+300", "than"))
        ),
        (
            [f"{__name__}:attention", *["--keyword=causal=a"] * 2],
            "--keyword causal=a: causal is a already",
        ),
        (["exits:f", "--causal"], "cannot import exits: SystemExit: 3"),
        (["ours:f", "--causal", "--json=ours.py"], "cannot write ours.py: it is there already"),
        (["ours:f", "--causal", "--html=./ours.py"], "the same command reads"),
        (["ours:f", "--causal", "--json=no/a.json"], "--json no/a.json: there is no directory no"),
        (["ours:f", "--causal", "--json=a", "--html=a"], "--json and --html both name a"),
        (["ours:f", "--causal", "--out=ours.py"], "cannot write ours.py: File exists"),
        (
            ["ours:leaves", "--causal"],
            "SystemExit: 7; try another --tokens, --dtype or --head-size, ",
        ),
        (["ours:says", "--causal"], "\\x1b[31m"),
        (["ours:names", "--causal"], "names returned dict; it must return O, or a tuple or list"),
        (
            ["ours:merges", "--causal"],
            "O of merges has the shape (1, 160, 128), not (1, 160, 2, 64",
        ),
    ],
)
def test_what_cannot_serve_is_one_clear_line(arguments, says, capsys, tmp_path, monkeypatch):
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "ours.py").write_text(OURS)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and says in line
    assert (tmp_path / "ours.py").read_text() == OURS


@pytest.mark.parametrize("option", ["--dtype=float8", "--window=left", "--layout=BTHN", "--dtyp=a"])
def test_an_option_that_cannot_be_read_ends_with_code_1(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "jax.nn", option])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith("; see lowprec-attn check --help")


def test_a_library_that_is_absent_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    assert main(["check", "tokamax"]) == 1
    assert "tokamax is not installed: pip install tokamax" in capsys.readouterr().err


def test_the_errors_of_a_row_are_in_units_of_what_makes_it():
    (problem, *_) = problems.core("float32", causal=True, **SMALL)
    exact = measure.exact(problem)
    found = {name: np.array(x) for name, x in exact.found.items()}
    assert all(not e.any() for e in measure.row_errors(found, exact).values())
    found["dv"][0, 5, 1] += exact.units["dv"][0, 5, 1] / np.sqrt(32)
    found["dq"][0, 7, 0, 3] = np.nan
    errors = measure.row_errors(found, exact)
    assert errors["dv"][0, 5, 1] == pytest.approx(1) and np.count_nonzero(errors["dv"]) == 1
    assert np.isinf(errors["dq"][0, 7, 0]) and np.isinf(errors["dq"]).sum() == 1


def test_the_row_sum_of_ds_is_inferred_from_dq():
    problem = problems.core("float32", causal=True, **SMALL)[3]
    assert problem.name == "clustered keys, scores up to 10"
    exact = measure.exact(problem)
    k = problem.k.astype(np.float64)
    pk = problem.scale * np.einsum("bnts,bsnh->btnh", exact.p, k)
    sizes = np.abs(exact.p * exact.dp).sum(-1)
    leak = 1e-3 * np.sqrt((sizes**2).mean())  # the same row sum in every row
    effect = training.effect(problem, exact, exact.found["dq"] + leak * pk)
    assert effect.row_sum == pytest.approx(1e-3)


def test_rows_and_keys_that_nothing_sees_change_no_result():
    for problem in problems.features("bfloat16", causal=True, head_size=8):
        problem = aligned(problem, "end")
        padded = problems.padded(problem, 64)
        assert {n % 64 for n in (padded.q.shape[1], padded.k.shape[1])} == {0}
        exact = measure.exact(problem).found
        found = limits.without_padding(measure.exact(padded).found, exact)
        assert found.keys() == exact.keys()
        for name, x in exact.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-12, err_msg=name)


def test_problems_are_what_their_names_say():
    made = {p.name: p for p in problems.core("bfloat16", causal=True)}
    assert not [name for name in made if "e+" in name]
    for name, score in (
        ("normal inputs, scores up to 4", 4),
        ("normal inputs, scores up to 10,000", 1e4),
        ("clustered keys, scores up to 1,000", 1e3),
    ):
        largest = inputs.largest_scores(made[name].q, made[name].k, made[name].scale)
        assert largest.max() == pytest.approx(score, rel=0.01)
    assert (measure.exact(made["one key a row"]).p.max(-1) > 0.999).all()
    p = measure.exact(made["two keys a row"]).p.max(-1)
    assert 0.3 < np.median(p) < 0.999
    p = measure.exact(made["repeated maxima"]).p
    assert (np.sum(p == p.max(-1, keepdims=True), -1) > 1).mean() > 0.8
    assert (measure.exact(made["key 0 leads every row"]).p.argmax(-1) == 0).all()
    end = aligned(next(p for p in problems.features("bfloat16", causal=True)
                       if p.name == "fewer queries"), "end")  # fmt: skip
    assert np.isfinite(measure.exact(end).p).all() and (measure.exact(end).p[0, 0, 0] > 0).sum() > 1
