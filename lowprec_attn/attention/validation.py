"""Checks the arguments of an attention call, once and on entry; each error names the value."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from lowprec_attn.arithmetic.heads import HeadGroup, group_heads
from lowprec_attn.arithmetic.request import BackwardSums
from lowprec_attn.numerics import (
    DynamicMax,
    LazyMax,
    Numerics,
    RowMax,
    StandardMax,
    get_preset,
    get_row_max,
)

INPUT_DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITION = 2**29  # the largest position of row 0 among the keys


def batched(
    q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None
) -> tuple[tuple[Array, ...], bool]:
    """Returns q, k and v, or the packed array q, with a batch axis.

    The second result says whether the arrays came without a batch axis.

    Raises:
      ValueError: only one of k and v is missing, or both are missing and q is not packed.
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
    """Raises ValueError unless q, k and v are [B, T, N, H], [B, S, K, H] and [B, S, K, V].

    Their dtype must be one of `INPUT_DTYPES`.

    Warns if q looks as though its axes of length and heads are exchanged.

    Args:
      q, k, v: the arrays.
      names: the caller's names of the arrays, for the messages.
    """
    of_q, of_k, of_v = names
    for name, x in zip(names, (q, k, v), strict=True):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, length, heads, head size], got shape {x.shape}"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has an empty axis: shape {x.shape}")
        if not all(isinstance(size, int) for size in x.shape[2:]):
            raise ValueError(
                f"{name} has symbolic heads or a symbolic head size: shape {x.shape}; export with "
                "numbers there, once for each (batch and length may be symbolic)"
            )
        if x.dtype.name not in INPUT_DTYPES:
            raise ValueError(f"{name} must be one of {', '.join(INPUT_DTYPES)}, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{', '.join(names)} must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast "
            "them to one"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{of_k} and {of_v} must have the same batch, length and heads, got {k.shape} and "
            f"{v.shape}"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{of_q} and {of_k} differ in batch or head size: {q.shape} and {k.shape}")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"{q.shape[2]} query heads do not divide into groups for {k.shape[2]} key heads; "
            f"shapes {q.shape} and {k.shape} are read as [batch, length, heads, head size]"
        )
    # Some ordinary calls must not warn: a decoding step of one query, with as many keys as heads,
    # and calls with one key head, which serves any number of query heads.
    exchanged = q.shape[2] == k.shape[1] and q.shape[1] % k.shape[2] == 0 and k.shape[2] > 1
    if exchanged and q.shape[1] != q.shape[2]:
        warnings.warn(
            f"{of_q} of shape {q.shape} is read as {q.shape[1]} queries of {q.shape[2]} heads; "
            f"beside {of_k} of shape {k.shape} its axes may be [batch, heads, length, head size] "
            "instead",
            stacklevel=4,
        )


def unsharded(arrays: Sequence[Array], implementation: str | None) -> None:
    """Refuses arrays that are split over an explicit mesh axis; only `dense` can take them.

    Raises:
      ValueError: an array is split over an explicit mesh axis and the implementation is not
        `dense`.
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
    """Returns a mask or bias as an array of rank 4 that broadcasts to [B, N, T, S].

    Raises:
      ValueError: the dtype is wrong, or the shape does not broadcast.
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
    """Returns sequence lengths as int32 [B].

    Raises:
      ValueError: `given` is not an integer array of shape [B], or a length that is known now does
        not lie from 0 to `longest`.
    """
    if given is None:
        return None
    x = jnp.asarray(given)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{name} must hold one integer per batch element, shape ({batch},), "
            f"got {x.dtype}{x.shape}"
        )
    if _is_known(given):
        known = np.asarray(given)
        outside = known[(known < 0) | (known > longest)]
        if outside.size:
            raise ValueError(f"{name} must be from 0 to {longest}, got {outside[0]}")
    return x.astype(jnp.int32)


def _is_known(given: object) -> bool:
    """Whether this process knows the values: they are not traced, and lie on its own devices.

    A list may hold traced numbers.
    """
    return all(
        not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
        for x in jax.tree.leaves(given)
    )


