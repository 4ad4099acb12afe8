"""The share of the peak of its devices that a run reached."""

from pathlib import Path

import pytest
from tiny import tiny_config, tiny_settings

from configs import gpt2_bf16
from lowprec_attn.gpt2.model import parameter_count
from lowprec_attn.runs.history import History
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.resources.efficiency import GENERATIONS, efficiency, step_flops

GPT2 = train_settings(gpt2_bf16.get_config("full").to_dict()).model


def test_the_operations_of_a_step_are_six_per_weight_and_the_causal_attention():
    positions = 1024 * 768
    attention = 12 * 7 * 1024 * 768  # 2 products forward, 5 backward; half of T keys, 2 flops each
    expected = 65536 * (6 * (parameter_count(GPT2) - positions) + attention)
    assert step_flops(GPT2, 65536) == expected
    assert 0.8e9 < step_flops(GPT2, 1) < 0.82e9


def history(*devices, **changes):
    starts = [{"device_kind": kind, "device_count": count} for kind, count in devices]
    return History(Path("run"), tiny_config(**changes), starts, {}, {}, {}, {}, {}, {})


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5 lite", GENERATIONS["v5e"].peak),
        ("TPU v6 lite", GENERATIONS["v6e"].peak),
    ],
)
@pytest.mark.parametrize(("devices", "used"), [(None, 4), (2, 2)])
def test_the_share_is_that_of_the_devices_that_are_used(kind, peak, devices, used):
    rate = used * 0.25 * peak / step_flops(tiny_settings().model, 1)
    said = efficiency(history((kind, 4), (kind, 4), devices=devices), rate)
    assert said.startswith("That is 25.0% of the peak (MFU): ")
    assert f"on {used} {kind} of " in said


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (history(("cpu", 1)), "device 'cpu' is not known"),
        (history(("NVIDIA H200", 1), ("NVIDIA H200", 2)), "the run ran on different devices"),
        (history(), "the run has no environment.json"),
        (history(("NVIDIA H200", 1), model__activation_dtype="float32"), "are float32"),
        (history(("NVIDIA H200", 1), model__layer_count=2), "not of this version"),
    ],
)
def test_without_a_share_it_says_why(run, why):
    assert why in efficiency(run, 1e5)
