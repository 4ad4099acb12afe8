"""`lowprec-attn diagnose`: its verdicts on constructed inputs, what it reads, what it refuses.

These predictions were made before the thresholds were tried. Random arrays give no verdict. Rows
with repeated maxima, and V of one sign per channel, give coherent δ errors under `published` but
not under `flash`. Random signs of the rows of dO remove that verdict. If one failed, the verdict
would be wrong.
"""

import argparse
import errno
import io
import json
import math
import os
import re
import runpy
import struct
import sys
import zipfile
from html import escape
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from terminal import sentences

from lowprec_attn import installation
from lowprec_attn.commands import diagnose
from lowprec_attn.diagnostics import verdict
from lowprec_attn.diagnostics.actions import ACTIONS
from lowprec_attn.diagnostics.examine import array_file, examination
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError
from lowprec_attn.diagnostics.examine.examination import Examination
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.lookalikes import lookalikes
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.diagnostics.trend import QUANTITIES
from lowprec_attn.files import DiskError

BFLOAT16 = ml_dtypes.bfloat16
_example = runpy.run_path(
    str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "paper_like.py")
)
healthy_arrays, paper_like_arrays = _example["healthy_arrays"], _example["paper_like_arrays"]
LENGTH, HEAD_SIZE = _example["LENGTH"], _example["HEAD_SIZE"]


def save(path, arrays, dtype=BFLOAT16):
    np.savez(path, **{name: array.astype(dtype) for name, array in arrays.items()})
    return path


def run(*argv):
    parser = argparse.ArgumentParser()
    diagnose.add_arguments(parser)
    return diagnose.run(parser.parse_args([str(arg) for arg in argv]))


def verdict_in(text):
    (line,) = [line for line in text.splitlines() if line.startswith("Verdict: ")]
    return line


@pytest.mark.parametrize("seed", [0, 1])
def test_random_arrays_look_like_nothing(tmp_path, capsys, seed):
    assert run(save(tmp_path / "a.npz", healthy_arrays(seed))) == 0
    text = sentences(capsys.readouterr().out)
    first, *_ = text.splitlines()
    assert first.startswith("Nothing found in 2 heads: the largest |score| is ")
    assert "Σ_j P is off by 0.002, errors of δ are 0." in first
    assert first.endswith(").")
    assert verdict_in(text) == "Verdict: nothing found."
    assert "What to do" not in text
    assert "q, k, v, do: read as bfloat16; npz files have no name for it" in text


def test_paper_like_arrays_show_the_mechanism_and_what_makes_it_smaller(tmp_path, capsys):
    code = run(save(tmp_path / "a.npz", paper_like_arrays()), "--json", tmp_path / "out.json")
    assert code == 0  # as the sentence says
    text = sentences(capsys.readouterr().out)
    assert text.startswith("No warning in 2 heads. Seen, but no warning by itself: coherence.\n")
    assert "head 1: under published the errors of δ have a persistent sign" in verdict_in(text)
    assert "delta=normalized would leave 0.0% of the mean error" in verdict_in(text)
    assert "(the others: numerics=float32_output 0.0%, numerics=flash 0." in verdict_in(text)
    assert "this alone is no warning" in verdict_in(text)
    assert "In the lab, coherence: no run that exploded under a rounding met it;" in text
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["verdict"]["kind"], report["verdict"]["heads"]) == ("coherence", [1])
    assert report["verdict"]["sentence"] + "." in text
    (layer,) = report["layers"]
    published, flash = layer["signals"]["published"], layer["signals"]["flash"]
    assert published["delta_error_coherence"][1] > verdict.COHERENCE
    assert flash["delta_error_coherence"][1] < verdict.COHERENCE
    assert max(published["delta_error_coherence"][0], flash["delta_error_coherence"][0]) < 4
    assert published["repeated_maxima"][1] == 1.0
    assert published["repeated_maxima"][0] < 0.1

    tables = [line for line in text.splitlines() if " | " in line]
    assert max(map(len, tables)) <= 120
    assert len({line.index("|", 30) for line in tables}) == 1  # columns are aligned
    heading, worst, *others = tables
    assert heading.split()[:3] == ["head", "numerics", "|score|"]
    assert worst.split()[:2] == ["1", "published"]
    assert worst.endswith("| coherence")
    assert f"{published['delta_error_coherence'][1]:.1f}" in worst
    assert [line.split()[-1] for line in others] == ["–"] * 3


def test_random_signs_of_do_take_the_verdict_away(tmp_path, capsys):
    arrays = paper_like_arrays()
    signs = np.random.default_rng(1).choice([-1, 1], LENGTH)
    arrays["do"] *= signs[None, :, None, None]
    run(save(tmp_path / "a.npz", arrays), "--numerics", "published")
    assert "persistent sign (coherence" not in sentences(capsys.readouterr().out)


def test_without_do_nothing_is_said_about_delta(tmp_path, capsys):
    arrays = paper_like_arrays()
    del arrays["do"]
    run(save(tmp_path / "a.npz", arrays), "--numerics", "published", "--kv-block", "64")
    text = sentences(capsys.readouterr().out)
    assert "note: there is no do (the gradient of the loss by O), so δ and Σ_j P are" in text
    assert "δ: mean" not in text
    assert "errors of the output have a persistent sign" in verdict_in(text)
    assert "takes dO to tell" in verdict_in(text)
    assert "steps of 64 keys" in text


def test_a_healthy_file_without_do_says_first_what_it_does_not_judge(tmp_path, capsys):
    arrays = healthy_arrays()
    del arrays["do"]
    assert run(save(tmp_path / "a.npz", arrays)) == 0
    first, *_ = sentences(capsys.readouterr().out).splitlines()
    assert first.startswith("Nothing found in 2 heads: ")
    assert first.endswith("; without dO the backward pass is not judged.")


