"""Measures the signals of a layer and the share of an error that each cure leaves."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.arithmetic.request import Extras, Request, Spec, unsupported_row_sums
from lowprec_attn.attention import tiled
from lowprec_attn.diagnostics import verdict
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.signals import attention_signals
from lowprec_attn.numerics import KvBlock, Numerics, RowMax, StandardMax, get_preset, get_row_max

USEFUL_CURE = 0.5  # a cure is recommended if it leaves at most this share of the error
CURED = {"delta": "query_gradient_error_relative", "coherence": "delta_error_mean"}


# Jitted as a whole, so that all layers of a shape share one program, and so that the compiler drops
# the signals that are not asked for.
@functools.partial(
    jax.jit,
    static_argnames=(
        *("names", "numerics", "row_max", "scale", "is_causal", "local_window_size"),
        "logits_soft_cap",
    ),
)
def _signals(*arrays: Any, names: tuple[str, ...] | None, **options: Any) -> dict[str, Array]:
    signals = attention_signals(*arrays, **options)
    return {name: x for name, x in signals.items() if names is None or name in names}


class Arithmetic(NamedTuple):
    """One way to compute attention, and its name in the output.

    Attributes:
      label: its name in the output.
      numerics: the numerics of all heads, or groups of heads with their own numerics and row-max
        rules.
      row_max: the row-max rule of all heads; used where `numerics` is one `Numerics`.
    """

    label: str
    numerics: Numerics | tuple[HeadGroup, ...]
    row_max: RowMax = StandardMax()

    @property
    def needs_bits(self) -> bool:
        """Whether a point rounds stochastically."""
        if isinstance(self.numerics, Numerics):
            return self.numerics.needs_bits
        return any(group.numerics.needs_bits for group in self.numerics)


def measure(
    layer: Layer, arithmetic: Arithmetic, names: tuple[str, ...] | None = None
) -> verdict.Signals:
    """Returns the signals of `diagnostics.attention_signals` by name, one number per head.

    A dO that is zero everywhere is treated as a missing dO.

    Args:
      layer: the layer, with `is_causal` given.
      arithmetic: the arithmetic to measure under.
      names: the signals to return; None for all. A signal that the layer does not have is left out.
    """
    do = layer.do if layer.do is not None and np.any(layer.do) else None
    x = None if do is None else layer.x
    signals = _signals(
        layer.q,
        layer.k,
        layer.v,
        do,
        names=names,
        numerics=arithmetic.numerics,
        row_max=arithmetic.row_max,
        scale=layer.scale,
        is_causal=bool(layer.is_causal),
        local_window_size=layer.window,
        logits_soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        returned=layer.returned if arithmetic.numerics is layer.own else None,
        x=x,
        projection=None if x is None else layer.projection,
        rng_key=jax.random.key(0) if arithmetic.needs_bits else None,
    )
    return jax.tree.map(np.asarray, signals)


def refusal(layer: Layer, arithmetic: Arithmetic) -> str | None:
    """Names the option of an arithmetic that no attention has with a layer's soft cap or sinks.

    Returns:
      The option, or None where every option can be had.
    """
    numerics = arithmetic.numerics
    if not isinstance(numerics, Numerics) or (layer.soft_cap is None and layer.sinks is None):
        return None
    spec = Spec(
        numerics=numerics,
        row_max=arithmetic.row_max,
        scale=layer.factor,
        soft_cap=layer.soft_cap,
        window=layer.window,
    )
    extras = Extras(sinks=None if layer.sinks is None else jnp.asarray(layer.sinks))
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (layer.q, layer.k, layer.v))
    return unsupported_row_sums(Request.of(q, k, extras, spec, v))


def keys_per_step(arithmetic: Arithmetic) -> KvBlock:
    """Returns the keys per online-softmax step; the default of `tiled` where none are named."""
    numerics = arithmetic.numerics
    groups = [numerics] if isinstance(numerics, Numerics) else [g.numerics for g in numerics]
    return groups[0].kv_block or tiled.DEFAULT_KV_BLOCK


def advice(layer: Layer, finding: verdict.Finding, found: Arithmetic, error: float) -> str:
    """Measures the share of an error that each cure leaves, and words it.

    Args:
      layer: the layer in which it was found.
      finding: a finding of a kind in `CURED`; its first head is measured.
      found: the arithmetic under which it was found; its `numerics` is one `Numerics`.
      error: that head's signal `CURED[kind]`.
    """
    head, signal = finding.heads[0], CURED[finding.kind]
    left = {
        cure.label: abs(float(measure(layer, cure)[signal][head]) / error) for cure in _cures(found)
    }
    # A row-max rule comes last: it makes errors smaller, but prevented no explosion in the lab.
    best, *others = sorted(left, key=lambda label: (label.startswith("row_max="), left[label]))
    rest = ", ".join(f"{label} {left[label]:.1%}" for label in others)
    if left[best] > USEFUL_CURE:
        return f"no cure tried halves the error ({best} leaves {left[best]:.1%}, {rest})"
    mean = "mean " if finding.kind == "coherence" else ""
    return f"{best} would leave {left[best]:.1%} of the {mean}error (the others: {rest})"


def _cures(found: Arithmetic) -> list[Arithmetic]:
    """Returns arithmetics that are known to make the errors of δ smaller, each with one change."""
    numerics = found.numerics
    assert isinstance(numerics, Numerics)
    changed = {
        f"numerics={name}": get_preset(name).replace(kv_block=numerics.kv_block)
        for name in ("flash", "float32_output")
    }
    changed["delta=normalized"] = numerics.replace(delta="normalized")
    cures = [found._replace(label=label, numerics=one) for label, one in changed.items()]
    dynamic_max = get_row_max("dynamic_max")
    cures.append(found._replace(label="row_max=dynamic_max", row_max=dynamic_max))
    return [cure for cure in cures if cure[1:] != found[1:]]
