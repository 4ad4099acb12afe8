"""The share of its devices' peak that a run reached: model FLOP utilisation (MFU).

A peak is the rate of dense matrix products of bfloat16 operands. NVIDIA's peaks come from its data
sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU" and "A100 80GB". They are halved where a sheet
counts structured sparsity. TPU peaks come from Google's page on each generation.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lowprec_attn.runs.history import History
from lowprec_attn.training import models
from lowprec_attn.training.settings import Model, recorded_model

_GIB = 2**30


class Generation(NamedTuple):
    """One TPU generation; all figures are per device, as JAX counts devices.

    Attributes:
      hbm: bytes that the compiler may use, as libtpu 0.0.42 reports when a program needs more.
      peak: bfloat16 operations per second.
      options: options of `get_topology_desc`. They make the two cores of a v4 chip one device.
    """

    hbm: float
    peak: float
    options: tuple[tuple[str, Any], ...] = ()


GENERATIONS = {
    "v4": Generation(30.75 * _GIB, 275e12, (("chip_config_name", "megacore"),)),
    "v5e": Generation(15.75 * _GIB, 197e12),
    "v5p": Generation(95.74 * _GIB, 459e12),
    "v6e": Generation(31.25 * _GIB, 918e12),
    "tpu7x": Generation(94.75 * _GIB, 1153.5e12),  # a chip has two devices
}

_TPU = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_A100, _HOPPER_SXM, _HOPPER_NVL, _HOPPER_PCIE = 312e12, 1979e12 / 2, 1671e12 / 2, 1513e12 / 2

PEAKS: Mapping[str, float] = {
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H100 PCIe": _HOPPER_PCIE,
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    **{kind: GENERATIONS[name].peak for kind, name in _TPU.items()},
}
"""Operations per second of one device, by the `device_kind` that JAX reports."""


def step_flops(model: Model, tokens: int) -> float:
    """Returns the matrix-product operations of a forward and backward pass over `tokens` tokens.

    A token takes 6 operations per weight that enters a matrix product. The embedding counts if it
    is also the output layer. Attention has 4 products over the channels of q and k (S in both
    passes, dQ, dK) and 3 over the channels of v (O, dP, dV). Each takes T operations per token and
    channel, because the causal mask leaves half of the keys. Recomputation by `model.remat` does
    not count.
    """
    weights = models.of(model).product_weights(model)
    channels = model.heads * (4 * model.head_size + 3 * model.value_size)
    return tokens * (6.0 * weights + float(model.context * channels * model.layers))


def efficiency(history: History, tokens_per_second: float) -> str:
    """Returns a sentence with the share of the peak that a run reached, or why none is given."""
    devices = {_devices(start, history.config) for start in history.starts}
    if len(devices) != 1:
        why = "ran on different devices" if devices else "has no environment.json"
        return f"No share of the peak is given: the run {why}."
    ((kind, count),) = devices
    peak = PEAKS.get(kind)
    if peak is None:
        return f"No share of the peak is given: the peak of device {kind!r} is not known here."
    try:
        model = recorded_model(history.config["model"])
    except (KeyError, TypeError):
        return "No share of the peak is given: the config is not of this version."
    if model.activation_dtype != "bfloat16":
        return f"No share of the bfloat16 peak is given: activations are {model.activation_dtype}."
    share = step_flops(model, 1) * tokens_per_second / (count * peak)
    return (
        f"That is {share:.1%} of the peak (MFU): {step_flops(model, 1) / 1e6:,.0f} million "
        f"operations a token, attention counted as causal, on {count} {kind} of "
        f"{peak / 1e12:,.1f} T bfloat16 operations a second each."
    )


def _devices(start: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, int]:
    return str(start.get("device_kind")), int(config.get("devices") or start.get("device_count", 1))
