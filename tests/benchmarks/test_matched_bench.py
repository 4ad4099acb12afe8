"""What each part of `matched` leaves alone, on one small problem."""

import json
import sys

from benchmarks import matched


def test_every_arm_is_measured(tmp_path, monkeypatch):
    out = tmp_path / "matched.jsonl"
    small = ("--tokens", "144", "--heads", "1", "--head_size", "16", "--scores", "30")
    monkeypatch.setattr(sys, "argv", ["matched", f"--out={out}", *small])
    matched.main()
    header, *lines = (json.loads(line) for line in out.read_text().splitlines())
    assert header["environment"]["backend"] == "cpu"
    found = {line["arm"]: line for line in lines}
    assert found.keys() == matched.ARMS.keys()
    own = found["matched_float32_output"]
    assert own["p"] < 1e-6 and own["ds"] < 1e-6 < found["matched"]["ds"] < 1e-5
    assert own["cast"] > 10 * own["ds"]
    for name in ("flash", "matched, whole maximum off", "matched, rounded row sum off"):
        assert found[name]["ds"] > 1e-5, name
    assert found["matched, rounded row sum off"]["p"] > 1e-4
    assert found["matched"]["dq"] < 0.5 * found["flash"]["dq"]
    assert max(line[name] for line in lines for name in ("dq", "dk", "dv")) < 0.5
