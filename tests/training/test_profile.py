import json

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_settings

from configs import gpt2_bf16
from lowprec_attn.files import DiskError
from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.training import profile
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import run_devices

# JAX 0.12's reader of traces registers a type without a module, of which Python 3.12 warns; as an
# error the warning ends the process, for no Python code is there to raise it.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type event_stats has no:DeprecationWarning")

GPT2 = train_settings(gpt2_bf16.get_config("full").to_dict()).model


def test_the_operations_of_a_step_are_six_per_weight_and_the_causal_attention():
    positions = 1024 * 768
    attention = 12 * 7 * 1024 * 768  # 2 products forward, 5 backward; half of T keys, 2 each
    expected = 65536 * (6 * (parameter_count(GPT2) - positions) + attention)
    assert profile.step_flops(GPT2, 65536) == expected
    assert 0.8e9 < profile.step_flops(GPT2, 1) < 0.82e9


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_TIMED_STEPS", 2)
        settings = tiny_settings(devices=1, steps=20)
        return profile.measure(settings, run_devices(settings))


def test_times_and_parts_of_a_step(measured):
    assert measured.tokens == 8 * 32
    assert measured.busy > 0
    assert 0 < measured.floor < measured.seconds
    assert sum(measured.operations.values()) == pytest.approx(measured.busy)
    parts = {part for part, _ in measured.operations}
    assert {"attention", "mlp", "norm", "loss", "embedding", "optimizer"} <= parts
    assert parts <= {*profile.PARTS, "other"}


def test_the_table_and_the_record_hold_the_same(measured):
    record = json.loads(json.dumps(measured.as_json()))
    assert record["tokens_per_second"] == pytest.approx(measured.tokens / measured.seconds)
    assert record["environment"]["versions"]["jax"] == jax.__version__
    assert f"{measured.tokens / measured.seconds:,.0f} tokens/s" in str(measured)
    for part, kind in measured.operations:
        assert any(line.split()[:2] == [part, kind] for line in str(measured).splitlines())


def test_operations_are_told_apart_by_their_compiled_names():
    def step(x, w):
        with jax.named_scope("mlp"):
            return jnp.sum(x @ w)

    x = jnp.ones((64, 64))
    text = jax.jit(jax.grad(step)).lower(x, x).compile().as_text()
    names = profile._operation_names(text)
    assert any("mlp" in source for source, _ in names.values())
    kinds = {
        ("custom-call.3", "__cublas$lt$matmul"): "product",
        ("gemm_fusion_dot.14", ""): "product",
        ("pallas_call.7", "__gpu$xla.gpu.triton"): "kernel",
        ("all-reduce.1", ""): "communication",
        ("input_reduce_fusion", ""): "reduction",
        ("loop_convert_fusion", ""): "elementwise",
    }
    for (name, target), kind in kinds.items():
        assert profile._kind(name, target) == kind


def test_a_place_that_cannot_be_written_is_told_before_profiling(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "measure", lambda settings: pytest.fail("it was profiled first"))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"cannot write .*: File exists; move away .*file,"):
        profile.profile(tiny_settings(), tmp_path / "file")