def segments(
    query: ArrayLike | None, key: ArrayLike | None, rows: tuple[int, int], keys: tuple[int, int]
) -> tuple[Array | None, Array | None]:
    """Returns segment ids as int32 [B, T] and [B, S].

    If only the ids of the queries are given and T = S, they serve as the ids of the keys.

    Args:
      query, key: the ids as the caller gave them.
      rows, keys: the shapes (B, T) and (B, S).

    Raises:
      ValueError: the ids of one side are missing, or are not integers of the right shape.
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
            f"{missing} is missing beside {given}, with {rows[1]} queries and {keys[1]} keys; "
            "pass both"
        )
    ids = (
        _integers("query_segment_ids", query, rows),
        _integers("key_value_segment_ids", key, keys),
    )
    of_queries, of_keys = _renamed(*ids) if any(x.dtype.itemsize > 4 for x in ids) else ids
    # The cast of uint32 to int32 wraps, but keeps different ids different, if both sides wrap.
    if (of_queries.dtype == jnp.uint32) != (of_keys.dtype == jnp.uint32):
        return _without_equal(of_queries), _without_equal(of_keys)
    return jnp.asarray(of_queries).astype(jnp.int32), jnp.asarray(of_keys).astype(jnp.int32)


def _without_equal(ids: Array | np.ndarray) -> Array:
    """Returns ids as int32, for a comparison of uint32 with another dtype.

    Negative ids become −1, and ids that int32 lacks become −2: neither has an equal on the other
    side.
    """
    ids = jnp.asarray(ids)
    if ids.dtype == jnp.uint32:
        return jnp.where(ids < jnp.uint32(2**31), ids.astype(jnp.int32), jnp.int32(-2))
    return jnp.maximum(ids.astype(jnp.int32), jnp.int32(-1))


def ids_as_given(x: ArrayLike) -> Array | np.ndarray:
    """Returns ids as an array; those that are known and no JAX array as NumPy's, in 64 bits."""
    return np.asarray(x) if _is_known(x) and not isinstance(x, jax.Array) else jnp.asarray(x)


def _integers(name: str, x: ArrayLike, shape: tuple[int, int]) -> Array | np.ndarray:
    """Returns the ids, checked, in the dtype as given: `jnp.asarray` would cut 64 bits to 32."""
    ids = ids_as_given(x)
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers [batch, length] = {shape}, got {ids.dtype}{ids.shape}"
        )
    return ids


def _renamed(query: Array | np.ndarray, key: Array | np.ndarray) -> tuple[Any, Any]:
    """Replaces 64-bit segment ids by their ranks, which are less than T + S; equal ids stay equal.

    Ids that must be 32-bit, because JAX holds no 64-bit integers, are returned as they are.

    Raises:
      ValueError: one side has signed and the other unsigned ids; or JAX holds no 64-bit integers,
        the ids are not NumPy arrays on both sides, and one of them exceeds 32 bits.
    """
    kinds = {x.dtype.kind for x in (query, key)}
    if len(kinds) > 1:
        raise ValueError(
            f"segment ids must be both signed or both unsigned, got {query.dtype} and {key.dtype}"
        )
    split = query.shape[1]
    if isinstance(query, np.ndarray) and isinstance(key, np.ndarray):
        both = np.concatenate([query, key], axis=1)
        ranks = np.unique(both, return_inverse=True)[1].reshape(both.shape)
        return ranks[:, :split], ranks[:, split:]
    if jax.dtypes.canonicalize_dtype(np.int64).itemsize < 8:  # JAX arrays hold at most 32 bits
        for x in (x for x in (query, key) if isinstance(x, np.ndarray)):
            limits = np.iinfo(np.int32 if "i" in kinds else np.uint32)
            outside = x[(x < limits.min) | (x > limits.max)]
            if outside.size:
                raise ValueError(f"segment id {outside[0]} needs 64 bits; set jax_enable_x64")
        return query, key
    wide = jnp.int64 if "i" in kinds else jnp.uint64
    query, key = (jnp.asarray(x).astype(wide) for x in (query, key))
    in_order = jnp.sort(jnp.concatenate([query, key], axis=1), axis=1)
    rank = jax.vmap(jnp.searchsorted)
    return rank(in_order, query), rank(in_order, key)


