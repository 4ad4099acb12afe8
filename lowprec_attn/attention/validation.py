"""Checks of one attention call, made once, at the border: each error names the value."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from lowprec_attn.arithmetic.heads import HeadGroup, group_heads
from lowprec_attn.numerics import (
    DynamicMax,
    Numerics,
    RowMax,
    StandardMax,
    get_preset,
    get_row_max,
)

INPUT_DTYPES = ("float32", "bfloat16", "float16")


def batched(
    q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None
) -> tuple[tuple[Array, ...], bool]:
    """q, k and v, or the packed array q, with a batch axis; and whether they came without one.

    Raises:
      ValueError: k or v alone is missing, or both are and q is not packed.
    """
    if (k is None) != (v is None):
        missing, given = ("key", "value") if k is None else ("value", "key")
        raise ValueError(f"{missing} is missing beside {given}; pass both, or neither")
    arrays = tuple(jnp.asarray(x) for x in (q, k, v) if x is not None)
    packed = len(arrays) == 1
    if packed and (arrays[0].ndim not in (4, 5) or arrays[0].shape[-3] != 3):
        raise ValueError(
            "without key and value, query must be [batch, length, 3, heads, head size], "
            f"got shape {arrays[0].shape}"
        )
    unbatched = all(x.ndim == (4 if packed else 3) for x in arrays)
    return tuple(x[None] for x in arrays) if unbatched else arrays, unbatched


def check_inputs(
    q: Array, k: Array, v: Array, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """Raises ValueError unless q is [B, T, N, H] and k, v are [B, S, K, H] of one float dtype.

    names: what the caller calls them.
    """
    of_q, of_k, of_v = names
    for name, x in zip(names, (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, length, heads, head size], got shape {x.shape}"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has an empty axis: shape {x.shape}")
        if x.dtype.name not in INPUT_DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(INPUT_DTYPES)}, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{', '.join(names)} must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.shape != v.shape:
        raise ValueError(f"{of_k} and {of_v} must have the same shape, got {k.shape} and {v.shape}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{of_q} and {of_k} differ in batch or head size: {q.shape} and {k.shape}")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"{q.shape[2]} query heads do not divide into groups for {k.shape[2]} key heads; "
            f"shapes {q.shape} and {k.shape} are read as [batch, length, heads, head size]"
        )


def unsharded(arrays: Sequence[Array], implementation: str | None) -> None:
    """Refuses arrays split over an explicit mesh axis, which no loop and no kernel here can take.

    Raises:
      ValueError: one is split so, and the implementation is not `dense`.
    """
    for x in arrays:
        split = [axis for axis in jax.typeof(x).sharding.spec if axis is not None]
        if split and implementation != "dense":
            raise ValueError(
                f"an array {x.dtype}{x.shape} is split over the explicit mesh axis {split[0]!r}; "
                "call attention.sharded(mesh, batch_axis=..., head_axis=...) instead, or pass "
                "implementation='dense'"
            )


def pairs(name: str, x: ArrayLike | None, q: Array, k: Array) -> Array | None:
    """A mask or bias as an array of rank 4 that broadcasts to [B, N, T, S].

    Raises:
      ValueError: wrong dtype, or a shape that does not broadcast.
    """
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"mask must be boolean (True: may attend), got {x.dtype}; add a float as bias"
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"bias must be a float array, got {x.dtype}")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if x.ndim != 4 or any(a not in (1, b) for a, b in zip(x.shape, full, strict=True)):
        raise ValueError(f"{name} of shape {x.shape} does not broadcast to [B, N, T, S] = {full}")
    return x


def lengths(name: str, given: ArrayLike | None, batch: int, longest: int) -> Array | None:
    """Sequence lengths as int32 [B].

    Raises:
      ValueError: not an integer array of shape [B], or, where values are known now, one is not
        from 0 to `longest`.
    """
    if given is None:
        return None
    x = jnp.asarray(given)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be {batch} integers (one per batch element), got {x.dtype}{x.shape}"
        )
    # Traced values are not known, and of an array over several hosts no process has all.
    if not isinstance(given, jax.core.Tracer) and getattr(given, "is_fully_addressable", True):
        known = np.asarray(given)
        outside = known[(known < 0) | (known > longest)]
        if outside.size:
            raise ValueError(f"{name} must be from 0 to {longest}, got {outside[0]}")
    return x.astype(jnp.int32)


def segments(
    query: ArrayLike | None, key: ArrayLike | None, rows: tuple[int, int], keys: tuple[int, int]
) -> tuple[Array | None, Array | None]:
    """Segment ids as int32 [B, T] and [B, S]; those of the queries serve as many keys too.

    Args:
      query, key: as the caller gave them.
      rows, keys: (B, T) and (B, S).

    Raises:
      ValueError: one is missing beside the other, or is not integers of its shape.
    """
    if query is None and key is None:
        return None, None
    if key is None and rows == keys:
        key = query
    if query is None or key is None:
        missing, given = (
            ("query_segment_ids", "key_value_segment_ids")
            if query is None
            else ("key_value_segment_ids", "query_segment_ids")
        )
        raise ValueError(
            f"{missing} is missing beside {given}, with {rows[1]} queries and {keys[1]} keys"
        )
    named = (("query_segment_ids", query, rows), ("key_value_segment_ids", key, keys))
    return tuple(_segments(*one) for one in named)  # type: ignore[return-value]  # two


def _segments(name: str, x: ArrayLike, shape: tuple[int, int]) -> Array:
    x = jnp.asarray(x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers [batch, length] = {shape}, got {x.dtype}{x.shape}"
        )
    return x.astype(jnp.int32)


def scale(value: float | None, head_size: int) -> float:
    """The factor of q kᵀ, 1/√H by default.

    Raises:
      ValueError: not a finite number.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"scale must be a Python number here, got the traced {value.aval}")
    if value is None:
        return head_size**-0.5
    if not math.isfinite(value):
        raise ValueError(f"scale must be a finite number, got {value!r}")
    return float(value)


