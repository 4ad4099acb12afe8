"""The benchmark of the bridge times the same attention by PyTorch, by the bridge and by JAX."""

import json
import sys
import time

import pytest

from benchmarks import bridge
from benchmarks.shapes import Shape

torch = pytest.importorskip("torch", reason="needs torch")


class Event:
    """The host's clock in place of CUDA's."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        self.milliseconds = 1e3 * time.perf_counter()

    def synchronize(self):
        """Nothing runs behind the host's back here."""

    def elapsed_time(self, end):
        return end.milliseconds - self.milliseconds


def test_all_are_timed_and_compared_with_the_faster_of_pytorch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(bridge._SHAPES, "tiny", Shape(1, 48, 2, 16))
    out = tmp_path / "bridge.jsonl"
    options = ["--shapes", "tiny", "--rounds", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bridge.py", *options])
    assert bridge.main() == 0
    environment, *rows = map(json.loads, out.read_text().splitlines())
    assert environment["command"] == " ".join(["python -m benchmarks.bridge", *options])
    names = [f"{caller} {numerics}" for caller in ("bridge", "jax") for numerics in bridge.NUMERICS]
    for of_pass in ("forward", "forward+backward"):
        found = {row["name"]: row for row in rows if row["pass"] == of_pass}
        assert list(found) == ["torch flash", "torch cudnn", *names]
        assert found.pop("torch cudnn")["kind"] == "refused"  # it needs a GPU
        assert found["torch flash"]["ratio"] == 1
        for row in found.values():
            assert row["kind"] == "time", row
            assert row["baseline"] == "torch flash"
            assert row["seconds"] > 0
            assert row["distance"] < 0.02
    printed = capsys.readouterr().out
    assert all(printed.count(name) == 2 for name in names)