def scale(value: object, head_size: int) -> float:
    """Returns the factor of q kᵀ, by default 1/√H.

    Raises:
      ValueError: `value` is not one real number, or float32 cannot hold it.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"scale must be a Python number here, got the traced {value.aval}")
    if value is None:
        return head_size**-0.5
    return _real_number("scale", value)


def _real_number(name: str, value: object) -> float:
    """Returns `value` as a float, or raises ValueError.

    `value` must be one real number that is known now and that float32 can hold.
    """
    kinds = int | float | np.integer | np.floating | np.ndarray | jax.Array
    number = np.asarray(value if isinstance(value, kinds) else "none")
    real = any(jnp.issubdtype(number.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if isinstance(value, bool) or number.shape != () or not real:
        raise ValueError(f"{name} must be one real number, got {value!r}")
    exact = float(number)
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
    if not np.isfinite(rounded) or (exact != 0 and rounded == 0):
        raise ValueError(f"{name} must be a finite number that float32 can hold, got {value!r}")
    return exact


def backward_sums(value: BackwardSums | None, shape: tuple[int, ...]) -> BackwardSums | None:
    """Returns `backward_sums` as two float32 arrays [B, T, N], or None if it is not given.

    Args:
      value: as the caller gave it.
      shape: the shape that its arrays must have; it may lack the batch axis.

    Raises:
      ValueError: `value` is not a `BackwardSums` of float32 arrays of that shape.
    """
    if value is None:
        return None
    arrays = [jnp.asarray(x) for x in value] if isinstance(value, BackwardSums) else []
    if not arrays or any(x.shape != shape or x.dtype != jnp.float32 for x in arrays):
        told = ", ".join(f"{x.dtype}{x.shape}" for x in arrays) or type(value).__name__
        raise ValueError(
            f"backward_sums must be BackwardSums of float32{shape}, as BackwardSums.zeros(query) "
            f"gives them, got {told}"
        )
    return BackwardSums(*(x if x.ndim == 3 else x[None] for x in arrays))


def sinks(value: ArrayLike | None, heads: int) -> Array | None:
    """Returns the sinks [N], one float per query head, or None if they are not given.

    Raises:
      ValueError: `value` is not a float array of that shape, or a sink that is known now is NaN or
        +inf.
    """
    if value is None:
        return None
    x = jnp.asarray(value)
    if x.shape != (heads,) or x.dtype.name not in INPUT_DTYPES:
        raise ValueError(
            f"sinks must be {heads} numbers (one per query head) of {', '.join(INPUT_DTYPES)}, "
            f"got {x.dtype}{x.shape}"
        )
    if _is_known(value):
        known = np.asarray(value).astype(np.float64)
        wrong = known[np.isnan(known) | (known == np.inf)]
        if wrong.size:
            raise ValueError(f"sinks must be finite, or -inf for no sink, got {wrong[0]}")
    return x


# XLA takes subnormal numbers for 0, so below this small scores would be lost.
_LEAST_FACTOR = float(np.finfo(np.float32).tiny / np.finfo(np.float32).eps)


def soft_cap(value: object, scale: float) -> float | None:
    """Returns the cap c of c · tanh(scale · q kᵀ / c), or None if it is not given.

    Args:
      value: the cap as the caller gave it.
      scale: the factor of q kᵀ, or 1 if that is traced.

    Raises:
      ValueError: the cap is traced, is not one positive number, or float32 cannot hold c or
        scale / c, nor a product of q kᵀ as small as the spacing at 1 times scale / c.
    """
    if value is None:
        return None
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"logits_soft_cap must be a Python number or None, got the traced {value.aval}"
        )
    cap = _real_number("logits_soft_cap", value)
    if cap <= 0:
        raise ValueError(
            f"logits_soft_cap must be greater than 0, or None for no cap, got {value!r}"
        )
    with np.errstate(over="ignore"):
        factor = np.float32(scale / cap)
    if not np.isfinite(factor) or (scale != 0 and abs(factor) < _LEAST_FACTOR):
        raise ValueError(
            f"scale / logits_soft_cap, the factor of q kᵀ, must fit float32, got {value!r} "
            f"with scale={scale}; the least is {_LEAST_FACTOR:.1g}"
        )
    return cap


def traced_scale(value: object) -> Array | None:
    """Returns a traced scale as a float32 scalar; None if the scale is known now or not given.

    Raises:
      ValueError: the traced value is not one real number.
    """
    if not isinstance(value, jax.core.Tracer):
        return None
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape != () or not is_real:
        raise ValueError(f"scale must be one real number, got {value.dtype}{value.shape}")
    return value.astype(jnp.float32)


def causal(value: object) -> bool:
    """Returns `is_causal` as a bool; it must be static, because it decides what is compiled.

    Raises:
      ValueError: `value` is traced or is not a bool.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"is_causal must be a Python bool, got the traced {value.aval}; make it static, "
            "as in jax.jit(f, static_argnames='is_causal'), or pass a mask"
        )
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"is_causal must be True or False, got {value!r}")
    return bool(value)


