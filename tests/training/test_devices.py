"""Batches and a split optimizer state on several devices: what lies where."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.training.devices import mesh_over, run_devices
from lowprec_attn.training.step import make_steps, root_key

STEPS = 4


def batches(settings):
    rng = np.random.default_rng(1)
    parts = settings.accumulation_steps
    shape = (parts, settings.batch_size // parts, settings.model.context)
    for _ in range(STEPS):
        ids = rng.integers(0, settings.model.vocab_size, shape).astype(np.int32)
        yield {"inputs": ids, "targets": np.roll(ids, -1, axis=-1)}


def trained(shard_optimizer, remat):
    """The state after some steps on 8 devices, and their metrics."""
    settings = tiny_settings(
        devices=8,
        batch_size=16,
        accumulation_steps=2,
        shard_optimizer=shard_optimizer,
        model__remat=remat,
        attention__implementation="tiled",
        model__layers=1,
        model__width=64,
        model__vocab_size=320,
        model__context=64,
    )
    devices = run_devices(settings)
    steps = make_steps(settings, devices.attend_part, devices.over_devices)
    root = root_key(settings)
    placed = devices.shardings(jax.eval_shape(steps.init, root))
    state = jax.jit(steps.init, out_shardings=placed)(root)
    train = devices.jit(steps.train, out_shardings=(placed, devices.replicated))
    metrics = []
    for batch in batches(settings):
        state, m = train(state, *devices.put(batch), root)
        metrics.append(jax.device_get(m))
    return state, metrics


@pytest.fixture(scope="module")
def whole():
    return trained(shard_optimizer=False, remat=None)


@pytest.fixture(scope="module")
def split():
    return trained(shard_optimizer=True, remat="nothing_saveable")


def bytes_per_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_a_split_optimizer_state_takes_an_eighth_and_the_parameters_are_whole(whole, split):
    states = whole[0], split[0]
    full, part = (bytes_per_device(state.opt_state) for state in states)
    # All matrices are split; the scales of norms and the counters are not.
    assert full / 8 < part < full / 8 + 4096
    assert bytes_per_device(states[0].params) == bytes_per_device(states[1].params)


def test_a_split_optimizer_state_and_remat_change_no_step(whole, split):
    """Gradients are equal, but the norm that clips them is summed in another order."""
    for a, b in zip(whole[1], split[1], strict=True):
        np.testing.assert_allclose(b.loss, a.loss, rtol=1e-6)
        np.testing.assert_allclose(b.grad_norm, a.grad_norm, rtol=1e-6)
        assert b.applied
    # Adam divides by the root of the second moment, so an entry near zero may move by one step of
    # lr.
    a, b = (jax.device_get(state.params) for state in (whole[0], split[0]))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x)


@pytest.mark.parametrize("order", [("whole", "split"), ("split", "whole")])
def test_a_checkpoint_is_restored_into_the_other_placement(request, tmp_path, order):
    (source, _), (target, _) = (request.getfixturevalue(name) for name in order)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STEPS, source, {"next_index": STEPS})
        restored = checkpoints.restore(target)
    for x, saved, like in zip(*map(jax.tree.leaves, (restored.state, source, target)), strict=True):
        assert x.sharding == like.sharding
        np.testing.assert_array_equal(x, saved)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((64, 3), 8), ((3, 128, 5), 8), ((32, 64), 4), ((4, 12), 1), ((256,), 1), ((), 1)],
)
def test_arrays_that_do_not_divide_are_split_as_far_as_they_do(shape, parts):
    devices = run_devices(tiny_settings(devices=8, shard_optimizer=True))
    x = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)
    placed = jax.device_put(x, devices._split(x))
    assert placed.addressable_shards[0].data.size * parts == x.size
    np.testing.assert_array_equal(placed, x)


@pytest.mark.parametrize(("function", "deterministic"), [(None, True), ("jax.nn:cudnn", False)])
def test_another_librarys_attention_is_not_compiled_to_be_deterministic(function, deterministic):
    """Two of cuDNN's backward calls fail in one program that must be."""
    devices = run_devices(tiny_settings(attention__function=function))
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    options = devices._replace(mesh=gpu).compiler_options
    assert options.pop("xla_gpu_deterministic_ops", False) is deterministic
    assert options["xla_allow_excess_precision"] is False


def test_a_batch_is_split_within_each_micro_batch():
    settings = tiny_settings(devices=4, accumulation_steps=2)
    ids = np.arange(8 * 32, dtype=np.int32).reshape(2, 4, 32)
    inputs, targets = run_devices(settings).put({"inputs": ids, "targets": ids + 1})
    np.testing.assert_array_equal(inputs, ids)
    np.testing.assert_array_equal(targets, ids + 1)
    assert {shard.data.shape for shard in inputs.addressable_shards} == {(2, 1, 32)}


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a device, which need not exist, that a mesh and a run read."""

    platform: str
    id: int = 0
    process_index: int = 0


@pytest.mark.parametrize(
    ("platform", "implementation", "function", "packed"),
    [
        ("gpu", None, None, True),
        ("gpu", "gpu", None, True),
        ("gpu", "tiled", None, False),
        ("gpu", None, "jax.nn", False),
        ("tpu", None, None, False),
    ],
)
def test_query_key_and_value_are_packed_where_kernels_read_them_so(
    platform, implementation, function, packed
):
    settings = tiny_settings(attention__implementation=implementation, attention__function=function)
    devices = mesh_over([Device(platform)], settings)
    attends = devices.attend, devices.attend_part, devices.attend_whole
    assert [attend.packed for attend in attends] == [packed] * 3


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    ("platform", "has_kernel", "is_chosen_later"),
    [("cpu", False, False), ("tpu", True, False), ("gpu", True, True)],
)
def test_attention_is_traced_for_the_devices_of_the_run_alone(
    platform, has_kernel, is_chosen_later
):
    """Tracing the kernels of other platforms would take half of the tracing of a small step."""
    devices = mesh_over([Device(platform)], tiny_settings())
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)

    def attended(attend):
        return str(jax.make_jaxpr(lambda q: attend(q, q, q, tap=None, is_causal=True).o)(q))

    for attend in (devices.attend, devices.attend_part, devices.attend_whole):
        text = attended(attend)
        assert ("pallas_call" in text) == has_kernel
        assert ("platform_index" in text) == is_chosen_later  # a GPU may lack kernels
    by_any = attended(Attend(attention.dot_product_attention))
    assert "platform_index" in by_any and "pallas_call" in by_any
