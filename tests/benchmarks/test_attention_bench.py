"""The benchmark takes fair samples, reports what it drops, and judges its ratios correctly."""

import dataclasses
import errno
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from matplotlib.figure import Figure

from benchmarks import bad_text, causes_figure
from benchmarks.attention import __main__ as command
from benchmarks.attention import memory, own, peers, table, targets, timing
from benchmarks.attention.candidates import candidates, for_shape, select
from benchmarks.attention.flash3 import flash_attn_func
from benchmarks.attention.measure import measure
from benchmarks.attention.problem import PASSES, Problem
from benchmarks.attention.records import add_ratios, fastest, ratio, read, write
from benchmarks.attention.timing import JaxCandidate, Timed
from benchmarks.attention.torch_sdpa import torch_candidates
from benchmarks.shapes import SHAPES, SWEEP, Shape
from lowprec_attn.errors import RunError
from lowprec_attn.files import DiskError
from lowprec_attn.numerics import PRESETS

TINY = Shape(1, 64, 2, 32)


def tiny(*, backward: bool = False) -> Problem:
    return Problem("tiny", TINY, "bfloat16", backward)


def record(name: str, samples: list[float], shape: str = "gpt2", backward: bool = True) -> Any:
    return {
        "kind": "time",
        "shape": shape,
        "dtype": "bfloat16",
        "pass": PASSES[backward],
        "name": name,
        "seconds": sorted(samples)[len(samples) // 2],
        "seconds_25_75": [min(samples), max(samples)],
        "tflops": 1.0,
        "samples": samples,
    }


def complete_records(changed: Mapping[str, float] = MappingProxyType({})) -> list[Any]:
    """Times of the candidates in the targets, all of which they meet, on every shape and pass."""
    seconds = {
        "jax pallas default": 2.0,
        "jax pallas 64x128": 1.1,
        "gpu flash": 1.0,
        "gpu flash dynamic_max": 1.02,
        "gpu published": 1.2,
        "gpu published kv_block=64": 1.0,
        "gpu flash kv_block=512": 1.2,
        "gpu normalized_delta": 1.1,
        "gpu float32_output": 1.04,
        "gpu exact": 2.0,
    } | dict(changed)
    return [
        record(name, [value] * 3, shape, backward)
        for shape in targets.SHAPES
        for backward in (False, True)
        for name, value in seconds.items()
    ]


# Samples


def test_repeat_makes_every_call() -> None:
    """The product stays in the loop, behind a barrier that also takes the results before it."""
    x = jnp.ones((64, 64))
    lowered = jax.jit(timing.repeat(lambda a: (a @ a,), 5)).lower(x)
    loop = lowered.as_text().split("stablehlo.while")[1]
    assert re.search(r"optimization_barrier %\w+, %\w+ .*dot_general", loop, re.DOTALL)
    program = lowered.compile()
    _, entry = program.as_text().split("ENTRY")
    assert " while(" in entry
    assert " dot(" not in entry
    assert jnp.array_equal(program(x)[0], x @ x)


@pytest.mark.parametrize("backward", [False, True])
def test_sample_returns_what_one_call_does(backward: bool) -> None:
    problem = tiny(backward=backward)
    inputs = problem.inputs()
    flash = select(own.presets("cpu"), ["tiled flash"])[0]
    assert isinstance(flash, JaxCandidate)
    once, looped = (flash.prepare(problem, inputs, calls).results() for calls in (1, 3))
    assert len(once) == len(looped) == (4 if backward else 1)
    assert all(jnp.array_equal(x, y) for x, y in zip(once, looped, strict=True))


def test_interleave_takes_one_sample_of_each_per_round() -> None:
    taken: list[str] = []

    def timed(name: str, clock: Callable[[], float]) -> Timed:
        def seconds() -> float:
            taken.append(name)
            return clock()

        return Timed(lambda: (), seconds, "")

    names, rounds = ("a", "b", "c"), 20
    count = itertools.count()
    samples = timing.interleave({n: timed(n, lambda: float(next(count))) for n in names}, rounds)
    by_round = [taken[i : i + 3] for i in range(0, len(taken), 3)]
    assert len(by_round) == rounds
    assert all(sorted(names_of_round) == list(names) for names_of_round in by_round)
    assert len({tuple(names_of_round) for names_of_round in by_round}) > 1
    for name in names:
        assert [int(x) // 3 for x in samples[name]] == list(range(rounds))


def test_calls_fill_a_sample() -> None:
    for shape, backward in itertools.product(SHAPES.values(), (False, True)):
        problem = Problem("", shape, "bfloat16", backward)
        assert problem.calls("cpu") == 1
        assert 2 <= problem.calls("gpu") <= 128
    gpt2 = Problem("gpt2", SHAPES["gpt2"], "bfloat16", True)
    assert gpt2.calls("gpu") == 45  # 20 ms · 200 TFLOP/s / (3.5 · 2 · 16 · 12 · 1024² · 64)


def test_values_of_another_head_size_count_in_two_of_five_products() -> None:
    shape = Shape(1, 8, 2, 24, 16)
    forward, both = (Problem("", shape, "bfloat16", backward) for backward in (False, True))
    for problem in (forward, both):
        shapes = [x.shape for x in problem.inputs()]
        assert shapes == [(1, 8, 2, 24)] * 2 + [(1, 8, 2, 16)] * 2
        assert shapes == [x.shape for x in problem.abstract_inputs()]
    # S and P̄V; then S, dQ and dK of 24 features, dP and dV of 16. Half of each is not counted.
    assert forward.flops == 2 * 64 * (24 + 16)
    assert both.flops - forward.flops == 2 * 64 * (3 * 24 + 2 * 16)


# Candidates


def test_every_preset_and_rule_is_a_candidate() -> None:
    names = [c.name for c in candidates("gpu")]
    assert {f"gpu {preset}" for preset in PRESETS} < set(names)
    for preset, rule in itertools.product(("flash", "published"), ("dynamic", "published")):
        assert f"gpu {preset} {rule}_max" in names
    assert {"jax.nn xla", "jax.nn cudnn", "jax pallas default", "torch cudnn"} < set(names)
    assert len(set(names)) == len(names)


def test_targets_and_sweep_name_candidates() -> None:
    found = candidates("gpu")
    for target in targets.TARGETS:
        assert select(found, [target.name])
        assert select(found, [target.other])
    swept = {c.name for c in for_shape(found, SWEEP[0])}
    assert {"jax.nn xla", "jax pallas default", "gpu flash", "gpu published"} < swept
    assert len(for_shape(found, "gpt2")) == len(found) > len(swept)


def test_sweep_has_one_number_of_tokens() -> None:
    shapes = [SHAPES[name] for name in SWEEP]
    assert [shape.length for shape in shapes] == [512 * 2**i for i in range(7)]
    assert {shape.batch * shape.length for shape in shapes} == {32768}


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.ops.gpu:DeprecationWarning")
def test_candidates_that_decline_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed, wrong platform, or unserved numerics: one line each, with the reason."""
    for package in ("torch", "tokamax"):
        monkeypatch.setitem(sys.modules, package, None)
    found = [
        peers.jax_nn("xla"),
        *torch_candidates(),
        peers.tokamax("triton"),
        peers.jax_pallas()[0],
        *select(own.presets("gpu"), ["gpu flash"]),
        *select(own.presets("cpu"), ["tiled standard"]),
    ]
    records = measure(tiny(), found, rounds=2)
    assert [r["name"] for r in records] == [c.name for c in found]
    assert [r["kind"] for r in records] == ["time"] + ["refused"] * 8
    reasons = [r["reason"] for r in records[1:]]
    assert all("torch" in reason for reason in reasons[:4])
    assert "tokamax" in reasons[4]
    assert "CUDA" in reasons[6]
    assert "normalize_probs" in reasons[7]
    assert not any("\n" in reason for reason in reasons)
    printed = "\n".join(table.time_lines(records))
    assert all(reason in printed for reason in reasons)


def test_flash_attention_3_takes_the_package_that_has_the_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("fa3_fwd_interface", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match="flash_attn_interface or fa3_fwd_interface"):
        flash_attn_func(backward=False)
    (tmp_path / "fa3_fwd_interface.py").write_text("flash_attn_func = 'forward'")
    importlib.invalidate_caches()
    assert flash_attn_func(backward=False) == "forward"
    with pytest.raises(ImportError, match=r"no module flash_attn_interface$"):
        flash_attn_func(backward=True)
    (tmp_path / "flash_attn_interface.py").write_text("flash_attn_func = 'both'")
    importlib.invalidate_caches()
    assert flash_attn_func(backward=False) == flash_attn_func(backward=True) == "both"


def test_records_say_whether_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second candidate changes its last bits on every run, like sums without an order."""
    count = itertools.count()

    def prepare(self: timing.JaxCandidate, *call: Any) -> timing.Timed:
        ready = in_order(self, *call)
        if self.name == "in order":
            return ready
        return dataclasses.replace(ready, results=lambda: drifted(ready.results()))

    def drifted(results: timing.Results) -> timing.Results:
        return tuple(x + jnp.finfo(x.dtype).eps * next(count) for x in results)

    in_order = timing.JaxCandidate.prepare
    monkeypatch.setattr(timing.JaxCandidate, "prepare", prepare)
    found = [dataclasses.replace(peers.jax_nn("xla"), name=name) for name in ("in order", "any")]
    assert [r["same_bits"] for r in measure(tiny(), found, rounds=1)] == [True, False]


@pytest.mark.parametrize("backward", [False, True])
def test_another_function_is_not_timed(backward: bool) -> None:
    def full(problem: Problem) -> timing.Attention:
        return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, scale=problem.scale)

    def rounded(problem: Problem) -> timing.Attention:
        causal = peers.jax_nn("xla").attention(problem)
        return lambda q, k, v: causal(q, k, v) * jnp.bfloat16(1.01)

    found = [peers.jax_nn("xla"), JaxCandidate("full", full), JaxCandidate("rounded", rounded)]
    reference, wrong, near = measure(tiny(backward=backward), found, rounds=1)
    assert reference["distance"] == 0
    assert "something else" in wrong["reason"]
    assert near["distance"] == pytest.approx(0.01, rel=0.3)


# Records and ratios


def test_ratio_is_taken_round_by_round() -> None:
    """A clock that halves in the middle of a run changes neither the ratio nor its spread."""
    slow, fast = record("a", [2.0, 2.0, 1.0, 1.0]), record("b", [1.0, 1.0, 0.5, 0.5])
    assert ratio(slow, fast) == (2.0, 2.0, 2.0)


def test_baseline_is_the_fastest_that_matches() -> None:
    rows = [record("p x", [3.0]), record("p y", [2.0]), record("q", [1.0])]
    rows.append({"kind": "refused", "name": "p z", "reason": "no"})
    chosen = fastest(rows, "p *")
    assert chosen is not None
    assert chosen["name"] == "p y"
    add_ratios(rows, "p *")
    assert [r.get("ratio") for r in rows] == [1.5, 1.0, 0.5, None]
    assert fastest(rows, "r *") is None


def test_records_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "bench.jsonl"
    write(path, complete_records())
    assert read(path) == complete_records()
    path.write_text('{"a": 1}\n')
    with pytest.raises(RunError, match="does not hold records"):
        read(path)
    with pytest.raises(RunError, match="cannot read"):
        read(tmp_path / "none.jsonl")


def test_a_full_disk_leaves_the_records_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.jsonl"
    write(path, complete_records())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=r"cannot write .*: No space left on device"):
        write(path, [*complete_records(), {"kind": "time"}])
    assert read(path) == complete_records()


