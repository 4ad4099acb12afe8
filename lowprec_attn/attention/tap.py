"""Where `diagnostics.capture` reads q, k, v, masks and dO of a call: an identity around O.

Outside of a capture nothing is added to a program.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.request import planes
from lowprec_attn.attention.dispatch import Call


class Place(NamedTuple):
    """A call of attention in a program, and what it knows of itself.

    Attributes:
      number: grows from call to call in the order in which they are traced.
      is_causal: row t sees the keys s <= t.
      scale: of the scores; None for one that is not known before the call is run.
      window, soft_cap: see `Spec`; None for none.
      ignored: names of arguments that hide keys or change scores, and are not recorded.
    """

    number: int
    is_causal: bool
    scale: float | None
    window: tuple[int, int] | None
    soft_cap: float | None
    ignored: tuple[str, ...]


# (place, arrays by name), called by the running program.
Receiver = Callable[[Place, dict[str, np.ndarray]], None]

# How many sequences of a batch are recorded (0: all), None outside of a capture. `jax.jit` keeps a
# program for each value, so that neither kind of program is taken for the other.
_sequences = jax.make_user_context(default_value=None)
_receivers: list[Receiver] = []  # at most one
_numbers = itertools.count()


@contextlib.contextmanager
def receiving(receiver: Receiver, sequences: int) -> Iterator[None]:
    """Hands the arrays of every backward pass of attention within the block to a function.

    Args:
      receiver: called from a thread of the runtime.
      sequences: how many of each batch; 0 for all.

    Raises:
      RuntimeError: another block is open.
    """
    if _receivers:
        raise RuntimeError("a capture is open already; captures cannot be nested")
    _receivers.append(receiver)
    try:
        with _sequences(sequences):
            yield
        jax.effects_barrier()  # what was dispatched in the block may still run
    finally:
        _receivers.clear()


def tapped(call: Call, out: Array) -> Array:
    """`out`; where a block of `receiving` is open, the backward pass through it is handed over."""
    if not is_open():
        return out
    spec, extras = call.parts[0].spec, call.extras
    kept = {
        "bias": extras.bias,
        "mask": extras.mask,
        "query_seq_lengths": extras.query_lengths,
        "key_value_seq_lengths": extras.key_lengths,
        "sinks": None if extras.sinks is None else extras.sinks[None],
    }
    not_kept = {
        "query_segment_ids": extras.query_segments,
        "scale": extras.scale,
        "query_offset": extras.query_offset,
    }
    q, k, v = planes(*call.arrays)
    arrays = {"q": q, "k": k, "v": v} | {n: x for n, x in kept.items() if x is not None}
    return handed_over(
        arrays,
        out,
        is_causal=spec.is_causal,
        scale=None if extras.scale is not None else spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        ignored=tuple(name for name, value in not_kept.items() if value is not None),
    )


def is_open() -> bool:
    """Whether a block of `receiving` is open where this is traced."""
    return _sequences.value is not None


def handed_over(arrays: dict[str, Array], out: Array, **facts: Any) -> Array:
    """`out`, whose backward pass hands over the arrays and dO.

    Args:
      arrays: by name, q, k and v [B, T, N, H] among them; sequences first, where an array has them,
        sinks [1, N].
      out: O [B, T, N, H].
      facts: the fields of `Place`, but its number.
    """
    assert _sequences.value is not None  # `is_open`
    return _tap(Place(next(_numbers), **facts), _sequences.value, arrays, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tap(
    place: Place, sequences: int, arrays: dict[str, Array], out: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """`out` itself."""
    return out


def _forward(
    place: Place, sequences: int, arrays: dict[str, Array], out: Array
) -> tuple[Array, dict[str, Array]]:
    return out, {name: x[: sequences or None] for name, x in arrays.items()}


def _backward(
    place: Place, sequences: int, kept: dict[str, Array], do: Array
) -> tuple[None, Array]:
    # One call with all of them: nothing else would say which dO belongs to which q. It runs where
    # the backward pass does, once, also under `jax.checkpoint`, which runs the forward pass twice.
    jax.debug.callback(functools.partial(_hand_over, place), kept | {"do": do[: sequences or None]})
    return None, do


_tap.defvjp(_forward, _backward)


def _hand_over(place: Place, arrays: dict[str, np.ndarray]) -> None:
    for receiver in _receivers:
        receiver(place, {name: np.asarray(x) for name, x in arrays.items()})
