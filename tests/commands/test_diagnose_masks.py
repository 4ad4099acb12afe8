"""Masks, biases and lengths in files of `diagnose`: read exactly, or refused by name."""

import ml_dtypes
import numpy as np
import pytest

from lowprec_attn.diagnostics import masks
from lowprec_attn.diagnostics.examine import array_file
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError

BATCH, ROWS, HEADS, SIZE = 3, 12, 2, 4
LOWEST = np.finfo(np.float32).min


def arrays(batch=BATCH, rows=ROWS, keys=ROWS, seed=0):
    draw = np.random.default_rng(seed).standard_normal
    shapes = {n: (batch, rows if n in ("q", "do") else keys, HEADS, SIZE) for n in "qkv"}
    shapes["do"] = shapes["q"]
    made = {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"x": draw((batch, rows, 5)).astype(np.float32)}


def load(tmp_path, found):
    np.savez(tmp_path / "a.npz", **found)
    return array_file.load(tmp_path / "a.npz")


def attention(q, k, v, seen):
    """O in float64, [T, N, H], of one sequence; seen: [T, S]."""
    s = np.einsum("tnh,snh->nts", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(SIZE)
    s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("nts,snh->tnh", p / p.sum(axis=-1, keepdims=True), v.astype(np.float64))


def seen_by(layer):
    row, key = np.ogrid[: layer.q.shape[1], : layer.k.shape[1]]
    seen = np.ones((layer.q.shape[1], layer.k.shape[1]), bool)
    if layer.is_causal or layer.is_causal is None:  # the default of `diagnose`
        seen &= key <= row
    if layer.window is not None:
        seen &= (key >= row - layer.window[0]) & (key <= row + layer.window[1])
    return seen


def assert_same_attention(found, layers, seen, real):
    """Checks that every real row of the file is in one layer, with the O that it had."""
    left = {(b, t) for b, t in zip(*np.nonzero(real), strict=True)}
    for layer in layers:
        for i in range(layer.q.shape[0]):
            (b, start) = next(
                (b, t) for b, t in sorted(left) if np.array_equal(found["q"][b, t], layer.q[i, 0])
            )
            rows = slice(start, start + layer.q.shape[1])
            for name in ("q", "do", "x"):
                assert np.array_equal(getattr(layer, name)[i], found[name][b, rows])
            got = attention(layer.q[i], layer.k[i], layer.v[i], seen_by(layer))
            with np.errstate(invalid="ignore"):  # rows of padding may see nothing
                wanted = attention(found["q"][b], found["k"][b], found["v"][b], seen[b])
            np.testing.assert_allclose(got, wanted[rows], rtol=1e-12)
            left -= {(b, t) for t in range(rows.start, rows.stop)}
    assert not left


SPELLINGS = {
    "truth values [B, 1, T, S]": lambda seen: {"mask": seen[:, None]},
    "truth values [B, N, T, S]": lambda seen: {"attn_mask": np.repeat(seen[:, None], HEADS, 1)},
    "integers [B, T, S]": lambda seen: {"Attention_Mask": seen.astype(np.int64)},
    "-inf [B, 1, T, S]": lambda seen: {"attn_bias": np.where(seen, 0, -np.inf)[:, None]},
    "finfo.min, as a mask": lambda seen: {"attention_mask": np.where(seen, 0, LOWEST)[:, None]},
    "-10000 in bfloat16": lambda seen: {
        "bias": np.where(seen, 0, -1e4)[:, None].astype(ml_dtypes.bfloat16)
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("seed", range(12))
def test_masks_are_cuts_with_the_same_attention(tmp_path, spelling, seed):
    draw = np.random.default_rng(seed)
    found = arrays(seed=seed)
    row, key = np.ogrid[:ROWS, :ROWS]
    seen = np.ones((BATCH, ROWS, ROWS), bool)
    if draw.random() < 0.6:
        seen &= key <= row
    if draw.random() < 0.5:
        seen &= (key >= row - draw.integers(4)) & (key <= row + draw.integers(3))
    ends = [sorted(draw.choice(ROWS, 2, replace=False)) for _ in range(BATCH)]
    of_real = np.array([(first <= key[0]) & (key[0] <= last) for first, last in ends])
    if draw.random() < 0.3:
        of_real[:] = True
    seen &= of_real[:, None]
    at_rows = draw.choice(["all keys", "the same", "nothing"])
    if at_rows == "all keys":  # as in transformers, so that every row sees a key
        seen |= ~of_real[:, :, None]
    elif at_rows == "nothing":
        seen &= of_real[:, :, None]
    if seen.all():  # zeros as floats could be either kind of mask
        seen &= key <= row
    layers = load(tmp_path, found | SPELLINGS[spelling](seen))
    assert_same_attention(found, layers, seen, of_real)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        lambda real: {"attention_mask": real.astype(np.int64)},
        lambda real: {"attention_mask": real.astype(np.float32)},
        lambda real: {"mask": real[:, None, None]},
        lambda real: {"key_padding_mask": ~real},
        lambda real: {"attn_bias": np.where(real, 0, -np.inf)[:, None, None]},
    ],
)
def test_padding_is_cut_and_causality_is_left_to_the_file(tmp_path, causal, given):
    real = np.ones((BATCH, ROWS), bool)
    real[0, 7:] = real[2, :3] = False
    found = arrays()
    layers = load(tmp_path, found | given(real) | {"is_causal": np.array(causal)})
    assert [layer.name for layer in layers] == ["[0]", "[1]", "[2]"]
    row, key = np.ogrid[:ROWS, :ROWS]
    seen = np.broadcast_to((key <= row) | (not causal), (BATCH, ROWS, ROWS)) & real[:, None]
    assert_same_attention(found, layers, seen, real)


def test_lengths_are_cuts(tmp_path):
    found = arrays()
    of_rows, of_keys = np.array([12, 5, 8]), np.array([12, 7, 8])
    given = {"query_seq_lengths": of_rows, "key_value_seq_lengths": of_keys}
    layers = load(tmp_path, found | given | {"is_causal": np.array(False)})
    real = np.arange(ROWS) < of_rows[:, None]
    seen = np.broadcast_to((np.arange(ROWS) < of_keys[:, None])[:, None], (BATCH, ROWS, ROWS))
    assert_same_attention(found, layers, seen, real)


def test_what_hides_nothing_changes_nothing(tmp_path):
    (layer,) = load(tmp_path, arrays() | {"attention_mask": np.ones((BATCH, ROWS), np.int32)})
    assert (layer.name, layer.is_causal, layer.window) == ("", None, None)
    assert layer.notes == ("attention_mask: read as hiding nothing",)


def test_a_mask_above_all_layers_holds_for_each(tmp_path):
    real = np.ones((BATCH, ROWS), np.int32)
    real[:, 9:] = 0
    both = {f"{i}/{name}": array for i in "ab" for name, array in arrays().items()}
    layers = load(tmp_path, both | {"attention_mask": real})
    assert [(layer.name, layer.q.shape[1]) for layer in layers] == [("a", 9), ("b", 9)]


def test_o_and_lse_are_cut_as_q_is(tmp_path):
    real = np.ones((BATCH, ROWS), np.int32)
    real[:, 9:] = 0
    rows = np.arange(ROWS, dtype=np.float32)
    lse = np.broadcast_to(rows, (BATCH, HEADS, ROWS))
    o = np.broadcast_to(rows[:, None, None], (BATCH, ROWS, HEADS, SIZE))
    (layer,) = load(tmp_path, arrays() | {"attention_mask": real, "lse": lse, "o": o})
    assert layer.lse.shape == (BATCH, HEADS, 9)
    assert (layer.o.shape, layer.o.max()) == ((BATCH, 9, HEADS, SIZE), 8)
    (layer,) = load(tmp_path, arrays() | {"attention_mask": real, "o": o.reshape(-1)})
    assert layer.o is None
    assert "o: not read, for it cannot be cut as q is" in layer.notes


def test_other_arrays_beside_q_are_named(tmp_path):
    (layer,) = load(tmp_path, arrays() | {"rope": np.ones(3), "deep/weight": np.ones(3)})
    assert layer.notes == ("not read, of an unknown name: rope",)


HOLE = np.ones((BATCH, ROWS), bool)
HOLE[1, 4] = False
CAUSAL = np.tril(np.ones((ROWS, ROWS), bool))
PREFIX = CAUSAL | (np.arange(ROWS) < 4)
SHIFTED = np.tril(np.ones((4, ROWS), bool), ROWS - 4)
REFUSED = {
    "ALiBi": ({"bias": np.arange(ROWS, dtype=float)[None]}, "bias adds to the scores"),
    "a bias of truth values": ({"bias": CAUSAL}, "bias adds to the scores"),
    "a hole in the padding": ({"attention_mask": HOLE}, "hides keys between others"),
    "every key": ({"attention_mask": 0 * HOLE}, "hides every key of a sequence"),
    "a prefix": ({"mask": PREFIX}, "mask hides more than padding, causality"),
    "the other way round": ({"attn_mask": ~CAUSAL}, "attn_mask hides more than padding"),
    "another mask in a head": (
        {"mask": np.stack([CAUSAL, ~CAUSAL])[None]},
        "mask differs from head to head",
    ),
    "rows without a key": (
        {"key_value_seq_lengths": np.full(BATCH, 5), "window": np.array([2, 0])},
        r"window \(2, 0\) and key_value_seq_lengths: the rows from 7 on are left without a key",
    ),
    "another shape": ({"mask": np.ones((5, 7), bool)}, r"mask of shape \(5, 7\) is neither \[B"),
    "text": ({"mask": np.array("causal")}, "mask must be truth values or numbers, got <U6"),
    "zeros as floats": ({"mask": np.zeros((BATCH, ROWS))}, "mask is 0 everywhere, as floats"),
    "lengths of 0": ({"query_seq_lengths": np.array([0, 1, 1])}, "must be from 1 to 12, got 0"),
    "too few lengths": ({"query_seq_lengths": np.array([3])}, r"must be integers \[3\], got"),
    "two windows": (
        {"mask": np.triu(CAUSAL, -2), "window": np.array([5, 0])},
        r"window \(5, 0\) and the mask's \(2, 0\) are not the same",
    ),
    **{
        name: ({name: np.ones(3)}, rf"{name} .*, and is not read; without it the scores would")
        for name in masks.REFUSED
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_exactly_is_refused(tmp_path, case):
    given, words = REFUSED[case]
    with pytest.raises(DiagnoseError, match=words):
        load(tmp_path, arrays() | given)


def test_shapes_that_fit_twice_are_refused(tmp_path):
    with pytest.raises(DiagnoseError, match=r"may be \[B, S\] or \[T, S\], which are alike here"):
        load(tmp_path, arrays(batch=4, rows=4, keys=4) | {"mask": np.ones((4, 4), bool)})
    found, two = arrays(batch=HEADS), np.stack([CAUSAL, np.triu(CAUSAL, -3)])
    with pytest.raises(DiagnoseError, match=r"may be \[B, T, S\] or \[N, T, S\], which are alike"):
        load(tmp_path, found | {"mask": two})
    assert [layer.window for layer in load(tmp_path, found | {"mask": two[:, None]})] == [
        None,
        (3, 0),
    ]
    (layer,) = load(tmp_path, found | {"mask": np.stack([CAUSAL, CAUSAL])})  # means the same
    assert layer.is_causal


def test_a_mask_of_fewer_keys_whose_window_ends_is_refused(tmp_path):
    mask = np.triu(np.tril(np.ones((ROWS, 4), bool)), -1)
    with pytest.raises(DiagnoseError, match=r"\(1, 0\) and mask: the rows from 5 on are left"):
        load(tmp_path, arrays(keys=4) | {"mask": mask})


def test_of_other_rows_than_keys(tmp_path):
    """Decoding the last rows of a sequence: array positions are not those of the sequence."""
    found = arrays(rows=4)
    layers = load(tmp_path, found | {"mask": SHIFTED})
    assert (layers[0].is_causal, layers[0].window) == (False, (3, ROWS - 4))
    every = np.ones((BATCH, 4), bool)
    assert_same_attention(found, layers, np.broadcast_to(SHIFTED, (BATCH, 4, ROWS)), every)
    real = np.ones((BATCH, ROWS), bool)
    real[:, :2] = False
    with pytest.raises(DiagnoseError, match="the first keys are hidden and causality counts from"):
        load(tmp_path, found | {"attention_mask": real})
    layers = load(tmp_path, found | {"attention_mask": real, "is_causal": np.array(False)})
    seen = np.broadcast_to(real[:, None], (BATCH, 4, ROWS))
    assert_same_attention(found, layers, seen, every)