def test_options_reach_the_arithmetic(tmp_path, capsys):
    arrays = {name: array[0, :48] for name, array in healthy_arrays().items()}
    path = save(tmp_path / "a.npz", arrays, np.float32)
    options = (
        "--full",
        "--scale",
        "50",
        "--row-max",
        "dynamic_max",
        "--numerics",
        "stochastic_output",
    )
    run(path, *options, "--json", tmp_path / "out.json")
    text = sentences(capsys.readouterr().out)
    assert "all keys, scale 50" in text
    assert " stochastic_output with row_max=dynamic_max " in text
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    signals = layer["signals"]["stochastic_output with row_max=dynamic_max"]
    q, k = arrays["q"], arrays["k"]
    expected = np.abs(np.einsum("tnh,snh->nts", q, k)).max(axis=(1, 2)) * 50
    np.testing.assert_allclose(signals["score_maximum"], expected, rtol=1e-5)
    assert "the largest |score| is" in verdict_in(text)
    assert not layer["is_causal"]


def test_safetensors_names_and_layouts_read_the_same(tmp_path):
    arrays = {name: x.astype(BFLOAT16) for name, x in healthy_arrays().items()}
    expected = array_file.load(save(tmp_path / "a.npz", arrays))[0]
    heads_first = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in arrays.items()}
    save_file(dict(zip(("Query", "KEY", "Value", "dOut"), heads_first.values(), strict=True)),
              tmp_path / "a.safetensors")  # fmt: skip
    (read,) = array_file.load(tmp_path / "a.safetensors", "BNTH")
    np.savez(tmp_path / "b.npz", **{name: x[0] for name, x in heads_first.items()}, more=[1])
    (without_batch,) = array_file.load(tmp_path / "b.npz", "BNTH")
    for other in (read, without_batch):
        for name in ("q", "k", "v", "do"):
            array = getattr(other, name)
            assert array.dtype == BFLOAT16
            np.testing.assert_array_equal(array, getattr(expected, name))
    assert read.notes == ()


def test_doubtful_input_is_noted(tmp_path):
    arrays = {name: x.astype(np.float64) for name, x in healthy_arrays().items()}
    arrays = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    np.savez(tmp_path / "a.npz", **arrays)
    (inputs,) = array_file.load(tmp_path / "a.npz")
    assert inputs.q.dtype == np.float32
    assert inputs.notes == (
        "q, k, v, do: float64 converted to float32",
        "read as 2 rows of 256 heads; if the heads come first, as in torch, use --layout BNTH",
    )


def turned(arrays, *names):
    return {n: x.swapaxes(-3, -2) if n in names else x for n, x in arrays.items()}


Q_K_V = ("q", "k", "v")


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        ((), "BTNH"),
        ((*Q_K_V, "do"), "BNTH"),
        (Q_K_V, "BNTH,do=BTNH"),  # the layout of Hugging Face's attention functions
        (Q_K_V, "do=BTNH,BNTH"),
        (Q_K_V, "q=BNTH,k=BNTH,v=BNTH,do=BTNH"),
        (Q_K_V, "q=BNTH,k=BNTH,v=BNTH"),
        (("do",), "do=BNTH"),
    ],
)
def test_each_array_has_its_own_order(tmp_path, names, layout):
    arrays = healthy_arrays()
    path = save(tmp_path / "a.npz", turned(arrays, *names), np.float32)
    (by_option,) = array_file.load(path, layout)
    np.savez(tmp_path / "own.npz", **turned(arrays, *names), layout=np.array(layout))
    (by_file,) = array_file.load(tmp_path / "own.npz")
    for layer in (by_option, by_file):
        for name, array in arrays.items():
            np.testing.assert_array_equal(getattr(layer, name), array)


@pytest.mark.parametrize(
    ("names", "layout", "option"),
    [
        (Q_K_V, None, "--layout BNTH,do=BTNH"),
        (Q_K_V, "BNTH", "--layout BNTH,do=BTNH"),
        (("do",), None, "--layout BTNH,do=BNTH"),
        (("do",), "BNTH", "--layout BTNH,do=BNTH"),
        ((), "do=BNTH", "--layout BTNH"),
    ],
)
def test_a_do_of_another_order_is_named_with_the_option_that_reads_it(
    tmp_path, names, layout, option
):
    path = save(tmp_path / "a.npz", turned(healthy_arrays(), *names))
    given = [] if layout is None else ["--layout", layout]
    expected = f"rows and heads of do are in another .* for 256 rows of 2 heads give {option}$"
    with pytest.raises(DiagnoseError, match=expected) as caught:
        run(path, *given)
    assert "\n" not in str(caught.value)
    array_file.load(path, option.removeprefix("--layout "))


@pytest.mark.parametrize("batched", [True, False])
def test_a_do_with_its_heads_side_by_side_is_taken_apart(tmp_path, batched):
    arrays = {n: x if batched else x[0] for n, x in healthy_arrays().items()}
    flat = {**arrays, "do": arrays["do"].reshape(*arrays["do"].shape[:-2], -1)}
    shape = flat["do"].shape
    plain = save(tmp_path / "plain.npz", flat, np.float32)
    heads_first = save(tmp_path / "torch.npz", turned(flat, *Q_K_V), np.float32)
    for path, layout in ((plain, None), (heads_first, "BNTH")):
        (layer,) = array_file.load(path, layout)
        np.testing.assert_array_equal(layer.do, healthy_arrays()["do"])
        expected = f"do {shape} read as 2 heads side by side in each of 256 rows"
        assert layer.notes == (expected,)
    with pytest.raises(DiagnoseError, match=r"read as 2 rows of 256 heads; give --layout BNTH$"):
        array_file.load(heads_first)


def test_as_many_rows_as_heads_is_noted(tmp_path):
    arrays = {n: np.zeros((1, 8, 8, 4), np.float32) for n in (*Q_K_V, "do")}
    path = save(tmp_path / "a.npz", arrays, np.float32)
    for layout, says in ((None, "BTNH"), ("BNTH,do=BTNH", "BNTH,do=BTNH")):
        (layer,) = array_file.load(path, layout)
        assert layer.notes == (
            "q, k, v, do: as many rows as heads, so that another order of these axes would not "
            f"show; read as --layout {says} says",
        )
    np.savez(path, **arrays, layout=np.array("BTNH"))  # as a capture records it
    assert array_file.load(path)[0].notes == ()


def changed(**changes):
    arrays = {**healthy_arrays(), **changes}
    return {name: x for name, x in arrays.items() if x is not None}


