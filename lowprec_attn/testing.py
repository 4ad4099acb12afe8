"""`assert_attention`, for the tests of a kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowprec_attn import check


def assert_attention(
    function: Callable[..., Any] | str,
    *,
    dtype: str = "bfloat16",
    arithmetic: str | None = None,
    allow_risk: bool = True,
    seed: int = 0,
    out: Path | None = None,
    **options: Any,
) -> check.Report:
    """Asserts that an attention function has no bug, forward and backward, on hard inputs.

    Takes ten seconds to a minute on a CPU; see `lowprec_attn.check`.

    Args:
      function: of q, k and v, of JAX or PyTorch, or the name of a target such as `jax.nn:cudnn`.
      dtype: of q, k, v and dO: `bfloat16`, `float16` or `float32`.
      arithmetic: the preset that must explain its results, or one that they cannot tell from it.
      allow_risk: whether a risk passes.
      seed: of the inputs.
      out: folder for the smallest case of a bug and a script that shows it.
      **options: how it is called, as in `check.Options`: `causal=True`, `layout='BNTH'`, …

    Returns:
      The report.

    Raises:
      AssertionError: a bug, or what is not allowed; the message is the report in words.
      TargetError: it cannot be called as the options say.

    Example:
      >>> import jax
      >>> report = assert_attention(jax.nn.dot_product_attention, framework="jax",
      ...     keywords={"causal": "is_causal", "scale": "scale", "mask": "mask"})
      >>> report.state
      'right'
    """
    of = check.Options(**options)
    target = (
        check.find(function, of) if isinstance(function, str) else check.of_function(function, of)
    )
    report = check.check(target, dtype, seed=seed, out=out)
    words = "\n" + "\n".join(check.lines(report))
    assert report.state != "bug", words
    assert allow_risk or report.state == "right", words
    if arithmetic is not None:
        found = report.arithmetic
        names = () if found is None else (found.name, *found.alike)
        assert arithmetic in names, f"\nexpected the arithmetic {arithmetic}{words}"
    return report
