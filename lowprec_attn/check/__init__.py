"""Checks any attention function: is its gradient right, and which arithmetic does it compute?

This package is an entry point that takes functions of other libraries. It may import whatever
`diagnostics.examine` may. Its modules, in the order of the computation:

  inputs      arrays in float64: normal, clustered, and special kinds of rows
  problems    small, hard, named inputs. The core problems share one shape: normal and clustered
              keys with scores up to 1e4, rows on one key, saturated rows, ties, a sink, and scores
              near ± 1e3. Each feature problem adds one thing: odd lengths, grouped heads, a mask,
              another scale, a window, a soft cap, sinks, a bias or a gradient of lse
  target      a function, what it can do, and the settings that all its problems share
  targets     finds a target by name: `jax.nn`, `torch.sdpa`, `torch.flex`, `flash_attn`, this
              library, tokamax, splash (`libraries`) or MODULE:FUNCTION (`functions`). `calls` turns
              each into one call, which takes a problem and returns O, the gradients and lse, or
              into a script that makes this call without this package
  measure     the distance of results from float64 (`attention.reference`), row by row. The unit is
              the sum of the absolute values that make a row: a rounding errs by about 2⁻⁹ of it,
              a bug by about 1
  trials      the runs of a target on every problem that it can do
  candidates  the arithmetics, emulated by `tiled`: presets, tiles, exponents and one-point changes.
              The nearest one explains the results. Others may be equally near, up to what the
              order of sums changes; the results cannot tell these apart
  limits      the largest error that rounding explains, six times that of any plausible arithmetic
  dependences results that change with a second run, other sequences or later tokens
  cases       the bugs, each listed once. `bugs` names a bug after the wrong reference
              (`wrong_references`) that explains the results; `shrink` finds its smallest case
  training    what the arithmetic does to W_Q's gradient, and which cure mends it
  verdict     right, and which arithmetic; a risk where rows of dS do not sum to zero; or a bug
  text        the report as text, JSON or a web page
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
