"""The identity around O through which `diagnostics.capture` reads q, k, v, masks and dO of a call.

Outside of a capture it adds nothing to a program.
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
    """A call of attention in a program, and its static arguments.

    Attributes:
      number: increases from call to call, in the order in which calls are traced.
      is_causal: whether row t sees only the keys s <= t.
      scale: factor of q kᵀ; None if it is not known before the call runs.
      window, soft_cap: see `Spec`; None if the call has none.
      ignored: names of given arguments that hide keys or change scores but are not recorded.
    """

    number: int
    is_causal: bool
    scale: float | None
    window: tuple[int, int] | None
    soft_cap: float | None
    ignored: tuple[str, ...]


# Called by the running program with the place and the arrays by name.
Receiver = Callable[[Place, dict[str, np.ndarray]], None]

# How many sequences of a batch are recorded (0: all), or None outside of a capture. `jax.jit` keeps
# one program per value, so it never reuses a program with a tap for a call without one.
_sequences = jax.make_user_context(default_value=None)
_receivers: list[Receiver] = []  # at most one
_numbers = itertools.count()


@contextlib.contextmanager
def receiving(receiver: Receiver, sequences: int) -> Iterator[None]:
    """Passes the arrays of every backward pass of attention within the block to `receiver`.

    Args:
      receiver: the function, which is called from a thread of the runtime.
      sequences: how many sequences of each batch are passed; 0 for all.

    Raises:
      RuntimeError: another block of `receiving` is open.
    """
    if _receivers:
        raise RuntimeError("a capture is open already; captures cannot be nested")
    _receivers.append(receiver)
    try:
        with _sequences(sequences):
            yield
        jax.effects_barrier()  # programs that the block dispatched may still be running
    finally:
        _receivers.clear()


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """A context in which no call is tapped, because its caller hands over the same attention."""
    with _sequences(None):
        yield


def tapped(call: Call, out: Array) -> Array:
    """Returns `out`, and taps its backward pass if a block of `receiving` is open."""
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
    """Returns `out`, whose backward pass passes the arrays and dO to the receiver.

    Args:
      arrays: q, k and v [B, T, N, H] and the optional arrays, by name. The batch is the first axis
        of every array that has one; sinks are [1, N].
      out: O [B, T, N, H].
      facts: the fields of `Place` except `number`.
    """
    assert _sequences.value is not None  # the caller has asked `is_open`
    return _tap(Place(next(_numbers), **facts), _sequences.value, arrays, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tap(
    place: Place, sequences: int, arrays: dict[str, Array], out: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
    """Returns `out` unchanged."""
    return out


def _forward(
    place: Place, sequences: int, arrays: dict[str, Array], out: Array
) -> tuple[Array, dict[str, Array]]:
    return out, {name: x[: sequences or None] for name, x in arrays.items()}


def _backward(
    place: Place, sequences: int, kept: dict[str, Array], do: Array
) -> tuple[None, Array]:
    # One callback takes all arrays, because nothing else would tell which dO belongs to which q. It
    # runs in the backward pass, so it runs once even under `jax.checkpoint`, which runs the forward
    # pass twice.
    jax.debug.callback(functools.partial(_hand_over, place), kept | {"do": do[: sequences or None]})
    return None, do


_tap.defvjp(_forward, _backward)


def _hand_over(place: Place, arrays: dict[str, np.ndarray]) -> None:
    for receiver in _receivers:
        receiver(place, {name: np.asarray(x) for name, x in arrays.items()})
