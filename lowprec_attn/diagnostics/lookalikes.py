"""Faults that look like those of low-precision attention, and are others.

They show in the arrays of one layer themselves:

  non_finite_input   q, k, v or dO already holds NaN or inf: attention did not make it.
  non_finite_output  O holds NaN or inf while q, k and v do not.
  float16            an array, or a product q·k before it is scaled, comes within a factor of 2 of
                     65504, where float16 ends. bfloat16 and float32 go on to 3e38.
  lse                a row's lse is below −88: exp(−lse) leaves float32. cuDNN's backward pass gives
                     NaN there under a mask (pytorch/pytorch#196678, NVIDIA/cudnn-frontend#1072).
  zero_gradient      dO is zero everywhere: nothing can be said about the backward pass.
"""

from collections.abc import Mapping

import numpy as np

from lowprec_attn.diagnostics.verdict import Finding

FLOAT16_MAX = 65504.0
NEAR = 0.5  # of FLOAT16_MAX
LOWEST_LSE = -88.0  # −log of float32's largest number is −88.7


def lookalikes(arrays: Mapping[str, np.ndarray], largest_product: float = 0.0) -> list[Finding]:
    """What the arrays of one layer show by themselves, in the order of the module.

    Args:
      arrays: q, k, v, and where they are known do, o (of any float dtype) and lse (of any shape).
      largest_product: the largest |q·k| before scaling; 0 where it is not known.
    """
    bad = {name: int(np.sum(~_finite(array))) for name, array in arrays.items() if name != "lse"}
    into = [name for name, count in bad.items() if count and name != "o"]
    findings = []
    if into:
        findings.append(_non_finite_input(arrays, bad, into))
    elif bad.get("o"):
        ends = "; float16 ends at 65504" if _is_float16(arrays) else ""
        findings.append(
            Finding(
                "non_finite_output",
                f"{bad['o']} of {arrays['o'].size} entries of O are NaN or infinite, and none of "
                f"q, k and v: attention made them{ends}",
            )
        )
    if _is_float16(arrays):
        findings += _float16(arrays, largest_product)
    lse = arrays.get("lse")
    if lse is not None:
        findings += _lse(lse)
    do = arrays.get("do")
    if do is not None and not np.any(do):
        underflow = ", or of a loss too small for float16 (raise the loss scale)"
        reason = "of a layer whose output the loss does not use"
        findings.append(
            Finding(
                "zero_gradient",
                "every entry of dO is 0, so that nothing is said about the backward pass: it is "
                f"{reason}{underflow if do.dtype == np.float16 else ''}",
            )
        )
    return findings


def _non_finite_input(
    arrays: Mapping[str, np.ndarray], bad: Mapping[str, int], into: list[str]
) -> Finding:
    counts = ", ".join(f"{bad[name]} of {arrays[name].size} entries of {name}" for name in into)
    if into == ["do"]:
        source = "it comes from what follows this layer, or from the loss"
    else:
        source = "it comes from the weights, or from what precedes this layer"
    ends = "; float16 ends at 65504" if _is_float16(arrays) else ""
    return Finding(
        "non_finite_input",
        f"{counts} are NaN or infinite before attention computes anything: {source}{ends}; "
        "look at an earlier step, or at the layer where it begins",
    )


def _float16(arrays: Mapping[str, np.ndarray], largest_product: float) -> list[Finding]:
    sizes = {
        name: float(np.max(np.abs(array.astype(np.float32)), where=_finite(array), initial=0.0))
        for name, array in arrays.items()
        if name != "lse"
    }
    sizes["q·k before it is scaled"] = largest_product
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] < NEAR * FLOAT16_MAX:
        return []
    return [
        Finding(
            "float16",
            f"the arrays are float16, which ends at 65504, and {largest} reaches "
            f"{sizes[largest]:.0f}: overflow, not rounding; use bfloat16, or scale q down first",
        )
    ]


def _lse(lse: np.ndarray) -> list[Finding]:
    # −inf is the lse of a row that sees no key.
    values = lse.astype(np.float32)
    low = np.isfinite(values) & (values <= LOWEST_LSE)
    if not np.any(low):
        return []
    return [
        Finding(
            "lse",
            f"{int(np.sum(low))} of {lse.size} rows have an lse below −88 (lowest "
            f"{float(np.min(values[low])):.0f}), where exp(−lse) is infinite in float32: cuDNN's "
            "backward pass is known to give NaN there under a mask; try another kernel, or "
            "causality without a mask",
        )
    ]


def _is_float16(arrays: Mapping[str, np.ndarray]) -> bool:
    return arrays["q"].dtype == np.float16


def _finite(array: np.ndarray) -> np.ndarray:
    return np.isfinite(array.astype(np.float32))
