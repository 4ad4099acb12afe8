"""Signals of low-precision attention: ties, signed errors, δ, weight norms.

The signals take arrays, return numbers, are pure JAX and run under jit. `attention_signals`
computes all of them for one layer; the functions beside it compute one each and define it.
`capture` records the arrays of every attention layer in a backward pass of your own model,
`captured` wraps an attention function that `capture` would not see, and `watch` measures some steps
of a run and warns. In PyTorch use `lowprec_attn.torch.capture` and `.watch`. `trend_ratios`
compares a number of every layer with its past and with the other layers.
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