ONES = np.ones((1, LENGTH, 2, HEAD_SIZE), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(k=None), "no array named k or key; it holds do, q, v"),
        (changed(Query=ONES), "Query and q both mean q; keep one"),
        (
            changed(q=ONES.astype(np.int32)),
            "q must be one of float32, bfloat16, float16, got int32",
        ),
        (changed(q=ONES.astype(bool)), "q must be one of .* got bool"),
        (changed(q=ONES.astype(np.float16)), "q, k, v must share a dtype"),
        (changed(v=ONES[:, 1:]), "k and v must have the same batch, length and heads"),
        (changed(q=ONES[..., :8], do=None), "q and k differ in batch or head size"),
        (changed(k=ONES[0]), r"without the batch axis, got shapes q \(1, 256, 2, 32\)"),
        (changed(q=ONES[0, 0], k=ONES[0, 0], v=ONES[0, 0], do=ONES[0, 0]), "the batch axis, got"),
        (changed(do=ONES[:, 1:]), r"do must have the shape of q, got \(1, 255, 2, 32\) .* 32\)$"),
        (changed(do=ONES[0].reshape(1, 1, LENGTH, -1)), r"do must have the shape of q, .* 32\)$"),
        (changed(do=ONES.reshape(LENGTH, -1)), "without the batch axis, got shapes"),
        (
            changed(layout=np.array("TNH")),
            "layout must be BTNH or BNTH, or one order for each .* got 'TNH'",
        ),
        (changed(layout=np.array(1)), r"layout must be one text such as BNTH, got shape \(\) of "),
        (changed(window=np.array(3)), "window must be two integers, 0 or more: .* got 3$"),
        (changed(window=np.array([-1, 0])), r"window must be two integers, .* got \[-1, 0\]"),
        (
            changed(k=ONES[:, :9], v=ONES[:, :9], window=np.array([2, 0])),
            r"window \[2, 0\] leaves the rows from 11 on without a key: .* 256 rows and 9 keys",
        ),
        (changed(scale=np.ones(2)), r"scale must be one number .* got shape \(2,\) of float64"),
        (changed(is_causal=np.array("yes")), "is_causal must be one number or truth value"),
        (changed(x=ONES[0]), "x, the input of W_Q, must be \\[B, T, D\\]"),
        (changed(q=ONES[:, :0], do=None), "q has an empty axis"),
        ({}, "no array named q or query; it holds nothing"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DiagnoseError, match=message) as caught:
        run(tmp_path / "a.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", None, "no such file"),
        ("a.pt", b"", "only .npz and .safetensors files are read; from torch: safe"),
        ("a", b"", "only .npz and .safetensors files are read"),
        ("a.npz", b"", "not a readable npz file"),
        ("a.npz", b"PK\x03\x04 cut off", "not a readable npz file"),
        ("a.safetensors", b"cut", "not a readable safetensors file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DiagnoseError, match=message) as caught:
        run(path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="takes away permission by mode bits")
@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_file_of_another_user_is_to_be_made_readable(tmp_path, name, monkeypatch):
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04")  # so begins an npz file
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read it

        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(np, "load", refuse)
        monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(DiagnoseError) as caught:
        run(path)
    assert str(caught.value) == f"{path}: Permission denied; make it readable"


def npy(shape="(1, 8, 1, 8)", descr="'<f4'", data=bytes(256)):
    """A member of an archive, with any header."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def archive(member, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", member)
    return bytearray(file.getvalue())


def with_field(offset, value):
    """An archive with bits set in a field of all headers, local ones and the directory's."""
    data = archive(npy())
    for signature, at in ((b"PK\x03\x04", offset), (b"PK\x01\x02", offset + 2)):
        place = data.find(signature)
        while place >= 0:
            data[place + at] |= value
            place = data.find(signature, place + 1)
    return data


def damaged(method):
    data = archive(npy(data=np.random.default_rng(0).bytes(256)), method)
    data[60:90] = b"\xff" * 30
    return data


ARCHIVES = {
    "deflated": (damaged(zipfile.ZIP_DEFLATED), "not a readable npz file"),
    "bzip2": (damaged(zipfile.ZIP_BZIP2), "not a readable npz file"),
    "lzma": (damaged(zipfile.ZIP_LZMA), "not a readable npz file"),
    "encrypted": (with_field(6, 1), "is encrypted"),
    "unknown compression": (with_field(8, 99), "compression method is not supported"),
    "too large": (
        archive(npy(shape="(100000, 100000, 10, 8)")),
        r"q does not fit into memory \(Unable to allocate 2.91 TiB .*; if its shape is right, save",
    ),
    "no numbers": (archive(npy(shape="(True, 8, 1, 8)")), "not a readable npz file"),
    "brackets": (archive(npy(shape="(" * 500)), "not a readable npz file"),
    "no array": (archive(b"text"), "q is no array; save with numpy.savez"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_damaged_and_absurd_archives_are_one_line(tmp_path, case):
    data, message = ARCHIVES[case]
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    with pytest.raises(DiagnoseError, match=message) as error:
        array_file.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_arrays_of_another_byte_order_read_the_same(tmp_path, dtype):
    arrays = {name: np.arange(64.0).reshape(1, 8, 1, 8) for name in "qkv"}
    np.savez(tmp_path / "a.npz", **{name: x.astype(dtype) for name, x in arrays.items()})
    q = array_file.load(tmp_path / "a.npz")[0].q
    assert q.dtype.isnative
    np.testing.assert_array_equal(q, arrays["q"])


def test_a_directory_and_a_single_array_are_refused(tmp_path):
    with pytest.raises(DiagnoseError, match=r"run directory: it has no config.json and no checkp"):
        run(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DiagnoseError, match="weights hold no q, k and v; add --text"):
        run(tmp_path)
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(DiagnoseError, match="holds a single array"):
        run(tmp_path / "a.npz")


def several(path):
    """A file of three layers, two of them quiet, one with `<b>` in its name, a tag in HTML."""
    layers = [{n: x[:, :32] for n, x in healthy_arrays(seed).items()} for seed in range(3)]
    layers[1]["q"] = layers[1]["q"] * 200
    names = ("a/layer_00", "a/layer_<b>", "a/layer_02")
    save(path, {f"{name}/{n}": x for name, of in zip(names, layers, strict=True)
                for n, x in of.items()})  # fmt: skip
    return path


def test_many_layers_are_one_table_with_a_verdict_each(tmp_path, capsys):
    page, record = tmp_path / "out.html", tmp_path / "out.json"
    options = ("--numerics", "exact", "--rows", "3", "--html", page, "--json", record)
    assert run(several(tmp_path / "a.npz"), *options) == diagnose.EXIT_FOUND
    text = sentences(capsys.readouterr().out)
    assert "3 layers, each q [1, 32, 2, 32]" in text
    heading, *rows = [line for line in text.splitlines() if " | " in line]
    assert heading.split()[:2] == ["layer", "head"]
    assert [row.split()[0] for row in rows[:2]] == ["a/layer_<b>"] * 2
    assert all(row.endswith("scores") for row in rows[:2])
    assert "(3 rows more, none worse; --rows 0 shows all)" in text
    verdicts = [line for line in text.splitlines() if line.startswith("Verdict")]
    assert text.startswith("Warning in 1 of 3 layers: rate in a/layer_<b>.\n")
    assert verdicts[0].startswith("Verdict for a/layer_<b>: head ")
    assert "rounding is not the cause found here" in verdicts[0]
    assert verdicts[1:] == ["Verdict for the 2 other layers: nothing found."]
    assert "\nWhat to do about rate:\n  JAX      a lower peak of the Optax schedule" in text
    assert "In the lab, rate: " in text

    layers = json.loads(record.read_text())["layers"]
    assert [layer["findings"][0]["kind"] for layer in layers] == ["rate", "none", "none"]
    assert {layer["layer"] for layer in layers} == {"a/layer_00", "a/layer_<b>", "a/layer_02"}
    assert all(np.shape(layer["signals"]["exact"]["delta_error_rms"]) == (2,) for layer in layers)

    html = page.read_text()
    assert "<b>" not in html
    assert html.count("<tr>") == (1 + 6) + (1 + 4)  # heads, and the actions about the rate
    assert html.count("a/layer_&lt;b&gt;") >= 3
    for sentence in (line.partition(": ")[2] for line in verdicts):
        assert escape(sentence) in html
    assert not re.search("src=|href=|url\\(|@import", html)
    assert '<th class="right">|score|</th>' in html
    assert "prefers-color-scheme: dark" in html


def of_size(arrays, layers):
    """Layers of 12 heads each, whose q is multiplied by the sizes `layers`."""
    return {
        f"layer_{number:02d}/{name}": np.repeat(x[:, :32], 6, 2) * (size if name == "q" else 1)
        for number, size in enumerate(layers)
        for name, x in arrays.items()
    }


def test_a_healthy_file_is_answered_by_its_first_line_alone(tmp_path, capsys):
    path = tmp_path / "a.npz"
    np.savez(path, **of_size(healthy_arrays(), [1, 1, 1, 5, 1, 1]))
    assert run(path) == 0
    text = sentences(capsys.readouterr().out)
    scores = re.findall(r"^layer_03 +\d+ \S+ +([\d.]+)", text, re.MULTILINE)
    first = f"Nothing found in 72 heads of 6 layers: the largest |score| is {scores[0]}, Σ_j P"
    assert text.startswith(first)
    assert text.count("Verdict") == 1


def test_what_is_printed_fits_a_terminal(tmp_path, capsys, monkeypatch):
    """Except for tables, which have a width of their own."""
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", **of_size(healthy_arrays(), [1, 1, 1, 200, 1, 1]))
    np.savez("b.npz", **of_size(healthy_arrays(), [1, 2]))
    assert run("a.npz", "b.npz") == diagnose.EXIT_FOUND
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if " | " not in line) <= 100
    assert any(line.startswith("Verdict for a.npz:layer_03") for line in lines)


def test_the_heads_nearest_to_trouble_stand_first(tmp_path, capsys):
    """Ranked by scores, because errors may be a large share of a gradient that is almost zero."""
    arrays = of_size(healthy_arrays(), [1, 6, 2])
    rng = np.random.default_rng(0)
    v = 1 + 1e-3 * rng.normal(size=arrays["layer_02/v"].shape)
    arrays["layer_02/v"] = v.astype(BFLOAT16).astype(np.float32)
    np.savez(tmp_path / "a.npz", **arrays)
    assert run(tmp_path / "a.npz", "--rows", "0", "--numerics", "flash") == 0
    text = sentences(capsys.readouterr().out)
    rows = [line.split() for line in text.splitlines() if line.startswith("layer_0")]
    scores, shares = ([float(row[n].rstrip("%")) for row in rows] for n in (3, 5))
    assert scores == sorted(scores, reverse=True)
    assert {row[0] for row in rows[:12]} == {"layer_01"}
    assert min(x for x, row in zip(shares, rows, strict=True) if row[0] == "layer_02") > 10
    assert max(shares[:12]) < 5


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ({"score_maximum": 28.0}, 28 / 512),
        ({"score_maximum": 9.0, "query_gradient_error_relative": 0.25}, 9 / 512),
        ({"score_maximum": 256.0, "query_gradient_error_relative": 3.0}, 0.5),
        ({"score_maximum": 1024.0, "query_gradient_error_relative": 0.45}, 2.0),
        ({"score_maximum": 1.0, "p_row_sum_error_rms": 0.009}, 1 / 512),
        ({"score_maximum": 1.0, "p_row_sum_error_rms": 0.015}, 0.5),
        ({"score_maximum": 1.0, "p_row_sum_error_rms": math.nan}, math.inf),
    ],
)
def test_how_near_a_head_is_to_a_warning(signals, expected):
    of_one = {name: np.array([value]) for name, value in signals.items()}
    np.testing.assert_allclose(verdict.nearness(of_one), [expected], rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(ACTIONS))