def traced_scale(value: object) -> Array | None:
    """A scale that JAX traces, as float32 []; None where it is known now, or not given.

    Raises:
      ValueError: not one real number.
    """
    if not isinstance(value, jax.core.Tracer):
        return None
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape != () or not is_real:
        raise ValueError(f"scale must be one real number, got {value.dtype}{value.shape}")
    return value.astype(jnp.float32)


def causal(value: object) -> bool:
    """`is_causal`, which decides what is compiled.

    Raises:
      ValueError: it is traced, or no bool.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"is_causal must be a Python bool, got the traced {value.aval}; make it static, "
            "as in jax.jit(f, static_argnames='is_causal'), or pass a mask"
        )
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"is_causal must be True or False, got {value!r}")
    return bool(value)


def window(value: object, rows: int, keys: int) -> tuple[int, int] | None:
    """`local_window_size` as (left, right), no longer than the arrays reach; None for no window.

    Raises:
      ValueError: not one or two integers that are known now and not negative.
    """
    if value is None:
        return None
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2 or not all(isinstance(x, int | np.integer) and x >= 0 for x in sides):
        raise ValueError(
            "local_window_size must be an int or (left, right), each 0 or more and not traced, "
            f"got {value!r}"
        )
    left, right = sides
    return min(int(left), rows), min(int(right), keys)


def head_groups(
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup],
    row_max: RowMax | str | Sequence[RowMax | str],
    heads: int,
    kv_heads: int,
) -> tuple[HeadGroup, ...]:
    """The query heads by their arithmetic; groups that are given stay as they are.

    Raises:
      ValueError: not one entry per head, an entry of the wrong type, an unknown name, query heads
        of one key head that differ, or groups that do not hold every head once or come with a
        `row_max`.
    """
    groups = _given_groups(numerics)
    if groups:
        if row_max != StandardMax():
            raise ValueError(f"head groups have row-max rules; leave out row_max={row_max!r}")
        if sorted(head for group in groups for head in group.heads) != list(range(heads)):
            held = ", ".join(str(group.heads) for group in groups)
            raise ValueError(f"groups must hold each of {heads} query heads once, got {held}")
    else:
        spread = (
            _spread("numerics", numerics, Numerics, get_preset, heads),
            _spread("row_max", row_max, RowMax, get_row_max, heads),
        )
        groups = group_heads(zip(*spread, strict=True))
    place = {head: i for i, group in enumerate(groups) for head in group.heads}
    shared = heads // kv_heads
    for first in range(0, heads, shared):
        if len({place[head] for head in range(first, first + shared)}) > 1:
            raise ValueError(
                f"query heads {first} to {first + shared - 1} share a key head and must share "
                "numerics and row_max"
            )
    return groups


def check_shift(numerics: Numerics, row_max: RowMax) -> None:
    """Raises ValueError where the bounded shift would still round every P̄ of a row to zero."""
    limit = -math.log(2) * numerics.probs.format.min_exponent
    if isinstance(row_max, DynamicMax) and row_max.max_shift > limit:
        raise ValueError(
            f"max_shift={row_max.max_shift} of DynamicMax shifts P̄ below the normal numbers of "
            f"probs={numerics.probs}; use max_shift={math.floor(10 * limit) / 10} or less"
        )


def _given_groups(numerics: object) -> tuple[HeadGroup, ...]:
    """The groups, if it is groups that were given, else none."""
    entries = numerics if isinstance(numerics, Sequence) else ()
    groups = tuple(entry for entry in entries if isinstance(entry, HeadGroup))
    return groups if len(groups) == len(entries) else ()


def _spread(name: str, value: object, kind: type, named: Callable[[str], Any], heads: int) -> list:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != heads:
            raise ValueError(f"{name} has {len(value)} entries for {heads} query heads")
        entries = list(value)
    else:
        entries = [value] * heads
    entries = [named(entry) if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        # A rule's class, its parentheses forgotten, would satisfy the RowMax protocol.
        if isinstance(entry, type) or not isinstance(entry, kind):
            raise ValueError(
                f"{name} must be a lowprec_attn.numerics.{kind.__name__} or the name of one, "
                f"got {entry!r}"
            )
    return entries