def query_offset(
    value: Any, q: Array, k: Array, query_lengths: Array | None, key_lengths: Array | None
) -> Array | None:
    """Returns `query_offset` as int32 [B]; None for an offset of 0.

    Args:
      value: the offset as the caller gave it.
      q, k: the queries and keys, for their shapes.
      query_lengths, key_lengths: [B], the ends that `'end'` aligns; None for the length of q or k.

    Raises:
      ValueError: the offset is not `'end'`, an integer or integers of shape [B], or one that is
        known now is beyond ±`MAX_POSITION`.
    """
    batch, wrong = q.shape[0], "query_offset must be an integer, one per batch element or 'end'"
    if isinstance(value, str) and value == "end":
        if query_lengths is None and key_lengths is None:
            value = k.shape[1] - q.shape[1]
            if not isinstance(value, int):  # symbolic
                return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,))
        else:
            ends = (
                jnp.full((batch,), x.shape[1], jnp.int32) if lengths is None else lengths
                for x, lengths in ((k, key_lengths), (q, query_lengths))
            )
            return jnp.subtract(*ends)
    if _is_integer(value):
        _check_position(np.asarray(value))
        return jnp.full((batch,), value, jnp.int32) if value else None
    if not isinstance(value, jax.Array | np.ndarray | list | tuple):
        raise ValueError(f"{wrong}, got {value!r}")
    x = jnp.asarray(value)
    if x.shape not in ((), (batch,)) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{wrong}, got {x.dtype}{x.shape} for a batch of {batch}")
    if _is_known(value):
        _check_position(np.asarray(value))
    # The bounds must fit the dtype of x, because a bound beyond its range would wrap.
    held = np.iinfo(x.dtype)
    x = jnp.clip(x, max(-MAX_POSITION, held.min), min(MAX_POSITION, held.max))
    x = x.astype(jnp.int32)
    return jnp.broadcast_to(x, (batch,))


def _check_position(offsets: np.ndarray) -> None:
    outside = offsets[(offsets < -MAX_POSITION) | (offsets > MAX_POSITION)]
    if outside.size:
        raise ValueError(f"query_offset must be from -2^29 to 2^29, got {outside.flat[0]}")


def window(value: object, rows: int, keys: int, *, offset: bool = False) -> tuple[int, int] | None:
    """Returns `local_window_size` as (left, right), clipped to useful sizes; None for no window.

    Args:
      value: the window as the caller gave it.
      rows, keys: the lengths T and S, to which the sides are clipped.
      offset: whether rows are shifted among the keys; if so, the bound is 2 `MAX_POSITION`.

    Raises:
      ValueError: as `check_window` does.
    """
    sides = check_window(value)
    if sides is None:
        return None
    left, right = sides
    if offset or not isinstance(rows + keys, int):  # a position plus a side must fit int32
        rows = keys = 2 * MAX_POSITION
    return min(int(left), rows), min(int(right), keys)


