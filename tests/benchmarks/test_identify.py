"""The preset that is nearest to a kernel's results, for the kernels that a CPU has."""

import itertools
import json
import sys

import numpy as np
import pytest

from benchmarks import fidelity, identify
from lowprec_attn.errors import UserError

ARITHMETICS = ("splash", "flash_attention_3", "torch_flash", "jax_nn")


def records_of(tmp_path, monkeypatch, kernels):
    """The records of these kernels, on clustered keys with scores of 1e4."""
    out = tmp_path / "identified.jsonl"
    small = ("--tokens", "64", "--heads", "2", "--head_size", "32", "--scores", "1e4")
    asked = (f"--out={out}", *small, "--arithmetics", *ARITHMETICS)
    monkeypatch.setattr(sys, "argv", ["identify", *asked])
    monkeypatch.setattr(identify, "foreign", lambda: kernels)
    identify.main()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return out, {r["kernel"]: r for r in found if r["problem"].startswith("clustered")}


def test_a_preset_in_steps_of_its_own_is_recognized(tmp_path, monkeypatch):
    """Steps of 32 keys stand in for a kernel whose steps differ from those of the presets."""
    names = ("flash_attention_3", "torch_flash")
    theirs = [
        identify.preset(f"{name}:kv_block=32")._replace(name=f"their {name}", numerics=None)
        for name in names
    ]
    _, found = records_of(tmp_path, monkeypatch, theirs)
    for name, result in itertools.product(names, ("dq", "dk")):
        of = found[f"their {name}"]["results"][result]
        assert of["hard_rows"] > 10
        label, ratio = identify.nearest(of["distance"])
        assert name in label.split(" = ")
        assert ratio < identify.IDENTIFIED, (result, of["distance"])


def test_jax_nn_by_xla_is_its_preset_and_a_refusal_has_its_reason(tmp_path, monkeypatch, capsys):
    out, found = records_of(tmp_path, monkeypatch, fidelity.jax_nn())
    for result, of in found["jax.nn xla"]["results"].items():
        if result in ("dq", "dk"):  # presets agree in the other results
            label, ratio = identify.nearest(of["distance"])
            assert (label, ratio < identify.IDENTIFIED) == ("jax_nn", True), (result, of)
    assert found["jax.nn cudnn"]["unsupported"]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["identify", f"--read={out}"])
    identify.main()
    text = capsys.readouterr().out
    assert "| **jax_nn** " in text
    assert "cudnn |" not in text  # a refused kernel has no row


def test_rows_are_hard_where_two_results_lie_apart():
    x = np.ones((1, 3, 1, 4))
    near, far = x * (1 + 2.0**-9), x.copy()
    far[0, 2] += 2.0**-5
    assert identify.hard_rows([x, near, far]).tolist() == [[[False], [False], [True]]]


def test_equal_results_are_one_and_the_next_is_another():
    x = np.ones(2)
    assert {*identify.distinct({"a": x, "b": x + 1, "c": x.copy()})} == {"a = c", "b"}
    assert identify.nearest({"a = c": 0.5, "b": 2.0}) == ("a = c", 0.25)
    assert np.isnan(identify.nearest({"a": 0.5})[1])


def test_an_arithmetic_that_is_none_is_told():
    with pytest.raises(UserError, match="flahs"):
        identify.preset("flahs")