def test_every_warning_ends_in_an_action_for_both(kind):
    layer = Layer("a.npz", "layer_00", *[healthy_arrays()["q"]] * 3)
    # Row sums or δ may make scores grow. Otherwise scores are a cause of their own.
    findings = (verdict.Finding(kind, "found"), verdict.Finding("scores", "found"))
    found = Examination(layer, {}, findings)
    assert ({*ACTIONS} | {"coherence", "none"}) == {*get_args(verdict.Kind)}
    told = "\n".join(diagnose._verdicts([found]))
    kinds = re.findall("^What to do about (.*):$", told, re.MULTILINE)
    assert kinds == ([kind] if kind in ("row_sums", "delta", "scores") else [kind, "scores"])
    lines = told.split("\n\n")[1].splitlines()[1:]
    shown = " ".join(" ".join(lines).split())
    assert shown == " ".join(f"{label} {words}" for label, words in ACTIONS[kind].lines())
    assert shown.startswith("JAX ")
    assert " PyTorch " in shown
    assert " cost " in shown
    assert max(map(len, lines)) <= 100


def test_files_may_be_several_and_hold_their_own_facts(tmp_path, capsys):
    arrays = {n: x[:, :32] for n, x in healthy_arrays().items()}
    own = arrays | {"scale": np.array(2.0), "is_causal": np.array(False)}
    np.savez(tmp_path / "own.npz", **own)
    np.savez(tmp_path / "plain.npz", **arrays)
    both = (tmp_path / "plain.npz", tmp_path / "own.npz", "--numerics", "flash")
    run(*both, "--json", tmp_path / "out.json")
    found = {Path(layer["source"]).name: layer
             for layer in json.loads((tmp_path / "out.json").read_text())["layers"]}  # fmt: skip
    assert (found["own.npz"]["is_causal"], found["own.npz"]["scale"]) == (False, 2.0)
    assert (found["plain.npz"]["is_causal"], found["plain.npz"]["scale"]) == (True, 32**-0.5)
    assert "own.npz: q [1, 32, 2, 32]" in sentences(capsys.readouterr().out)
    run(*both, "--causal", "--scale", "2")
    assert sentences(capsys.readouterr().out).count("causal, scale 2\n") == 2


