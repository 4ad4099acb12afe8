"""Is my kernel's gradient right, and which arithmetic is it? Of any attention function.

A door of the library: it opens other people's functions, and may import what `diagnostics.examine`
may. The design, in the order of the computation:

  problems    hard inputs, small and by name. The core problems share one shape: normal and
              clustered keys with scores up to 1e4, rows of one key, saturated rows, ties, a sink,
              levels of ± 1e3. Each other problem asks for one more thing: odd lengths, groups of
              heads, masks, another scale.
  targets     `jax.nn`, `torch.sdpa`, this library, tokamax, splash, or MODULE:FUNCTION, as one
              call: a problem in, O, lse, dQ, dK, dV out
  measure     their distance from float64 (`attention.reference`), row by row, in units of the sum
              of absolute values that make a row: a rounding errs by some 2⁻⁹ of it, a bug by 1
  candidates  the arithmetics: presets, tiles, exponents, one-point changes, emulated by `tiled`.
              The nearest explains the results. What is as near, within what the order of sums
              explains, cannot be told from it.
  verdict     a bug errs by six times more than every plausible arithmetic; the nearest arithmetic;
              a risk where rows of dS do not sum to zero
  bugs        wrong references: the one that explains the results names the bug
  training    what the arithmetic does to W_Q's gradient, and which cure mends it
  shrink      the smallest case that still shows a bug
  text        words, JSON, a page
"""

from lowprec_attn.check.report import Bug, Report
from lowprec_attn.check.targets import Options, Target, TargetError, find, of_function
from lowprec_attn.check.text import as_json, lines, write
from lowprec_attn.check.verdict import check

__all__ = [
    "Bug",
    "Options",
    "Report",
    "Target",
    "TargetError",
    "as_json",
    "check",
    "find",
    "lines",
    "of_function",
    "write",
]