def check_window(value: object) -> tuple[int, int] | None:
    """Returns `local_window_size` as (left, right); None for no window.

    Raises:
      ValueError: `value` is not one or two integers that are known now and at least 0.
    """
    if value is None:
        return None
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2 or not all(_is_integer(x) and x >= 0 for x in sides):
        raise ValueError(
            "local_window_size must be an int or (left, right), each 0 or more and not traced, "
            f"got {value!r}"
        )
    return sides


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def head_groups(
    numerics: Numerics | str | Sequence[Numerics | str] | Sequence[HeadGroup],
    row_max: RowMax | str | Sequence[RowMax | str],
    heads: int,
    kv_heads: int,
) -> tuple[HeadGroup, ...]:
    """Groups the query heads by their arithmetic; groups that are given stay as they are.

    Raises:
      ValueError: the number of entries is not the number of heads, an entry has the wrong type or
        an unknown name, or query heads of one key head differ; or groups are given that do not hold
        every head once, or together with a `row_max`.
    """
    groups = given_groups(numerics)
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


def check_bits(chosen: Sequence[Numerics], rng_key: object) -> None:
    """Raises ValueError if one of the numerics draws random bits and `rng_key` is None."""
    for numerics in chosen:
        if numerics.needs_bits and rng_key is None:
            raise ValueError(f"{numerics} draws random bits; pass rng_key=jax.random.key(...)")


def check_shift(numerics: Numerics, row_max: RowMax) -> None:
    """Raises ValueError if the rule's m may lie too far from the row maximum for these numerics.

    An m that is too high would take even the largest P̄ below the normal numbers of `probs`, and an
    m that is too low would let it overflow. `exponent='whole_max'` cannot use an m that lags behind
    the maximum at all.
    """
    if isinstance(row_max, LazyMax) and numerics.exponent == "whole_max":
        raise ValueError(
            "exponent='whole_max' raises its maximum with every step, which LazyMax does not; "
            "use row_max='standard'"
        )
    probs, scaling = numerics.probs, numerics.probs.scaling
    if scaling is not None and scaling.kind == "mx":
        return  # the scale follows P̄, whatever m is
    # The scaled number that stands for a P̄ of 1 when it is rounded.
    one = 1.0 if scaling is None else scaling.number or probs.format.max_finite
    if isinstance(row_max, DynamicMax):
        limit = math.log(one) - math.log(2) * probs.format.min_exponent
        if row_max.max_shift > limit:
            raise ValueError(
                f"max_shift={row_max.max_shift} of DynamicMax shifts P̄ below the normal numbers of "
                f"probs={probs}; use max_shift={math.floor(10 * limit) / 10} or less"
            )
    if isinstance(row_max, LazyMax):
        limit = math.log2(probs.format.max_finite / one)
        if row_max.threshold > limit:
            raise ValueError(
                f"threshold={row_max.threshold} of LazyMax lets P̄ exceed the largest number of "
                f"probs={probs}; use threshold={math.floor(10 * limit) / 10} or less"
            )


def given_groups(numerics: object) -> tuple[HeadGroup, ...]:
    """Returns `numerics` as a tuple if it is a sequence of `HeadGroup`, else an empty tuple."""
    entries = numerics if isinstance(numerics, Sequence) else ()
    groups = tuple(entry for entry in entries if isinstance(entry, HeadGroup))
    return groups if len(groups) == len(entries) else ()


def _spread(name: str, value: object, kind: type, named: Callable[[str], Any], heads: int) -> list:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != heads:
            raise ValueError(f"{name} has {len(value)} entries for {heads} query heads")
        return entries_of(name, value, kind, named)
    return entries_of(name, value, kind, named) * heads


def entries_of(name: str, value: object, kind: type, named: Callable[[str], Any]) -> list:
    """Returns the list of `Numerics` or row-max rules that a value or a sequence of values names.

    Args:
      name: the caller's name of the argument, for the message.
      value: one entry or a sequence; each entry is an object of `kind` or the name of one.
      kind: the class that entries must have.
      named: returns the object with a given name.

    Raises:
      ValueError: an entry is neither an object of `kind` nor the name of one.
    """
    entries = [value] if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    entries = [named(entry) if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        # The class of a rule, passed without parentheses, would satisfy the RowMax protocol.
        if isinstance(entry, type) or not isinstance(entry, kind):
            raise ValueError(
                f"{name} must be a lowprec_attn.numerics.{kind.__name__} or the name of one, "
                f"got {entry!r}"
            )
    return entries
