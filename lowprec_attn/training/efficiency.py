"""What share of its devices' peak a run reached: model FLOP utilisation (MFU).

Peaks are those of dense matrix products of bfloat16 operands. NVIDIA's are in its data sheets "H100
Tensor Core GPU", "H200 Tensor Core GPU" and "A100 80GB". They are halved where a sheet counts
structured sparsity. Those of TPUs are in `training.tpu_slice`.
"""

from collections.abc import Mapping
from typing import Any

from lowprec_attn.gpt2.settings import ModelSettings
from lowprec_attn.runs.history import History
from lowprec_attn.training.profile import step_flops
from lowprec_attn.training.tpu_slice import GENERATIONS

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
"""Operations per second of one device, by what JAX calls its kind."""


def efficiency(history: History, tokens_per_second: float) -> str:
    """The share of its devices' peak that a run reached, in a sentence, or why it is not told."""
    devices = {_devices(start, history.config) for start in history.starts}
    if len(devices) != 1:
        why = "ran on different devices" if devices else "has no environment.json"
        return f"No share of the peak is given: the run {why}."
    ((kind, count),) = devices
    peak = PEAKS.get(kind)
    if peak is None:
        return f"No share of the peak is given: that of device {kind!r} is not known here."
    try:
        model = ModelSettings(**history.config["model"])
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