def test_windows_masks_and_other_head_sizes_of_v(tmp_path, capsys):
    arrays = {n: x[:, :40].astype(np.float32) for n, x in healthy_arrays().items()}
    short = {n: x[..., :8] for n, x in arrays.items() if n in ("v", "do")}
    np.savez(tmp_path / "a.npz", **arrays | short, window=np.array([4, 0]))
    run(tmp_path / "a.npz", "--numerics", "exact", "--json", tmp_path / "out.json")
    text = sentences(capsys.readouterr().out)
    assert "k [1, 40, 2, 32], v [1, 40, 2, 8] [B,T,N,H], float32, causal, window 4 left" in text
    assert "0 right, scale 0.176777\n" in text
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    assert layer["window"] == [4, 0]
    q, k, v, do = (array[0].astype(np.float64) for array in (arrays | short).values())
    s = np.einsum("tnh,snh->nts", q, k) / np.sqrt(32)
    near = np.subtract.outer(np.arange(40), np.arange(40))
    s = np.where((near >= 0) & (near <= 4), s, -np.inf)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    delta = np.einsum("nts,snh,tnh->nt", p, v, do)
    expected = np.sqrt(np.mean(delta**2, axis=-1))
    np.testing.assert_allclose(layer["signals"]["exact"]["delta_rms"], expected, rtol=1e-5)
    seen = np.where(np.isfinite(s), np.abs(s), 0).max(axis=(1, 2))
    np.testing.assert_allclose(layer["signals"]["exact"]["score_maximum"], seen, rtol=1e-5)


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_are_refused_and_not_run(tmp_path):
    payload = np.array([Payload(tmp_path / "ran")], object)
    np.savez(tmp_path / "a.npz", q=payload, k=ONES, v=ONES)
    with pytest.raises(DiagnoseError, match="pickled Python objects, which are never loaded"):
        run(tmp_path / "a.npz")
    assert not (tmp_path / "ran").exists()


def test_a_text_is_not_called_a_pickle(tmp_path):
    (tmp_path / "a.npz").write_text("hello")
    with pytest.raises(DiagnoseError, match=r"not a readable npz file \(it is no zip archive\)"):
        run(tmp_path / "a.npz")


