"""`lowprec-attn compile`: what a step takes of a TPU. The compiler's part needs libtpu and is slow:
`pytest -m tpu_compile`."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from command import ROOT
from jax.experimental import topologies
from tiny import tiny_settings

from lowprec_attn.commands import compile as compile_command
from lowprec_attn.commands.compile import COMPILER_HOST
from lowprec_attn.commands.main import main
from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.training import fit
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.fit import _advice
from lowprec_attn.training.footprint import collectives, step_footprint
from lowprec_attn.training.tpu_slice import GENERATIONS, Slice, SliceError

PROGRAM = """
  %all-reduce.1 = (f32[128,4]{1,0:T(8,128)}, f32[]) all-reduce(%a, %b), replica_groups={}
  %all-reduce-start = f32[10]{0} all-reduce-start(%c), replica_groups={}
  %all-reduce-done = f32[10]{0} all-reduce-done(%all-reduce-start)
  %ag = (bf16[2,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}) all-gather-start(%d), dimensions={0}
  %agd = bf16[8,8]{1,0} all-gather-done(%ag)
  ROOT %fusion = f32[10]{0} fusion(%agd), calls=%all-reduce-like
"""


def test_collectives_are_counted_with_the_bytes_of_their_results():
    assert collectives(PROGRAM) == {"all-gather": (1, 128), "all-reduce": (2, 2052 + 40)}


def test_the_footprint_of_a_step_on_simulated_devices():
    model = {"model__width": 64, "model__vocab_size": 320, "model__context": 64}
    whole, split = (
        step_footprint(settings, run_devices(settings))
        for settings in (
            tiny_settings(devices=8, shard_optimizer=shard_optimizer, **model)
            for shard_optimizer in (False, True)
        )
    )
    parameters = 4 * parameter_count(tiny_settings(**model).model)
    # The gradients; loss and norms besides.
    for footprint in (whole, split):
        assert parameters <= footprint.collectives["all-reduce"][1] < 1.01 * parameters
    # Parameters, two moments, and counters and the batch; an eighth of the moments, and the new
    # parameters are gathered.
    assert 3 * parameters < whole.arguments < 3.1 * parameters
    assert 1.25 * parameters < split.arguments < 1.35 * parameters
    assert "all-gather" not in whole.collectives
    assert 0.9 * parameters < split.collectives["all-gather"][1] <= parameters
    assert whole.kernels == 0
    assert whole.total > whole.temporaries > parameters


def test_stages_are_said_with_their_times_also_of_one_that_fails(capsys):
    with fit._stage("tracing"):
        pass
    with pytest.raises(ZeroDivisionError), fit._stage("compiling"):
        raise ZeroDivisionError
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"tracing \.\.\. 0\.\d s\ncompiling \(minutes\) \.\.\. 0\.\d s\n", err)


def test_the_speed_at_the_peak_is_that_of_the_arithmetic_on_the_whole_slice():
    facts = {
        "topology": "v5e:2x2",
        "devices": 4,
        "device_kind": "TPU v5 lite",
        "hosts": 1,
        "hbm": 2.0**34,
        "config": "gpt2_bf16:tiny",
        "parameters": 2**20,
        "batch_size": 64,
        "context": 32,
        "accumulation_steps": 8,
        "shard_optimizer": False,
        "attention": [],
        "model_flops": 1e12,
        "seconds_at_peak": 0.01,
        "fits": None,
        "quick": True,
        "refusal": None,
        "versions": {"jax": "1", "libtpu": "2"},
        "seconds": 1.0,
    }
    lines = dict(fit._lines(facts))
    assert lines["verdict"].startswith("too close to tell; leave out --quick, compiled quickly (")
    speed = lines["speed"]
    assert "at most 200,000 tokens/s" in speed
    assert "about 96,000 at the 47% of the peak" in speed
    assert "estimate" in speed


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "v5e:big", "v5e:16"])
def test_an_unknown_slice_is_refused_with_an_example(name):
    with pytest.raises(SliceError, match=f"unknown topology '{name}'.*v5e:16x16.*tpu7x"):
        Slice.of(name)


def test_advice_names_the_fields_that_help():
    facts = {"devices": 4, "parameters": 2**30}
    settings = tiny_settings(batch_size=64, accumulation_steps=8)
    assert [line.split(": ")[-1] for line in _advice(facts, settings)] == [
        "--config.accumulation_steps=16",
        "--config.shard_optimizer=True (6.0 GiB)",
        "a larger slice, or a generation with more memory",
    ]
    settings = tiny_settings(batch_size=64, accumulation_steps=16, shard_optimizer=True)
    assert [line.split(": ")[-1] for line in _advice(facts, settings)] == [
        "--config.accumulation_steps=1 (4.0 GiB)",
        "a larger slice, or a generation with more memory",
    ]


def test_the_compiler_is_prepared_before_anything_starts_jax(monkeypatch):
    loaded = "import lowprec_attn.commands.compile, sys; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["False"]

    asked = []
    monkeypatch.setattr(compile_command.os, "environ", {})
    monkeypatch.setattr(fit, "compile_for", lambda *args: asked.append(args) or 1)
    command = ["compile", "--topology=v5e:2x2", "--config=gpt2_bf16:tiny", "--config.steps=3"]
    assert main(command) == 1
    assert compile_command.os.environ == COMPILER_HOST
    assert main([*command, "--quick"]) == 1
    assert compile_command.os.environ == COMPILER_HOST | {"JAX_OPTIMIZATION_LEVEL": "O1"}
    (topology, settings, record, quick), (*_, quickly) = asked
    assert (topology, settings.steps, record) == ("v5e:2x2", 3, None)
    assert (quick, quickly) == (False, True)


@pytest.mark.parametrize(
    ("needed", "quick", "fits"),
    [
        (99, False, True),
        (101, False, False),
        (86, True, True),
        (88, True, None),
        (101, True, False),
    ],
)
def test_a_quick_look_says_where_it_cannot_tell(needed, quick, fits):
    assert fit._fits(needed, 100.0, quick) is fits


def test_a_config_that_is_not_there_is_named_with_those_that_are(capsys):
    assert main(["compile", "--topology=v5e:2x2", "--config=a.py:full"]) == 1
    assert "there is no config a.py; pass a file, or one of gpt2_bf16, " in capsys.readouterr().err


def test_without_the_compiler_its_installation_is_named(monkeypatch, capsys):
    def without_compiler(*_, **__):
        raise RuntimeError("libtpu.so cannot be opened")

    monkeypatch.setattr(topologies, "get_topology_desc", without_compiler)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compile", "--topology=v5e:2x2", "--config=gpt2_bf16:tiny"]) == 1
    assert "libtpu, which is not installed: pip install" in capsys.readouterr().err


# The compiler itself.

needs_libtpu = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]
SMALL = {
    "model.layers": 2,
    "model.heads": 2,
    "model.width": 128,
    "model.context": 256,
    "model.vocab_size": 512,
    "batch_size": 16,
    "accumulation_steps": 2,
}


def compile_alone(*words):
    """`lowprec-attn compile` in a process of its own, as libtpu wants it: exit code and stderr."""
    command = [sys.executable, "-m", "lowprec_attn", "compile", *words]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


def compiled(record, topology, code=0, **changes):
    """What `lowprec-attn compile` records of a small model."""
    flags = [f"--config.{name}={value}" for name, value in (SMALL | changes).items()]
    command = [f"--topology={topology}", "--config=gpt2_bf16:tiny", f"--record={record}", *flags]
    assert compile_alone(*command)[0] == code
    return json.loads(record.read_text().splitlines()[-1])


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    return tmp_path / "compile.jsonl"


# A program that no chip has room for, on the first device of each slice.
TOO_LARGE = """
import sys

