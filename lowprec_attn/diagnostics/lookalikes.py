"""Faults that look like failures of low-precision attention but have another cause.

The arrays of one layer show them without any measurement:

  non_finite_input   q, k, v, dO, the input of W_Q or W_Q itself already holds NaN or inf, so
                     attention did not produce it.
  non_finite_output  O or lse holds NaN or inf while q, k and v do not.
  float16            an array, or a product q·k before scaling, comes within a factor of 2 of 65504,
                     the largest float16 number. bfloat16 and float32 reach 3e38.
  lse                the lse of a row is −88 or less, so exp(−lse) overflows float32. cuDNN's
                     backward pass gives NaN there under a mask (pytorch/pytorch#196678,
                     NVIDIA/cudnn-frontend#1072).
  zero_gradient      dO is zero everywhere, so nothing can be said about the backward pass.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from lowprec_attn.counts import many
from lowprec_attn.diagnostics.verdict import Finding

FLOAT16_MAX = 65504.0
NEAR = 0.5  # the fraction of FLOAT16_MAX from which on a size is reported
_MADE_BY_ATTENTION = ("o", "lse")
LOWEST_LSE = -88.0  # −log of float32's largest number is −88.7


def lookalikes(arrays: Mapping[str, np.ndarray], largest_product: float = 0.0) -> Iterator[Finding]:
    """Yields what the arrays of one layer show by themselves, in the order of this module.

    Args:
      arrays: q, k and v, and where they are known do, x (the input of W_Q), w_q and o (all of any
        float dtype) and lse (of any shape).
      largest_product: the largest |q·k| before scaling; 0 where it is not known.
    """
    bad = {name: found for name, array in arrays.items() if (found := not_finite(name, array))}
    into = [name for name in bad if name not in _MADE_BY_ATTENTION]
    is_float16 = arrays["q"].dtype == np.float16
    ends = "; float16 ends at 65504" if is_float16 else ""
    if into:
        counts = ", and ".join(bad[name] for name in into)
        source = "the weights, or from what precedes this layer"
        if into == ["do"]:
            source = "what follows this layer, or from the loss"
        yield Finding(
            "non_finite_input",
            f"{counts} before attention computes anything: it comes from {source}{ends}; "
            "look at an earlier step, or at the layer where it begins",
        )
    if bad.keys().isdisjoint("qkv"):
        for name in (name for name in _MADE_BY_ATTENTION if name in bad):
            yield Finding(
                "non_finite_output",
                f"{bad[name]}, and none of q, k and v: attention made them{ends}",
            )
    if is_float16:
        yield from _float16(arrays, largest_product)
    if "lse" in arrays:
        yield from _lse(arrays["lse"])
    do = arrays.get("do")
    if do is not None and not np.any(do):
        underflow = ", or of a loss too small for float16 (raise the loss scale)"
        reason = "of a layer whose output the loss does not use"
        yield Finding(
            "zero_gradient",
            "every entry of dO is 0, so that nothing is said about the backward pass: it is "
            f"{reason}{underflow if do.dtype == np.float16 else ''}",
        )


def not_finite(name: str, array: np.ndarray) -> str:
    """Says how many entries of an array are NaN or infinite, and where the first is; '' for none.

    Args:
      name: name of the array. In `lse`, −inf is allowed: it marks a row that sees no key.
      array: an array of any float dtype.
    """
    bad = ~_finite(array)
    if name == "lse":
        bad &= ~np.isneginf(array.astype(np.float32))
    if not np.any(bad):
        return ""
    place = list(map(int, np.unravel_index(int(np.argmax(bad)), bad.shape)))
    shown = {"o": "O"}.get(name, name)
    where = f" (the first at {place})" if place else ""
    return f"{int(np.sum(bad))} of {array.size} entries of {shown} are NaN or infinite{where}"


def _float16(arrays: Mapping[str, np.ndarray], largest_product: float) -> Iterator[Finding]:
    sizes = {
        name: float(np.max(np.abs(array.astype(np.float32)), where=_finite(array), initial=0.0))
        for name, array in arrays.items()
        if name != "lse" and (name not in ("x", "w_q") or array.dtype == np.float16)
    }
    sizes["q·k before it is scaled"] = largest_product
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] >= NEAR * FLOAT16_MAX:
        yield Finding(
            "float16",
            f"the arrays are float16, which ends at 65504, and {largest} reaches "
            f"{sizes[largest]:.0f}: overflow, not rounding; use bfloat16, or scale q down first",
        )


def _lse(lse: np.ndarray) -> Iterator[Finding]:
    # A row that sees no key has an lse of −inf.
    values = lse.astype(np.float32)
    low = np.isfinite(values) & (values <= LOWEST_LSE)
    if np.any(low):
        yield Finding(
            "lse",
            f"{int(np.sum(low))} of {many(lse.size, 'row')} have an lse below −88 (lowest "
            f"{float(np.min(values[low])):.0f}), where exp(−lse) is infinite in float32: cuDNN's "
            "backward pass is known to give NaN there under a mask; try another kernel, or "
            "causality without a mask",
        )


def _finite(array: np.ndarray) -> np.ndarray:
    return np.isfinite(array.astype(np.float32))
