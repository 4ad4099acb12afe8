"""Turns masks and lengths into what a `Layer` expresses: fewer rows and keys, causality, a window.

The signals take neither masks nor biases. A mask of padding, causality, a window or a combination
of these is equivalent to fewer rows and keys, `is_causal` and `window`. Any other mask is refused,
because scores of hidden pairs would be judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Bool

from lowprec_attn.counts import many
from lowprec_attn.diagnostics.layer import Layer

# Names of arrays in a file, in any case, as jax.nn, Flax, torch and transformers spell them.
VISIBLE = ("mask", "attention_mask", "attn_mask")
HIDDEN = ("key_padding_mask",)
BIASES = ("bias", "attn_bias", "attention_bias")
LENGTHS = {"query_seq_lengths": "rows", "key_value_seq_lengths": "keys"}
SERVED = (*VISIBLE, *HIDDEN, *BIASES, *LENGTHS)
# Names of arrays that change or hide scores in other ways.
REFUSED = {
    **dict.fromkeys(("position_bias", "rel_pos_bias", "alibi", "alibi_slopes"), "adds to scores"),
    **dict.fromkeys(("softmax_cap", "score_mod", "qv"), "changes scores"),
    **dict.fromkeys(("block_mask", "dropout_mask", "head_mask", "attention_chunk"), "hides scores"),
    **dict.fromkeys(
        ("segment_ids", "query_segment_ids", "key_segment_ids", "key_value_segment_ids"),
        "hides keys of other documents",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "seqused_q", "seqused_k"),
        "hides keys of other documents",
    ),
}
_LOWEST = -9e3  # a bias of this or less gives a key no weight; transformers once used −10000


class Cut(NamedTuple):
    """The part of a sequence that a mask leaves, and how it attends.

    Attributes:
      rows, keys: the ranges [first, end) of its rows and of its keys.
      is_causal: whether the causal mask applies; None where the mask does not say.
      window: as in `Layer`.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool | None
    window: tuple[int, int] | None


def applied(layer: Layer, arrays: Mapping[str, np.ndarray]) -> list[Layer]:
    """Cuts from a layer what its masks hide.

    Args:
      layer: a layer with arrays [B, T, N, H] and [B, S, K, H].
      arrays: its masks, biases and lengths by the names of `SERVED`.

    Returns:
      One layer for each group of sequences that are cut alike; its notes say what was cut.

    Raises:
      ValueError: an array has another shape or dtype, it hides or adds anything but padding,
        causality or a window, or a row is left without a key.
    """
    if not arrays:
        _require_keys(layer, ())
        return [layer]
    batch = layer.q.shape[0]
    cuts: dict[Cut, list[int]] = {}
    read = {n: array if n in LENGTHS else _visible(n, array) for n, array in arrays.items()}
    for b in range(batch):
        cut = _whole(layer)
        for name, array in read.items():
            cut = _met(name, cut, _cut(name, array, layer, b))
        cuts.setdefault(cut, []).append(b)
    layers = [_part(layer, cut, which, tuple(arrays)) for cut, which in cuts.items()]
    for one in layers:
        _require_keys(one, tuple(arrays))
    return layers


def _require_keys(layer: Layer, names: Sequence[str]) -> None:
    """Raises ValueError if the window, with what the arrays `names` hide, leaves a row no key."""
    rows, keys = layer.q.shape[1], layer.k.shape[1]
    if layer.window is None or rows <= keys + layer.window[0]:
        return
    beside = f" and {', '.join(names)}" if names else ""
    raise ValueError(
        f"window {layer.window}{beside}: the rows from {keys + layer.window[0]} on are left "
        f"without a key, since {many(rows, 'row')} meet {many(keys, 'key')}; hide these rows too "
        "(query_seq_lengths), or cut them off"
    )


def _whole(layer: Layer) -> Cut:
    return Cut((0, layer.q.shape[1]), (0, layer.k.shape[1]), None, None)


def _met(name: str, one: Cut, other: Cut) -> Cut:
    """Returns what both cuts leave of a sequence."""
    rows, keys = (
        (max(a[0], b[0]), min(a[1], b[1]))
        for a, b in ((one.rows, other.rows), (one.keys, other.keys))
    )
    if rows[0] >= rows[1] or keys[0] >= keys[1]:
        raise ValueError(f"{name} leaves a sequence without a row or a key; take it out")
    given = [c.is_causal for c in (one, other) if c.is_causal is not None]
    for one_of_both in (one, other):
        of_position = one_of_both.is_causal or one_of_both.window is not None
        if of_position and keys[0] - rows[0] != one_of_both.keys[0] - one_of_both.rows[0]:
            raise ValueError(f"{name} hides the first keys, and causality counts from them")
    windows = {c.window for c in (one, other) if c.window is not None}
    if len(windows) > 1:
        raise ValueError(f"{name} has another window than the rest of the file")
    return Cut(rows, keys, any(given) if given else None, next(iter(windows), None))


