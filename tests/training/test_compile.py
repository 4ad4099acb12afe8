"""`lowprec-attn compile`: the memory and kernels that a step takes on a TPU.

The tests of the compiler need libtpu and are slow: `pytest -m tpu_compile`.
"""

import importlib.util
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
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.resources import fit
from lowprec_attn.training.resources.efficiency import GENERATIONS
from lowprec_attn.training.resources.fit import (
    SliceError,
    footprint,
    slice_devices,
)


def sizes(lines):
    """The sizes in GiB that the line `memory` lists, by name."""
    _, _, listed = dict(lines)["memory"].partition(": ")
    return {part.split()[0]: float(part.split()[1]) for part in listed.split(", ")}


def test_the_footprint_of_a_step_on_simulated_devices():
    model = {"model__layers": 1, "model__width": 512, "model__vocab_size": 50304}
    model |= {"model__context": 32, "attention__implementation": "tiled"}
    whole, split = (
        footprint(settings, run_devices(settings))
        for settings in (
            tiny_settings(devices=8, shard_optimizer=shard_optimizer, **model)
            for shard_optimizer in (False, True)
        )
    )
    parameters = 4 * parameter_count(tiny_settings(**model).model)
    gib = parameters / 2**30
    # Whole: parameters and two moments, besides counters and the batch. Split: an eighth of the
    # moments, and the new parameters are gathered.
    assert sizes(whole[1])["arguments"] == pytest.approx(3 * gib, abs=0.02)
    assert sizes(split[1])["arguments"] == pytest.approx(1.25 * gib, abs=0.02)
    assert sizes(whole[1])["results"] < 0.01  # the new state replaces the donated one
    assert dict(whole[1])["kernels"] == "0 calls"
    assert whole[0] > (sizes(whole[1])["arguments"] + gib) * 2**30


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "v5e:big", "v5e:16"])
def test_an_unknown_slice_is_refused_with_an_example(name):
    with pytest.raises(SliceError, match=f"unknown topology '{name}'.*v5e:16x16.*tpu7x"):
        slice_devices(name)


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
    ((topology, settings),) = asked
    assert (topology, settings.steps) == ("v5e:2x2", 3)


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


# The tests of the compiler.

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
    """Runs `lowprec-attn compile` in a process of its own, as libtpu requires."""
    command = [sys.executable, "-m", "lowprec_attn", "compile", "--config=gpt2_bf16:tiny", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def compiled(topology, code=0, **changes):
    """The output of `lowprec-attn compile` for a small model, by the first word of each line."""
    flags = [f"--config.{name}={value}" for name, value in (SMALL | changes).items()]
    done = compile_alone(f"--topology={topology}", *flags)
    assert done.returncode == code, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[0] != " ")


# A program too large for any chip, compiled for the first device of each slice.
TOO_LARGE = """
import sys

import jax
from jax.sharding import SingleDeviceSharding

from lowprec_attn.training.resources.fit import slice_devices

for name in sys.argv[1:]:
    sharding = SingleDeviceSharding(slice_devices(name)[0])
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
    def test_one_chip_of_every_generation(self, topology, devices):
        said = compiled(topology)
        assert said["slice"].startswith(f"{topology}: {devices} x ")
        assert said["verdict"].startswith("fits (libtpu ")
        assert "computed by `tpu`, exponents shift_first" in said["attention"]
        assert said["kernels"] == f"{3 * SMALL['model.layers']} calls"

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
            # libtpu 0.0.42 and 0.0.48 differ by 0.01 GiB.
            assert float(gib) == pytest.approx(generation.hbm / 2**30, abs=0.015), name

    def test_a_slice_of_256_chips_with_a_split_optimizer_state(self):
        said = compiled("v5e:16x16", batch_size=256, accumulation_steps=1, shard_optimizer=True)
        assert "256 x TPU v5 lite (64 hosts), 15.75 GiB" in said["slice"]

    def test_blocks_that_are_computed_again_take_less(self):
        said = [
            compiled("v5e:1x1", **{"model.layers": 4, "batch_size": 64, **changes})
            for changes in ({}, {"model.remat": "nothing_saveable"})
        ]
        assert said[1]["step"].endswith("; remat nothing_saveable")
        # One more kernel per layer: the forward pass of attention.
        assert [one["kernels"] for one in said] == ["12 calls", "16 calls"]
        needed = [float(one["memory"].split()[0]) for one in said]
        assert needed[1] < 0.8 * needed[0]

    def test_what_does_not_fit_is_said(self):
        """The parameters and moments of this vocabulary alone take more than a chip has."""
        changes = {"model.vocab_size": 12_000_000, "attention.implementation": "tpu"}
        flags = [f"--config.{name}={value}" for name, value in (SMALL | changes).items()]
        done = compile_alone("--topology=v5e:2x2", *flags)
        assert done.returncode == 1
        assert "does not fit" in done.stdout

    @pytest.mark.parametrize(
        ("topology", "words"),
        [
            ("v5e:16x16", "does not divide over 256 devices"),
            ("v5e:3x5", "the TPU compiler does not know v5e:3x5"),
        ],
    )
    def test_a_batch_that_does_not_divide_and_a_slice_that_is_not_offered(self, topology, words):
        done = compile_alone(f"--topology={topology}")
        assert done.returncode == 1
        assert words in done.stderr