def test_a_place_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["program", str(tmp_path / "file" / "name")])
    monkeypatch.setattr(causes_figure, "figure", lambda: Figure())
    for program in (bad_text, causes_figure):
        assert program.main() == 1
        assert re.fullmatch(r"error: .*\n", capsys.readouterr().err)


def test_targets_met() -> None:
    found = list(targets.outcomes(complete_records()))
    assert targets.all_met(found)
    assert len(found) == len(targets.TARGETS) * len(targets.SHAPES) * len(PASSES)
    peer = found[0]
    assert (peer.other, peer.ratio) == ("jax pallas 64x128", pytest.approx(1 / 1.1))
    assert {o.met for o in found if o.target.name == "gpu published"} == {True, None}


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("jax pallas 64x128", 0.99),
        ("gpu flash dynamic_max", 1.031),
        ("gpu published", 1.46),
        ("gpu published kv_block=64", 0.9),
        ("gpu flash kv_block=512", 1.3),
        ("gpu normalized_delta", 1.13),
        ("gpu float32_output", 1.06),
        ("gpu exact", 4.1),
    ],
)
def test_a_missed_target_is_seen(name: str, seconds: float) -> None:
    found = list(targets.outcomes(complete_records({name: seconds})))
    assert not targets.all_met(found)
    assert any("MISSED" in line for line in table.target_lines(found))