def _cut(name: str, array: np.ndarray, layer: Layer, b: int) -> Cut:
    """Returns what one array leaves of sequence b.

    The array holds lengths, or it is True where a key is seen.
    """
    (batch, rows, _, _), keys = layer.q.shape, layer.k.shape[1]
    whole = _whole(layer)
    if name in LENGTHS:
        if LENGTHS[name] == "rows":
            return whole._replace(rows=(0, _length(name, array, batch, rows, b)))
        return whole._replace(keys=(0, _length(name, array, batch, keys, b)))
    visible = array
    if visible.ndim == 4 and visible.shape[1:3] == (1, 1):  # a mask over keys alone, like [B, S]
        visible = visible[:, 0, 0]
    if visible.ndim <= 2 and visible.shape in ((batch, keys), (1, keys), (keys,)):
        if array.shape == (batch, keys) and batch == rows > 1 and name not in HIDDEN:
            raise ValueError(
                f"{name} of shape {array.shape} may be [B, S] or [T, S], which are alike here; "
                "give it as [B, 1, 1, S] or [1, 1, T, S]"
            )
        seen = np.broadcast_to(visible, (batch, keys))[b]
        of_keys = _range(name, seen)
        # In self-attention a position that is padding as a key is padding as a row too.
        return whole._replace(keys=of_keys, rows=of_keys if rows == keys else whole.rows)
    return _of_pairs(name, _pairs(name, visible, layer, b))


def _length(name: str, array: np.ndarray, batch: int, most: int, b: int) -> int:
    if array.dtype.kind not in "iu" or array.shape != (batch,):
        raise ValueError(
            f"{name} must be integers [{batch}], got {array.dtype} of shape {array.shape}"
        )
    length = int(array[b])
    if not 1 <= length <= most:
        raise ValueError(f"{name} must be from 1 to {most}, got {length}")
    return length


def _visible(name: str, array: np.ndarray) -> Bool[np.ndarray, "..."]:
    """Returns an array as flags that are True where a key is seen."""
    if array.dtype == np.dtype("V2"):  # how npz files hold bfloat16
        array = array.view(ml_dtypes.bfloat16)
    if array.dtype.kind not in "biuf" and array.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"{name} must be truth values or numbers, got {array.dtype}")
    values = array.astype(np.float32)
    hidden = values <= _LOWEST
    is_flags = array.dtype.kind == "b" or bool(np.all((values == 0) | (values == 1)))
    if is_flags and name not in BIASES:
        if array.dtype.kind not in "biu" and not np.any(values):
            raise ValueError(f"{name} is 0 everywhere, as floats: save truth values instead")
        return (values == 0) if name in HIDDEN else (values == 1)
    if np.all(hidden | (values == 0)) and array.dtype.kind != "b":
        return ~hidden
    raise ValueError(
        f"{name} adds to the scores; diagnose reads only a mask of 0, and {_LOWEST:g} or less: "
        "diagnose a layer without it"
    )


def _pairs(
    name: str, visible: Bool[np.ndarray, "..."], layer: Layer, b: int
) -> Bool[np.ndarray, "T S"]:
    """Returns which keys each row of sequence b sees; the mask must be the same in every head."""
    (batch, rows, heads, _), keys = layer.q.shape, layer.k.shape[1]
    given = visible
    if visible.ndim == 2:
        visible = visible[None, None]
    if visible.ndim == 3:
        if visible.shape[0] == batch == heads and not np.all(visible == visible[:1]):
            raise ValueError(
                f"{name} of shape {given.shape} may be [B, T, S] or [N, T, S], which are alike "
                "here; give it as [B, 1, T, S] or [1, N, T, S]"
            )
        visible = visible[:, None] if visible.shape[0] in (1, batch) else visible[None]
    try:
        of_all = np.broadcast_to(visible, (batch, visible.shape[1], rows, keys))
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"{name} of shape {given.shape} is neither [B, S] nor [B, N, T, S] with the axes of q "
            f"and k ({batch} sequences, {heads} heads, {rows} rows, {keys} keys), nor a part of it"
        ) from error
    of_one = of_all[b]
    if not np.all(of_one == of_one[:1]):
        raise ValueError(f"{name} differs from head to head; save one mask for all heads")
    return of_one[0]


def _of_pairs(name: str, seen: Bool[np.ndarray, "T S"]) -> Cut:
    rows, keys = seen.shape
    # A row of padding sees no key, the keys that other rows see, or all keys (because torch gives
    # NaN for a row without keys). So the keys that are not padding are the keys that some row sees,
    # the keys that the last row sees, or the keys seen by some row that does not see all keys.
    candidates = (seen.any(axis=0), seen[-1], seen[~seen.all(axis=1)].any(axis=0))
    for of_keys in candidates:
        if not of_keys.any():
            continue
        first, end = _ends(np.asarray(of_keys))
        of_rows = (first, end) if rows == keys else (0, rows)
        part = seen[slice(*of_rows), first:end]
        for is_causal, window in _patterns(part):
            if np.array_equal(part, _made(part.shape, is_causal, window)):
                return Cut(of_rows, (first, end), is_causal, window)
    raise ValueError(
        f"{name} hides more than padding, causality (row t sees the keys 0 to t) and a window: "
        "hidden pairs would be judged; cut the arrays to the pairs that are seen, or take another "
        "batch"
    )