import jax
from jax.sharding import SingleDeviceSharding

from lowprec_attn.training.tpu_slice import Slice

for name in sys.argv[1:]:
    sharding = SingleDeviceSharding(Slice.of(name).devices[0])
    x = jax.ShapeDtypeStruct((2**40,), "int8", sharding=sharding)
    try:
        jax.jit(lambda x: -x).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        print(str(error).splitlines()[0])
"""


class TestCompiler:
    pytestmark = needs_libtpu

    @pytest.mark.parametrize(
        ("topology", "devices"),
        [("v4:1x1x1", 1), ("v5e:1x1", 1), ("v5p:1x1x1", 1), ("v6e:1x1", 1), ("tpu7x:1x1x1", 2)],
    )
    def test_one_chip_of_every_generation(self, record, topology, devices):
        facts = compiled(record, topology)
        assert facts["fits"]
        assert facts["devices"] == devices
        assert "computed by `tpu`, exponents shift_first" in facts["attention"][0]
        assert facts["kernels"] == 3 * SMALL["model.layers"]
        assert ("all-reduce" in facts["collectives"]) == (devices > 1)

    def test_the_memory_of_every_generation_is_what_the_compiler_has(self):
        slices = [f"{name}:{'2x2' if name in ('v5e', 'v6e') else '2x2x1'}" for name in GENERATIONS]
        child = subprocess.run(
            [sys.executable, "-c", TOO_LARGE, *slices],
            cwd=ROOT,
            env=os.environ | COMPILER_HOST,
            capture_output=True,
            text=True,
            timeout=120,
        )
        available = re.findall(r"exceeds available HBM \((.*)G\)", child.stdout)
        assert len(available) == len(GENERATIONS), child.stderr
        for gib, (name, generation) in zip(available, GENERATIONS.items(), strict=True):
            # libtpu 0.0.42 and 0.0.48 differ by 0.01.
            assert float(gib) == pytest.approx(generation.hbm / 2**30, abs=0.015), name

    def test_a_slice_of_256_chips_with_a_split_optimizer_state(self, record, capfd):
        changes = {"batch_size": 256, "accumulation_steps": 1, "shard_optimizer": True}
        facts = compiled(record, "v5e:16x16", **changes)
        assert facts["hosts"] == 64
        parameters = 4 * facts["parameters"]
        assert facts["bytes"]["arguments"] < 1.25 * parameters
        assert parameters <= facts["collectives"]["all-reduce"][1] < 1.01 * parameters
        assert 0.95 * parameters < facts["collectives"]["all-gather"][1] <= parameters
        printed = capfd.readouterr().out
        for word in ("256 x TPU v5 lite (64 hosts), 15.75 GiB", "all-gather", "fits (libtpu"):
            assert word in printed

    def test_what_does_not_fit_is_said_with_advice(self, record, capfd):
        """A vocabulary whose parameters and moments alone take more than a chip has."""
        changes = {"model.vocab_size": 12_000_000, "attention.implementation": "tpu"}
        facts = compiled(record, "v5e:2x2", code=1, **changes)
        assert not facts["fits"]
        printed = capfd.readouterr().out
        assert "does not fit" in printed
        assert "--config.shard_optimizer=True" in printed

    def test_a_batch_that_does_not_divide_and_a_slice_that_is_not_offered(self, record, capfd):
        for topology, said in (
            ("v5e:16x16", "does not divide over 256 devices"),
            ("v5e:3x5", "the TPU compiler does not know v5e:3x5"),
        ):
            code, err = compile_alone("--config=gpt2_bf16:tiny", f"--topology={topology}")
            assert code == 1
            assert said in err