def test_what_was_not_timed_is_no_target_met() -> None:
    records = complete_records()
    for left_out in ("gpu exact", "gpu flash"):
        rest = [r for r in records if r["name"] != left_out]
        found = list(targets.outcomes(rest))
        assert not targets.all_met(found)
        lines = list(table.target_lines(found))
        assert any(left_out in line and "not timed" in line for line in lines)
        assert not any("MISSED" in line for line in lines)
    one_shape = [r for r in records if r["shape"] == "gpt2"]
    assert not targets.all_met(list(targets.outcomes(one_shape)))
    assert not targets.all_met([])


# Memory and the command


def test_memory_of_tiled_is_linear_and_of_xla_is_not() -> None:
    found = select(candidates("cpu"), ["jax.nn xla", "tiled flash"])
    chosen = [c for c in found if isinstance(c, JaxCandidate)]
    rows = memory.memory(chosen, [1024, 2048], "bfloat16")
    by_name = {c.name: [r for r in rows if r["name"] == c.name] for c in chosen}
    assert memory.growth(by_name["tiled flash"]) < 1.1
    assert memory.growth(by_name["jax.nn xla"]) > 1.8
    array = 2 * 1024 * 12 * 64 / 2**20
    first = by_name["tiled flash"][0]
    assert (first["arguments_mib"], first["outputs_mib"]) == (
        pytest.approx(4 * array),
        pytest.approx(4 * array, rel=1e-3),
    )
    printed = list(table.memory_lines(rows))
    assert len(printed) == 2
    assert all("T^" in line for line in printed)