def _patterns(part: Bool[np.ndarray, "T S"]) -> Iterator[tuple[bool, tuple[int, int] | None]]:
    yield False, None
    yield True, None
    row, key = np.nonzero(part)
    left, right = int(np.max(row - key, initial=0)), int(np.max(key - row, initial=0))
    yield right == 0, (left, right)


def _made(
    shape: tuple[int, ...], is_causal: bool, window: tuple[int, int] | None
) -> Bool[np.ndarray, "T S"]:
    row, key = np.ogrid[: shape[0], : shape[1]]
    seen = np.ones(shape, bool)
    if is_causal:
        seen &= key <= row
    if window is not None:
        seen &= (key >= row - window[0]) & (key <= row + window[1])
    return seen


def _range(name: str, seen: Bool[np.ndarray, " S"]) -> tuple[int, int]:
    if not seen.any():
        raise ValueError(
            f"{name} hides every key of a sequence; true, or 1, means that a key is seen"
        )
    first, end = _ends(seen)
    if not seen[first:end].all():
        raise ValueError(
            f"{name} hides keys between others, and only padding at the ends is read; take "
            "another batch"
        )
    return first, end


def _ends(seen: Bool[np.ndarray, " S"]) -> tuple[int, int]:
    places = np.flatnonzero(seen)
    return int(places[0]), int(places[-1]) + 1


def _part(layer: Layer, cut: Cut, which: Sequence[int], names: Sequence[str]) -> Layer:
    """Returns a layer of the sequences `which` alone, cut to the rows and keys of `cut`."""
    batch, rows = layer.q.shape[:2]
    of_rows, of_keys = slice(*cut.rows), slice(*cut.keys)
    chosen = np.array(which)
    whole = _whole(layer)
    is_cut = len(which) < batch or (cut.rows, cut.keys) != (whole.rows, whole.keys)
    if cut.is_causal is None and cut.rows[0] != cut.keys[0] and layer.is_causal is not False:
        raise ValueError(
            f"{', '.join(names)}: the first keys are hidden and causality counts from them; save "
            "is_causal=False as well, if every row sees every key"
        )
    window = layer.window if cut.window is None else cut.window
    if layer.window not in (None, window):
        raise ValueError(f"window {layer.window} and the mask's {window} are not the same")
    notes = [f"{', '.join(names)}: {_said(cut, which, batch, rows, layer.k.shape[1])}"]
    said = [value for value in (layer.is_causal, cut.is_causal) if value is not None]
    changed = layer._replace(is_causal=any(said) if said else None, window=window)
    if is_cut:
        made = {n: _rows_of(getattr(layer, n), layer, chosen, of_rows) for n in ("o", "lse")}
        lost = [n for n, array in made.items() if array is None and getattr(layer, n) is not None]
        if lost:
            notes.append(f"{', '.join(lost)}: not read, for it cannot be cut as q is")
        changed = changed._replace(
            q=layer.q[chosen, of_rows],
            k=layer.k[chosen, of_keys],
            v=layer.v[chosen, of_keys],
            do=None if layer.do is None else layer.do[chosen, of_rows],
            x=None if layer.x is None else layer.x[chosen, of_rows],
            o=made["o"],
            lse=made["lse"],
        )
    if len(which) < batch:
        listed = ", ".join(map(str, which))
        changed = changed._replace(name=f"{layer.name}[{listed}]")
    return changed._replace(notes=(*layer.notes, *notes))


def _said(cut: Cut, which: Sequence[int], batch: int, rows: int, keys: int) -> str:
    parts = []
    if len(which) < batch:
        parts.append(f"sequences {', '.join(map(str, which))}")
    if cut.rows != (0, rows):
        parts.append(f"rows {cut.rows[0]} to {cut.rows[1] - 1}")
    if cut.keys != (0, keys):
        parts.append(f"keys {cut.keys[0]} to {cut.keys[1] - 1}")
    if cut.is_causal is not None:
        parts.append("causal" if cut.is_causal else "all keys")
    if cut.window is not None:
        parts.append("window {} left, {} right".format(*cut.window))
    return f"read as {', '.join(parts) or 'hiding nothing'}"


def _rows_of(
    array: np.ndarray | None, layer: Layer, chosen: np.ndarray, of_rows: slice
) -> np.ndarray | None:
    """Cuts O or lse, with any order of axes, like q; None where its row axis is ambiguous."""
    if array is None:
        return None
    batch, rows, heads = layer.q.shape[:3]
    if rows == heads or array.ndim < 2 or array.shape[0] != batch:
        return None
    axes = [axis for axis in range(1, array.ndim) if array.shape[axis] == rows]
    if len(axes) != 1:
        return None
    return array[chosen].take(np.arange(of_rows.start, of_rows.stop), axis=axes[0])
