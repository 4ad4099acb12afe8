"""Measures the signals of a user's arrays, and the share of an error that each cure leaves."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from lowprec_attn import diagnostics
from lowprec_attn.attention import tiled
from lowprec_attn.diagnose.array_file import Inputs
from lowprec_attn.diagnostics import verdict
from lowprec_attn.numerics import KvBlock, Numerics, RowMax, get_preset, get_row_max

USEFUL_CURE = 0.5  # a cure is recommended if it leaves at most this share of the mean error


class Arithmetic(NamedTuple):
    """One way to compute attention, and what the output calls it."""

    label: str
    numerics: Numerics
    row_max: RowMax


Measure = Callable[[Arithmetic], verdict.Signals]


def measure(
    inputs: Inputs, arithmetic: Arithmetic, *, scale: float | None, is_causal: bool
) -> verdict.Signals:
    """The signals of `diagnostics.attention_signals`, by name, one number per head."""
    numerics = arithmetic.numerics
    signals = jax.jit(
        functools.partial(
            diagnostics.attention_signals,
            numerics=numerics,
            row_max=arithmetic.row_max,
            scale=scale,
            is_causal=is_causal,
            rng_key=jax.random.key(0) if numerics.needs_bits else None,
        )
    )
    return jax.tree.map(np.asarray, signals(inputs.q, inputs.k, inputs.v, inputs.do))


def keys_per_step(arithmetic: Arithmetic) -> KvBlock:
    """Keys of an online-softmax step; those of `tiled` where the arithmetic names none."""
    return arithmetic.numerics.kv_block or tiled.DEFAULT_KV_BLOCK


def with_advice(
    finding: verdict.Finding, found: Arithmetic, error: float, measure: Measure
) -> verdict.Finding:
    """Adds to a finding the share of the mean δ error that each cure leaves, measured.

    Args:
      finding: of kind `delta`; its first head is looked at.
      found: the arithmetic it was found under.
      error: the mean error of δ of that head.
      measure: computes signals of the same arrays.
    """
    head = finding.heads[0]
    left = {
        cure.label: abs(float(measure(cure)["delta_error_mean"][head]) / error)
        for cure in _cures(found)
    }
    best, *others = sorted(left, key=left.__getitem__)
    rest = ", ".join(f"{label} {left[label]:.1%}" for label in others)
    if left[best] > USEFUL_CURE:
        advice = f"no cure tried halves the mean error ({best} leaves {left[best]:.1%}, {rest})"
    else:
        advice = f"try {best}, which leaves {left[best]:.1%} of the mean error ({rest})"
    return finding._replace(sentence=f"{finding.sentence}; {advice}")


def _cures(found: Arithmetic) -> list[Arithmetic]:
    """Arithmetic that is known to help: the one found, with one change each."""
    cures = [
        found._replace(label=f"numerics={name}", numerics=_like(found, name))
        for name in ("flash", "float32_output")
    ]
    dynamic_max = get_row_max("dynamic_max")
    cures.append(found._replace(label="row_max=dynamic_max", row_max=dynamic_max))
    return [cure for cure in cures if cure[1:] != found[1:]]


def _like(found: Arithmetic, name: str) -> Numerics:
    return get_preset(name).replace(kv_block=found.numerics.kv_block)
