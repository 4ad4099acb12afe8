"""q, k, v and dO of every attention layer of a PyTorch model, by Hugging Face's interface.

PyTorch is not imported: tensors and modules are used as they are handed over.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_attn.diagnostics.capture import Capture, CaptureError

# Options that change the softmax itself: without them the arrays would say something else.
_UNKNOWN = {"s_aux": "attention sinks", "softcap": "a soft cap of scores"}


class TorchCapture(Capture):
    """An attention function that keeps what it is given, for `transformers.AttentionInterface`.

    It changes no value. It is for one training step: it copies arrays to the host and waits. Of
    several steps the last is kept. So is one call of a module that is called several times in a
    step, the one whose dO came last, together with this dO.

    Attributes:
      layers: as those of `Capture`, numbered in the order in which modules are first called: q
        [B, T, N, H], k and v [B, S, K, H], and do [B, T, N, H] once the backward pass has run, in
        the dtype of the output; is_causal, scale and window (left, right); masked, whether there
        was a mask that is not kept; and ignored, the names of other arguments that are not kept
        (position_bias, dropout).

    Args:
      attention: a function of `AttentionInterface`, such as that of "sdpa": takes a module, query,
        key, value [B, N, T, H], a mask and options, and returns O [B, T, N, H] and weights.

    Raises:
      CaptureError: when called with attention sinks or a soft cap, which `diagnose` does not
        compute.

    Example:
      >>> taken = TorchCapture(AttentionInterface()["sdpa"])
      >>> AttentionInterface.register("capturing", taken)
      >>> AttentionMaskInterface.register("capturing", AttentionMaskInterface()["sdpa"])
      >>> model.set_attn_implementation("capturing")
    """

    def __init__(self, attention: Callable[..., tuple[Any, Any]]) -> None:
        super().__init__()
        self._attention = attention
        self._names: dict[Any, str] = {}  # by module

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[Any, Any]:
        """What `attention` returns."""
        _check(options)
        out, weights = self._attention(module, query, key, value, mask, **options)
        name = self._names.setdefault(module, f"layer_{len(self._names):02d}")
        # Autocast rounds q, k and v to the dtype of O within `attention`.
        arrays = {"q": query, "k": key, "v": value}
        values = {w: _array(x, out.dtype).swapaxes(1, 2) for w, x in arrays.items()}
        values |= _facts(module, query, mask, options)
        self.layers[name] = values

        def keep(do: Any) -> None:
            # With its own q, k and v: a checkpointed forward pass has run once more since.
            self.layers[name] = values | {"do": _array(do, do.dtype)}

        if out.requires_grad:
            out.register_hook(keep)
        return out, weights

    def save(self, path: str | Path) -> None:
        """As `Capture.save`.

        Raises:
          CaptureError: nothing was captured, or the suffix is not .npz.
          DiskError: it cannot be written.
        """
        if not self.layers:
            raise CaptureError(
                "nothing was captured: the model called no attention of this name; before the step "
                "call model.set_attn_implementation with the name that was registered"
            )
        super().save(path)


def _check(options: Mapping[str, Any]) -> None:
    for name, meaning in _UNKNOWN.items():
        if options.get(name) is not None:
            raise CaptureError(f"the model has {meaning} ({name}), which diagnose does not compute")


def _facts(module: Any, query: Any, mask: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a call says beside its arrays, by the names of `Capture.layers`."""
    is_causal, scale = options.get("is_causal"), options.get("scaling")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # as transformers itself does
    seen = options.get("sliding_window")
    given = {
        "position_bias": options.get("position_bias") is not None,
        "dropout": bool(options.get("dropout")),
    }
    facts: dict[str, Any] = {
        "is_causal": bool(is_causal),
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        # Beside a window there always is a mask, the window's own.
        "masked": mask is not None and not seen,
    }
    if seen:
        facts["window"] = np.array([seen - 1, 0 if is_causal else seen - 1])
    if any(given.values()):
        facts["ignored"] = np.array([name for name, is_given in given.items() if is_given])
    return facts


def _array(tensor: Any, dtype: Any) -> np.ndarray:
    """A tensor on the host, in a dtype of torch.

    NumPy reads no bfloat16 of torch's. float64, which it reads, holds every float dtype exactly.
    """
    values = tensor.detach().to(dtype).cpu().double().numpy()
    return values.astype(str(dtype).removeprefix("torch."))
