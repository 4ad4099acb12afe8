"""`assert_attention`, an assertion for a kernel's own tests."""

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

    The check takes ten seconds to a minute on a CPU; see `lowprec_attn.check`.

    Args:
      function: a JAX or PyTorch function of q, k and v, or a target's name, such as
        `jax.nn:cudnn`.
      dtype: the dtype of q, k, v and dO: `bfloat16`, `float16` or `float32`.
      arithmetic: the preset that must explain the results. The results may fit other presets
        equally well. None accepts any arithmetic.
      allow_risk: whether a kernel with the state `risk` passes.
      seed: the seed of the inputs.
      out: the folder for the smallest case of a bug and for a script that shows it.
      **options: how to call the function, as in `check.Options`: `causal=True`, `layout='BNTH'`, …

    Returns:
      The report.

    Raises:
      AssertionError: the function has a bug, has a risk that is not allowed, or computes another
        arithmetic. The message is the report in words.
      TargetError: the function cannot be called with these options.

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