def test_a_missing_safetensors_package_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(DiagnoseError, match=re.escape(installation.command("diagnose"))):
        run(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--numerics", "none"), "unknown numerics 'none'; presets are exact"),
        (("--row-max", "fast"), "unknown row-max rule 'fast'"),
        (("--layout", "TNH"), "layout must be BTNH or BNTH, .* got 'TNH'"),
        (
            ("--layout", "x=BNTH"),
            "layout must be BTNH or BNTH, or one order for each .* got 'x=BNTH'",
        ),
        (("--kv-block", "0"), "kv_block must be a positive number"),
        (("--scale", "nan"), "--scale must be a finite number, got nan"),
        (("--rows", "-1"), "--rows must be 0 \\(all\\) or more, got -1"),
        (("--numerics", "standard", "--kv-block", "8"), "standard takes one step over all keys"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    path = save(tmp_path / "a.npz", {n: x[:, :16] for n, x in healthy_arrays().items()})
    with pytest.raises(DiagnoseError, match=message):
        run(path, *options)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_an_output_without_a_directory_is_refused_before_anything_is_read(tmp_path, option):
    with pytest.raises(DiskError, match=f"{option} no/such/out: there is no directory no/such"):
        run(tmp_path / "a.npz", option, "no/such/out")


def signals(heads=2, **changes):
    """Quiet signals of 1024 rows; `changes` replace some, with a value for each head."""
    result = {"score_maximum": 40.0, "query_gradient_error_relative": 0.01}
    result["p_row_sum_error_rms"] = 1e-6
    for name in ("unnormalized", "output", "delta"):
        result |= {f"{name}_rms": 1.0, f"{name}_error_rms": 1e-3, f"{name}_error_coherence": 1.0}
    return {name: np.full(heads, value) for name, value in result.items()} | {
        name: np.array(value, float) for name, value in changes.items()
    }


SHARE, SUMS = "query_gradient_error_relative", "p_row_sum_error_rms"


@pytest.mark.parametrize(
    ("changes", "rows", "kinds", "heads"),
    [
        ({}, 1024, ["none"], ()),
        ({SUMS: (0.02, 0.03)}, 1024, ["row_sums"], (1,)),
        ({SHARE: (0.5, 0.3)}, 1024, ["delta"], (0, 1)),
        ({SHARE: (0.29, 0.1)}, 1024, ["none"], ()),
        # If the gradient of W_Q is known, its share counts instead of dQ's.
        ({SHARE: (0.5, 0.3), "query_weight_gradient_error_relative": (0, 0.2)}, 1024, ["none"], ()),
        # Scores of 128 occur in healthy runs.
        ({"score_maximum": (128, 511)}, 1024, ["none"], ()),
        ({"score_maximum": (1, 512)}, 1024, ["rate"], (1,)),
        ({"score_maximum": (1, 512), SHARE: (0.01, 0.2)}, 1024, ["scores"], (1,)),
        ({"score_maximum": (40, 512), SHARE: (0.4, 0)}, 1024, ["delta", "scores"], (0,)),
        # A head that hardly tells its keys apart has almost no gradient.
        ({"score_maximum": (31, 40), SHARE: (0.9, 0)}, 1024, ["none"], ()),
        ({"score_maximum": (600, 512), SUMS: (0, 2)}, 1024, ["row_sums", "scores"], (1,)),
        # A rounded l makes O and δ wrong as well.
        ({"score_maximum": (40, 512), SUMS: (0.05, 0), SHARE: (0.4, 0)}, 1024,
         ["row_sums", "delta", "scores"], (0,)),
        ({"score_maximum": (40, 512), SUMS: (0, 0.009)}, 1024, ["rate"], (1,)),
        ({"score_maximum": (40, 512), SUMS: (0, 0.02)}, 1024, ["scores"], (1,)),
        ({"score_maximum": (1, 600), SUMS: (0, 0.05), "output_error_rms": (1, np.nan)}, 1024,
         ["non_finite", "row_sums", "scores"], (1,)),
        ({"delta_error_coherence": (4.9, 1)}, 1024, ["none"], ()),
        ({"delta_error_coherence": (5, 9)}, 1024, ["coherence"], (1, 0)),
        ({"delta_error_coherence": (5, 9), SHARE: (0.3, 0)}, 1024, ["delta", "coherence"], (0,)),
        # The rule also needs √n / 20: a coherence of 5.0 is enough for 10,000 rows, not for a
        # million.
        ({"delta_error_coherence": (49, 1)}, 10**6, ["none"], ()),
        ({"delta_error_coherence": (50, 1)}, 10**6, ["coherence"], (0,)),
        # As small as rounding errors of float32.
        ({"delta_error_coherence": (9, 1), "delta_error_rms": (9e-6, 1)}, 1024, ["none"], ()),
        # If δ is judged, a coherent Ō alone is no finding.
        ({"unnormalized_error_coherence": (9, 1)}, 1024, ["none"], ()),
        ({"output_error_rms": (1, np.nan)}, 1024, ["non_finite"], (1,)),
        ({"delta_error_coherence": (np.nan, 1)}, 1024, ["non_finite"], (0,)),
        # The squares of Ō overflow before Ō does.
        ({"unnormalized_rms": (1, np.inf)}, 1024, ["none"], ()),
        ({"unnormalized_error_rms": (1, np.nan)}, 1024, ["none"], ()),
        ({"output_error_rms": (1, np.nan), "score_maximum": (600, 1)}, 1024,
         ["non_finite", "scores"], (1,)),
        # NaN counts as a finding even where scores are small.
        ({SHARE: (0, np.nan)}, 1024, ["delta"], (1,)),
        ({SHARE: (0, np.nan), "score_maximum": (600, 1)}, 1024, ["delta", "scores"], (1,)),
    ],
)  # fmt: skip
def test_the_rules_of_the_verdict(changes, rows, kinds, heads):
    findings = verdict.judge({"flash": signals(), "published": signals(**changes)}, rows)
    first = findings[0]
    assert ([finding.kind for finding in findings], first.heads) == (kinds, heads)
    assert first.arithmetic == (None if kinds == ["none"] else "published")
    assert bool(first.worth) == (
        first.kind in {rule.name for rule in RULES} | {"coherence", "rate"}
    )
    assert not any(finding.warns for finding in findings if finding.kind in ("none", "coherence"))
    if heads:
        others = f" and {len(heads) - 1} other: " if len(heads) > 1 else ": "
        assert first.sentence.startswith(f"head {heads[0]}{others}")


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({SHARE: (0.5, 0.3)}, False),
        ({SHARE: (0.5, 0.3), "score_maximum": (40, 512)}, True),
        ({SHARE: (0.5, np.nan)}, True),
        ({SHARE: (0.5, 0.3), SUMS: (0.1, 0)}, False),
    ],
)
def test_errors_of_delta_alone_are_no_warning(changes, warns):
    findings = verdict.judge({"flash": signals(), "published": signals(**changes)}, 1024)
    (delta,) = (finding for finding in findings if finding.kind == "delta")
    assert delta.warns == warns
    assert ("without a head that meets scores this is no warning" in delta.sentence) == (not warns)
    others = [finding for finding in findings if finding is not delta]
    assert all(finding.warns for finding in others)
    layer = Layer("a.npz", "", *[np.zeros((1, 2, 2, 4))] * 3)
    assert Examination(layer, {}, findings).found == (warns or bool(others))


@pytest.mark.parametrize("order", [("flash", "published"), ("published", "flash")])
def test_a_nan_of_one_arithmetic_is_not_passed_over(order):
    broken = signals(**{SHARE: (0, np.nan), "score_maximum": (np.nan, 1)})
    measured = {label: broken if label == "flash" else signals() for label in order}
    assert np.isnan(verdict._largest("delta", measured))
    layer = Layer("a.npz", "", *[np.zeros((1, 2, 2, 4))] * 3)
    assert examination._largest_product(layer, measured.values()) == np.inf
    assert {f.kind for f in verdict.judge(measured, 1024)} == {"non_finite", "delta", "scores"}


