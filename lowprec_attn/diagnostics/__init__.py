"""Signals of low-precision attention: ties, signed errors, δ, weight norms.

Arrays in, numbers out; pure JAX and jit-able. `attention_signals` gives
everything for one layer; the rest are its parts, each with its definition. `capture` takes the
arrays of every layer from a backward pass of your own model, `captured` wraps a function of
attention that it would not see, and `watch` measures some steps of a run, and warns. In PyTorch
these are `lowprec_attn.torch.capture` and `.watch`. `trend_ratios` compares a number of every layer
with its past and with the other layers.
"""

from lowprec_attn.diagnostics.capture import Capture, CaptureError, capture
from lowprec_attn.diagnostics.comparison import Returned
from lowprec_attn.diagnostics.foreign import captured
from lowprec_attn.diagnostics.rows import (
    DOMINATED,
    dominated_rows,
    repeated_maxima,
    rounded_to_one,
    score_maximum,
)
from lowprec_attn.diagnostics.signals import attention_signals
from lowprec_attn.diagnostics.signed_errors import signed_error
from lowprec_attn.diagnostics.trend import TrendRatios, trend_ratios
from lowprec_attn.diagnostics.watch import Watch, WatchError, watch
from lowprec_attn.diagnostics.weights import (
    Projection,
    across_steps,
    query_weight_gradient,
    spectral_norm,
)

__all__ = [
    "DOMINATED",
    "Capture",
    "CaptureError",
    "Projection",
    "Returned",
    "TrendRatios",
    "Watch",
    "WatchError",
    "across_steps",
    "attention_signals",
    "capture",
    "captured",
    "dominated_rows",
    "query_weight_gradient",
    "repeated_maxima",
    "rounded_to_one",
    "score_maximum",
    "signed_error",
    "spectral_norm",
    "trend_ratios",
    "watch",
]
