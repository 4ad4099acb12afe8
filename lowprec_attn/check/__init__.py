"""Checks any attention function: is its gradient right, and which arithmetic does it compute?

A door of the library: it opens other people's functions, and may import what `diagnostics.examine`
may. The design, in the order of the computation:

  inputs      arrays in float64: normal and clustered, and kinds of rows
  problems    hard inputs, small and by name. The core problems share one shape: normal and
              clustered keys with scores up to 1e4, rows of one key, saturated rows, ties, a sink,
              levels of ± 1e3. Each other problem asks for one more thing: odd lengths, groups of
              heads, masks, another scale, a window, a soft cap, sinks, a bias, a gradient of lse
  target      a function, what it can do, and what every problem of it has
  targets     `jax.nn`, `torch.sdpa`, `torch.flex`, this library, tokamax, splash, or
              MODULE:FUNCTION (`libraries`, `functions`), as one call (`calls`): a problem in, O,
              its gradients and lse out; or a script that makes the call without this package
  measure     their distance from float64 (`attention.reference`), row by row, in units of the sum
              of absolute values that make a row: a rounding errs by some 2⁻⁹ of it, a bug by 1
  trials      a target's runs on every problem that it can do
  candidates  the arithmetics: presets, tiles, exponents, one-point changes, emulated by `tiled`.
              The nearest explains the results. What is as near, within what the order of sums
              explains, cannot be told from it.
  limits      a bug errs by six times more than every plausible arithmetic
  dependences results that change with a second run, other sequences or later tokens
  cases       the bugs, each once; `bugs` names it by the one of the `wrong_references` that
              explains the results, `shrink` finds the smallest case that still shows it
  training    what the arithmetic does to W_Q's gradient, and which cure mends it
  verdict     right, and which arithmetic; a risk where rows of dS do not sum to zero; or a bug
  text        words, JSON, a page
"""

from lowprec_attn.check.calls import TargetError
from lowprec_attn.check.functions import of_function
from lowprec_attn.check.report import Bug, Report
from lowprec_attn.check.target import Options, Setting, Target
from lowprec_attn.check.targets import find
from lowprec_attn.check.text import as_json, lines, write
from lowprec_attn.check.verdict import check

__all__ = [
    "Bug",
    "Options",
    "Report",
    "Setting",
    "Target",
    "TargetError",
    "as_json",
    "check",
    "find",
    "lines",
    "of_function",
    "write",
]