def test_without_do_large_scores_stay_undecided():
    quiet = signals(score_maximum=(1, 600))
    without = {n: x for n, x in quiet.items() if "delta" not in n and n not in (SHARE, SUMS)}
    (finding,) = verdict.judge({"flash": without}, 1024)
    assert finding.kind == "scores"


def captures(tmp_path, sizes):
    """Files of three layers; in each file q of the second layer is multiplied by another size."""
    paths = []
    for i, size in enumerate(sizes):
        arrays = {}
        for layer in range(3):
            of = {n: x[:, :32].astype(np.float32) for n, x in healthy_arrays(layer).items()}
            of["q"] = of["q"] * (size if layer == 1 else 1)
            arrays |= {f"layer_{layer}/{name}": array for name, array in of.items()}
        paths.append(tmp_path / f"step{i}.npz")
        np.savez(paths[-1], **arrays)
    return paths


def test_a_series_of_captures_names_the_layer_that_leaves(tmp_path, capsys):
    paths = captures(tmp_path, [1, 1, 1, 1, 60])
    out, html = tmp_path / "out.json", tmp_path / "page.html"
    code = run("--series", *paths, "--numerics", "exact", "--json", out, "--html", html)
    text = sentences(capsys.readouterr().out)
    _, _, told = text.partition("Trend over 5 measurements, ")
    assert told.startswith(f"{paths[0]} to {paths[4]}; this is no warning")
    assert f"largest |score|: layer_1 outgrew the other layers at {paths[4]} (" in told
    assert "times their median) and its past at" in told
    assert "W_Q" not in told  # these captures lack it
    assert f"In the lab, largest |score|: {QUANTITIES[0].worth}" in told
    report = json.loads(out.read_text())
    ((trend,), worst) = report["trend"], report["verdict"]
    scores = trend["quantities"]["score_maximum"]
    assert trend["layers"] == ["layer_0", "layer_1", "layer_2"]
    assert scores["left"] == [{"layer": "layer_1", "own": str(paths[4]), "others": str(paths[4])}]
    assert scores["own"][2] == [None] * 3
    assert scores["own"][4] == pytest.approx([1, 60, 1], rel=1e-3)
    values = np.array(scores["values"])
    assert scores["others"][4][1] == pytest.approx(values[4, 1] / values[4, [0, 2]].mean())
    assert escape("layer_1 outgrew the other layers") in html.read_text()
    # Without the trend: the same verdict and exit code from the same files.
    assert run(*paths, "--numerics", "exact", "--json", out) == code
    assert "Trend" not in sentences(capsys.readouterr().out)
    assert json.loads(out.read_text()) | {"trend": [trend]} == report
    assert worst["layer"] == "layer_1"


@pytest.mark.parametrize("axes", [2, 3])
def test_a_series_of_captures_knows_the_norm_of_a_weight_that_is_in_them(axes, tmp_path, capsys):
    paths = captures(tmp_path, [1, 1, 1, 1])
    rng = np.random.default_rng(0)
    for i, path in enumerate(paths):
        with np.load(path) as file:
            arrays = dict(file)
        *_, heads, size = arrays["layer_0/q"].shape
        for layer in range(3):
            w_q = rng.normal(size=(24, heads, size)).astype(np.float32)
            w_q /= np.linalg.norm(w_q[:, 0], 2)
            w_q[:, 0] *= 50 if (layer, i) == (2, 3) else 10
            arrays[f"layer_{layer}/w_q"] = w_q.reshape(24, -1) if axes == 2 else w_q
        np.savez(path, **arrays)
    out = tmp_path / "out.json"
    run("--series", *paths, "--numerics", "exact", "--json", out)
    told = sentences(capsys.readouterr().out)
    assert (
        f"W_Q: layer_2 outgrew the other layers at {paths[3]} (50, 5.0 times their median)" in told
    )
    norms = json.loads(out.read_text())["trend"][0]["quantities"]["query_weight_norm"]
    np.testing.assert_allclose(norms["values"], [[10] * 3] * 3 + [[10, 10, 50]], rtol=1e-5)


def test_a_weight_that_does_not_fit_is_one_line(tmp_path):
    (path,) = captures(tmp_path, [1])
    with np.load(path) as file:
        arrays = dict(file)
    *_, heads, size = arrays["layer_1/q"].shape
    np.savez(path, **arrays, **{"layer_1/w_q": np.ones((heads * size, 24), np.float32)})
    with pytest.raises(DiagnoseError, match=r"layer_1: w_q must be .* is the transpose"):
        run(path)


def test_a_short_series_says_what_it_lacks(tmp_path, capsys):
    arrays = {n: x[:, :32].astype(np.float32) for n, x in healthy_arrays().items()}
    paths = []
    for i in range(2):
        paths.append(tmp_path / f"{i}.npz")
        np.savez(paths[-1], **arrays)
    assert run("--series", *paths) == 0
    text = sentences(capsys.readouterr().out)
    assert "no layer outgrew its past or the other layers" in text
    assert "To compare a layer with its past takes 3 measurements and one more" in text
    assert "There are no other layers to compare with" in text
    assert "In the lab" not in text


def test_what_is_no_series_is_one_line(tmp_path):
    (path,) = captures(tmp_path, [1])
    for sources in ([path], [path, tmp_path]):
        with pytest.raises(DiagnoseError, match="--series takes two files or more"):
            run("--series", *sources)
    other = tmp_path / "other.npz"
    with np.load(path) as arrays:
        np.savez(other, **{f"deep_{name}": array for name, array in arrays.items()})
    with pytest.raises(DiagnoseError, match="no name is in two of these files"):
        run("--series", path, other)


def test_what_a_rule_was_worth_stands_in_the_table():
    root = Path(__file__).resolve().parents[2]
    table = (root / "results" / "failure" / "README.md").read_text()
    numbers = {
        "row_sums": (
            "| 30 of 30 | 225 (",
            "| 0 of 10 |",
            "| 0 of 124 |",
            "| 14 of 14 |",
            "15 of 15",
        ),
        "delta": (
            *("| 164 of 164 | from 220 on | **85 of 209** |", "| **5 of 9** |"),
            "| 164 of 164 | from 79 on | 8 of 209 |",
        ),
        "scores": ("| 164 of 164 | from 79 on | 8 of 209 |", "| 3 of 3, all of `exact` |"),
    }
    for rule in RULES:
        for cell in numbers[rule.name]:
            assert cell in table
            for number in re.findall(r"\d+", cell):
                assert number in rule.worth


