"""Kernels against float64 by the size of scores, as far as a CPU has them."""

import json
import lzma
import sys

import ml_dtypes
import numpy as np
import pytest

from benchmarks import fidelity
from lowprec_attn.errors import UserError

FLASH = "flash:saved_output=same"


def records_of(tmp_path, monkeypatch, *arguments):
    out = tmp_path / "fidelity.jsonl"
    small = ("--tokens", "64", "--heads", "2", "--head_size", "32")
    monkeypatch.setattr(sys, "argv", ["fidelity", f"--out={out}", *small, *arguments])
    monkeypatch.setattr(fidelity, "torch_sdpa", list)
    fidelity.main()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return {(r["problem"], r["kernel"], r["numerics"]): r for r in found}


def test_every_kernel_is_recorded_and_errors_are_those_of_its_arithmetic(tmp_path, monkeypatch):
    found = records_of(tmp_path, monkeypatch, "--scores", "10", "1e4", "--numerics", "exact", FLASH)
    assert len(found) == 4 * (5 * 2 + 2)
    for (problem, kernel, numerics), record in found.items():
        assert record["shape"] == [1, 64, 2, 32]
        assert max(record["score_maximum"]) == pytest.approx(float(problem.split()[1]), rel=0.01)
        assert record["environment"]["device"] == "cpu"
        if kernel in ("hopper", "gpu", "tpu"):
            assert "does not support" in record["unsupported"]
        elif kernel == "jax.nn cudnn":
            assert record["unsupported"]
        elif numerics == "exact":  # only results are rounded, by half a unit, 2⁻⁹
            faded = problem == "normal 1e+04"  # whose rows are one key
            assert faded == (max(record["rms"]["dq"]) < 1e-6)
            for name in ("o", "dv") if faded else fidelity.RESULTS:
                assert max(record["errors"][name]) < 2.0**-8, (problem, kernel, name)
    for kernel in ("tiled", "dense"):
        of = "clustered 1e+04", kernel
        flash, exact = (found[*of, n]["errors"] for n in (FLASH, "exact"))
        assert min(flash["dq"]) > 10 * max(exact["dq"])
        assert max(flash["o"]) < 2.0**-7
        # An lse near 1e4 as one float32 number has an error of half a unit, 2⁻¹¹.
        assert max(exact["lse"]) < 0.01
        small = found["clustered 1e+01", kernel, "exact"]["errors"]
        assert max(small["p_row_sum"]) < 1e-5 < max(exact["p_row_sum"])


def test_captured_layers_are_read_with_their_scale(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 48, 2, 16)).astype(np.float32) for n in "qkv"}
    path = tmp_path / "layers.npz"
    np.savez(path, **arrays, do=arrays["q"][::-1], is_causal=True, scale=0.5)
    found = records_of(tmp_path, monkeypatch, f"--arrays={path}", "--numerics", "exact")
    (record,) = [r for r in found.values() if r["kernel"] == "dense"]
    assert max(record["errors"]["dq"]) < 2.0**-8
    q, k = (arrays[n].astype(ml_dtypes.bfloat16).astype(np.float64) for n in "qk")
    scores = np.abs(np.tril(np.einsum("btnh,bsnh->bnts", q, k))) / 2
    np.testing.assert_allclose(record["score_maximum"], scores.max((0, 2, 3)), rtol=1e-12)
    np.savez(path, **arrays, is_causal=True)
    with pytest.raises(UserError, match="must be causal and have dO"):
        [*fidelity.captured(path)]


def test_results_of_rows_that_are_off_by_a_factor_are_told():
    exact = np.ones((1, 4, 2, 3))
    found = exact.copy()
    found[:, :, 1] *= 1.5
    assert fidelity._relative(found, exact) == [0, 0.5]
    found[0, 0, 1, 0] = np.nan
    assert np.isnan(fidelity._relative(found, exact)[1])


@pytest.mark.parametrize("text", ["flahs", "flash:outptu=float32", "flash:ds=float7"])
def test_an_arithmetic_that_is_none_is_told(text):
    with pytest.raises(UserError, match=f"--numerics {text}: "):
        fidelity.own([text])


def test_tables_have_the_worst_head_of_what_served(tmp_path, monkeypatch, capsys):
    found = records_of(tmp_path, monkeypatch, "--scores", "10", "1e4", "--numerics", FLASH)
    capsys.readouterr()
    packed = tmp_path / "fidelity.jsonl.xz"
    packed.write_bytes(lzma.compress((tmp_path / "fidelity.jsonl").read_bytes()))
    monkeypatch.setattr(sys, "argv", ["fidelity", f"--read={packed}", "--result=dk"])
    fidelity.main()
    lines = capsys.readouterr().out.splitlines()
    clustered = lines[: lines.index("")]
    assert [cell.strip() for cell in clustered[0].split("|")[1:5]] == [
        "clustered: dk", "arithmetic", "1e+01", "1e+04",
    ]  # fmt: skip
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in clustered[2:])}
    assert [*rows] == ["tiled", "dense", "jax.nn xla"]  # a refused kernel has no row
    worst = max(found["clustered 1e+04", "tiled", FLASH]["errors"]["dk"])
    assert rows["tiled"][4].strip() == f"{worst:.1e}"


def test_a_file_that_is_none_of_it_is_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "other.jsonl"
    path.write_text("not JSON\n")
    monkeypatch.setattr(sys, "argv", ["fidelity", f"--read={path}"])
    assert fidelity.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "other.jsonl holds no records of this program" in line