def test_memory_lists_what_declines() -> None:
    chosen = select(own.presets("gpu"), ["gpu flash"])
    rows = memory.memory([c for c in chosen if isinstance(c, JaxCandidate)], [512], "bfloat16")
    assert [r["kind"] for r in rows] == ["refused"]
    assert "CUDA" in "\n".join(table.memory_lines(rows))


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measures, writes, prints and draws, and repeats the output from the file."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    out, plot = tmp_path / "bench.jsonl", tmp_path / "figures" / "bench"

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
        return command.main()

    measured = (
        "--shapes",
        "tiny",
        "--rounds",
        2,
        "--only",
        "jax.nn *",
        "tiled flash",
        "* standard",
    )
    assert run(*measured, "--out", out, "--plot", plot) == 0
    first = capsys.readouterr().out
    assert "tiled flash" in first
    assert "declined" in first
    kinds = [json.loads(line)["kind"] for line in out.read_text().splitlines()]
    assert kinds == ["environment"] + 2 * ["time", "time", "refused"]
    environment = read(out)[0]
    assert environment["command"].startswith("python -m benchmarks.attention --shapes tiny")
    assert environment["versions"]["jax"] == jax.__version__
    assert plot.with_name("bench_shapes.png").stat().st_size > 1000

    assert run("--read", out) == 0
    assert capsys.readouterr().out == first.replace(f"{plot}_shapes.png\n", "")
    assert run("--read", out, "--require") == 1
    assert run("--read", tmp_path / "none") == 2
    write(out, [environment, *complete_records()])
    assert run("--read", out, "--require") == 0
    assert run("--shapes", "tiny", "--only", "nothing") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "foo"], "argument --dtype: invalid choice: 'foo'"),
        (["--memory", "--lengths", "512", "0"], "--lengths must be at least 1, got 0"),
    ],
)
def test_arguments_that_cannot_be_measured_are_refused(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert says in capsys.readouterr().err


def test_a_length_given_twice_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--memory", "--only", "tiled flash", "--lengths", "32", "16", "32"]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    assert re.search(r"tiled flash +~ T\^\S+ +16: .* MiB +32: .* MiB\n", capsys.readouterr().out)


def test_figures_of_sweep_and_memory(tmp_path: Path) -> None:
    from benchmarks.attention import plot

    rows = [record("gpu flash", [1.0], name, backward) for name in SWEEP for backward in (0, 1)]
    grown = [
        {"kind": "memory", "name": "gpu flash", "length": t, "total_mib": t / 8}
        for t in memory.LENGTHS
    ]
    paths = plot.save([*rows, *grown], tmp_path / "bench")
    assert [path.name for path in paths] == ["bench_sweep.png", "bench_memory.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_compiler_options_reach_the_compiler() -> None:
    """An unknown option is refused, so a known option has been read."""
    known = dataclasses.replace(peers.jax_nn("xla"), options={"xla_cpu_enable_fast_math": False})
    unknown = dataclasses.replace(known, name="unknown", options={"xla_no_such_option": True})
    records = measure(tiny(), [known, unknown], rounds=1)
    assert [r["kind"] for r in records] == ["time", "refused"]
    assert "xla_no_such_option" in records[1]["reason"]


def test_no_script_hides_a_module_of_python() -> None:
    """`python benchmarks/x.py` looks there first; a `profile.py` once hid cProfile's import."""
    names = {path.stem for path in Path(timing.__file__).parents[1].iterdir()}
    assert not names & sys.stdlib_module_names
