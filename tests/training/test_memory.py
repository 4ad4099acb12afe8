"""Runs that cannot fit into memory are refused before anything compiles."""

import dataclasses
import os

import jax
import pytest
from tiny import tiny_config, tiny_settings

from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import make_program, run_devices
from lowprec_attn.training.resources import memory
from lowprec_attn.training.resources.memory import MemoryShortageError
from lowprec_attn.training.run import train


@pytest.fixture(scope="module")
def devices():
    return run_devices(tiny_settings())  # 8 devices


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"attention__implementation": "tiled"}, 20),
        # Only `dense` serves it, and most of its memory is scores.
        ({"attention__numerics": "standard", "model__context": 512}, 6),
    ],
)
def test_the_least_is_below_what_the_compiler_allots(devices, changes, factor):
    settings = tiny_settings(model__layers=1, **changes)
    program = make_program(settings, devices)
    arguments = (program.state, program.batch, program.batch, program.root)
    analysis = program.train.lower(*arguments).compile().memory_analysis()
    allotted = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    least = memory.least_bytes(settings, 8)
    assert allotted / factor < least < allotted


def test_the_state_is_counted_as_it_is():
    settings = tiny_settings(batch_size=8)
    without = dataclasses.replace(settings, batch_size=0)  # without any token
    state = make_program(settings, run_devices(settings)).state
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
    assert memory.least_bytes(without, 1) == pytest.approx(held + gradients, abs=16)
    split = dataclasses.replace(without, shard_optimizer=True)
    moments = held - gradients
    assert memory.least_bytes(split, 8) == pytest.approx(2 * gradients + moments / 8, abs=16)


def test_scores_are_counted_where_dense_forms_them():
    tiled, dense = (
        tiny_settings(attention__implementation=name, model__context=4096, batch_size=8)
        for name in ("tiled", "dense")
    )
    gradients = 4 * parameter_count(dense.model)
    scores = 8 * dense.model.heads * 4096**2 * 6
    more = memory.least_bytes(dense, 1) - memory.least_bytes(tiled, 1)
    assert more == scores - gradients > 0


TOO_LARGE = {
    "width": {"model__width": 2**20},
    "vocabulary": {"model__vocab_size": 2**24, "model__width": 2**14},
    "context": {"model__context": 2**24, "model__width": 2**14},
    "batch": {"batch_size": 2**30},
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_run_that_cannot_fit_leaves_one_line_and_no_directory(tmp_path, case):
    config = tiny_config(**TOO_LARGE[case])
    with pytest.raises(MemoryShortageError) as error:
        train(train_settings(config), config, tmp_path / "run")
    text = str(error.value)
    assert "\n" not in text
    assert "a training step takes at least" in text and "this machine has" in text
    assert not (tmp_path / "run").exists()


def test_devices_with_memory_of_their_own_are_asked(monkeypatch):
    settings, devices = tiny_settings(), run_devices(tiny_settings())
    needed = memory.least_bytes(settings, 8)

    class Device:
        process_index, device_kind = 0, "chip"

        def __init__(self, limit):
            self.memory_stats = lambda: {"bytes_limit": limit}

    def with_limit(limit):
        mesh = type("Mesh", (), {"devices": devices.mesh.devices.copy()})
        mesh.devices[:] = [Device(limit)] * 8
        return devices._replace(mesh=mesh)

    memory.require_memory(settings, with_limit(needed))
    with pytest.raises(MemoryShortageError, match="and a chip has"):
        memory.require_memory(settings, with_limit(needed - 1))


@pytest.mark.parametrize("limit", ["1000", "max", "9223372036854771712"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch, limit, version):
    installed = memory.host_bytes()
    paths = [tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"]
    assert [path.name for path in memory._CGROUP_LIMITS] == [path.name for path in paths]
    paths[2 - version].write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", paths)
    assert memory.host_bytes() == (1000 if limit == "1000" else installed)


def test_a_process_may_have_less_than_its_machine(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    page = os.sysconf("SC_PAGE_SIZE")
    limit = 1000 * page
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (limit, 2 * limit)}.get)
    mapped = tmp_path / "statm"
    monkeypatch.setattr(memory, "_MAPPED", mapped)
    assert memory.host_bytes() == limit  # as on systems other than Linux
    mapped.write_text("900 20 3 4 0 5 0\n")
    assert memory.host_bytes() == 100 * page
    mapped.write_text("1001 20 3 4 0 5 0\n")
    assert memory.host_bytes() == 0


def run_out(words):
    with memory.explained_shortage(run_devices(tiny_settings())):
        raise jax.errors.JaxRuntimeError(words)


def test_a_refusal_of_the_allocator_is_one_line():
    with pytest.raises(
        MemoryShortageError,
        match=r"^Out of memory .* 1,714.0 GB, and this machine has [\d.,]+ GB; choose a ",
    ):
        run_out("RESOURCE_EXHAUSTED: Out of memory allocating 1713966946296 bytes.\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run_out("INTERNAL: a fault of the program")