def test_the_worst_arithmetic_is_named():
    measured = {
        "flash": signals(delta_error_coherence=(6, 6)),
        "published": signals(delta_error_coherence=(1, 8)),
    }
    (finding,) = verdict.judge(measured, 1024)
    assert finding[2:4] == ("published", (1,))


def test_too_few_rows_are_said_to_be_too_few():
    (finding,) = verdict.judge({"flash": signals(delta_error_coherence=(4, 4))}, 16)
    assert finding.kind == "none"
    assert "16 rows are too few to tell a persistent sign from chance" in finding.sentence


def with_value(name, value, dtype=BFLOAT16):
    """Healthy arrays, as `diagnose` names them, with one entry changed."""
    arrays = {n: x[:, :32].astype(dtype) for n, x in healthy_arrays().items()}
    arrays[name][0, 3, 1, 2] = value
    return arrays


def lse_of(*lowest):
    return with_value("q", 1) | {"lse": np.array([-87.0, 5.0, -np.inf, *lowest])}


HALF = np.float16
ZEROS = np.zeros((1, 32, 2, HEAD_SIZE))


@pytest.mark.parametrize(
    ("arrays", "product", "kinds", "words"),
    [
        (with_value("q", 1), 1e38, [], ()),
        (with_value("q", np.nan), 0, ["non_finite_input"], ("1 of 2048 entries of q", "weights")),
        (with_value("v", -np.inf), 0, ["non_finite_input"], ("entries of v are NaN or inf",)),
        (with_value("do", np.inf), 0, ["non_finite_input"], ("entries of do", "follows this")),
        (with_value("q", 1) | {"o": np.array([1, np.nan])}, 0, ["non_finite_output"],
         ("1 of 2 entries of O", "attention made them")),
        (with_value("k", np.nan) | {"o": np.array([np.nan])}, 0, ["non_finite_input"], ("of k",)),
        (with_value("v", 4e4, HALF), 0, ["float16"], ("v reaches 40000",)),
        (with_value("v", 3e4, HALF), 0, [], ()),
        (with_value("v", 1, HALF), 4e4, ["float16"], ("q·k before it is scaled reaches 40000",)),
        (with_value("v", 1, HALF), 3e4, [], ()),
        (with_value("q", np.inf, HALF), 0, ["non_finite_input"], ("float16 ends at 65504",)),
        (with_value("q", 1, HALF) | {"o": np.array([6e4])}, 0, ["float16"], ("o reaches 60000",)),
        (lse_of(), 0, [], ()),
        (lse_of(-88.5, -120), 0, ["lse"], ("2 of 5 rows", "lowest -120", "cuDNN")),
        (with_value("q", 1) | {"do": ZEROS}, 0, ["zero_gradient"], ("every entry of dO is 0",)),
        (with_value("q", 1, HALF) | {"do": ZEROS.astype(HALF)}, 0, ["zero_gradient"],
         ("raise the loss scale",)),
    ],
)  # fmt: skip
def test_lookalikes_are_named(arrays, product, kinds, words):
    findings = list(lookalikes(arrays, product))
    assert [finding.kind for finding in findings] == kinds
    for word in words:
        assert word in findings[0].sentence


def test_arrays_that_are_not_finite_are_a_finding_and_not_measured(tmp_path, capsys):
    assert run(save(tmp_path / "a.npz", with_value("q", np.nan))) == diagnose.EXIT_FOUND
    text = sentences(capsys.readouterr().out)
    assert "no layer could be measured" in text
    assert "1 of 2048 entries of q are NaN or infinite" in verdict_in(text)


def test_lookalikes_are_found_in_files(tmp_path):
    arrays = {n: x[:, :32].astype(np.float16) for n, x in healthy_arrays().items()}
    arrays |= {n: 50 * arrays[n] for n in "qk"}  # σ of q·k is 2500 √32
    arrays |= {"lse": np.full((1, 2, 32), -90.0), "out": np.zeros((1, 32, 64), np.float16)}
    np.savez(tmp_path / "a.npz", **arrays)
    run(tmp_path / "a.npz", "--numerics", "exact", "--json", tmp_path / "out.json")
    (layer,) = json.loads((tmp_path / "out.json").read_text())["layers"]
    found = {finding["kind"]: finding["sentence"] for finding in layer["findings"]}
    assert list(found)[:2] == ["float16", "lse"]
    assert "q·k before it is scaled reaches" in found["float16"]
    assert "64 of 64 rows" in found["lse"]


def test_a_gradient_of_zeros_is_not_taken_for_an_error(tmp_path, capsys):
    arrays = {name: x[:, :32] for name, x in healthy_arrays().items()}
    one_head = arrays["do"].copy()
    one_head[:, :, 1] = 0
    path = save(tmp_path / "a.npz", arrays | {"do": one_head})
    assert run(path, "--numerics", "flash") == 0
    assert "nothing found" in verdict_in(sentences(capsys.readouterr().out))
    run(save(tmp_path / "b.npz", arrays | {"do": 0 * one_head}), "--numerics", "flash")
    assert "every entry of dO is 0" in verdict_in(sentences(capsys.readouterr().out))


def test_random_signs_do_not_reach_the_threshold():
    """The bound behind COHERENCE, for errors whose sizes differ by orders of magnitude."""
    r = np.random.default_rng(0)
    sizes = np.exp(2 * r.standard_normal((4000, 300)))
    x = sizes * r.choice([-1, 1], sizes.shape)
    coherence = np.abs(x.sum(axis=1)) / np.sqrt((x**2).sum(axis=1))
    assert coherence.max() < verdict.COHERENCE
    for t in (2.0, 3.0):
        assert np.mean(coherence > t) <= 2 * math.exp(-(t**2) / 2)
