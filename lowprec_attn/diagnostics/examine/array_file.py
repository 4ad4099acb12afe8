"""Reads the layers of a user's npz or safetensors file; never unpickles."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lowprec_attn import installation
from lowprec_attn.attention import validation
from lowprec_attn.diagnostics import masks
from lowprec_attn.diagnostics.examine import axes
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.errors import OneLineError, printable

# Names of arrays in a file, in any case.
_NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "do": ("do", "dout"),
    "o": ("o", "out"),
    "lse": ("lse", "logsumexp"),
    "x": ("x",),
    "w_q": ("w_q", "query_weight"),
}
_VARIANTS = {
    "soft_cap": ("logits_soft_cap", "softcap", "soft_cap", "attn_logits_soft_cap"),
    "sinks": ("sinks", "sink", "s_aux"),
}
_FACTS = ("is_causal", "scale", "window", "ignored", "layout")
# These stand beside q, k and v of a layer, or outside of all layers for all of them.
_HIDING = (*masks.SERVED, *masks.REFUSED)
_OF_ALL = (*_HIDING, *_VARIANTS)
_SPELLINGS = _NAMES | _VARIANTS | {name: (name,) for name in (*_FACTS, *_HIDING)}
_BEGINNINGS = (b"PK", np.lib.format.MAGIC_PREFIX[:2])  # of a zip archive, and of one array
_SHOWN = 8  # names that a message lists at most
_NEEDED = ("q", "k", "v")
_SAFETENSORS_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")


class DiagnoseError(OneLineError, ValueError):
    """The request or the file is wrong; the message is one line for the user."""


def load(path: Path, layout: str | None = None) -> list[Layer]:
    """Returns the layers of a file, in the order of their names.

    An array is named `layer_00/q`, or `q` alone where the file holds one layer; case is ignored.
    A layer must have q (or query), k (key) and v (value). It may also have

      do (dout), o (out) and lse (logsumexp);
      x, the input of W_Q [B, T, D], and w_q (query_weight), which is W_Q, [D, N, H] or [D, N·H];
      is_causal, scale, window (left, right), logits_soft_cap (softcap, soft_cap,
        attn_logits_soft_cap; 0 is none) and sinks (sink, s_aux) [N];
      ignored, the names of arguments that `diagnostics.capture` did not record;
      layout, the order of the axes, as below.

    A mask, an additive mask (attn_bias) or lengths are read where they amount to padding, causality
    or a window; see `masks`. Sequences of a batch that are padded differently become layers of
    their own. A mask, lengths, a cap or sinks outside of all layers apply to every layer.

    Args:
      path: an .npz file, which is read without pickle, or a .safetensors file.
      layout: order of the axes of q, k, v and do in the file, BTNH or BNTH, for all of them or for
        each (`q=BNTH,k=BNTH,v=BNTH,do=BTNH`); None for what the file says, else BTNH. All arrays of
        a layer may lack the batch axis. dO may be [B, T, N·H].

    Returns:
      Layers with arrays [B, T, N, H] (v and do may have another H), which may hold NaN and
      infinity. Their one-line notes say what was assumed or converted.

    Raises:
      DiagnoseError: the file cannot be read, an array is missing, ambiguous or of another dtype,
        or the shapes do not fit.
    """
    layers: list[Layer] = []
    for name, found in _read(path).items():
        try:
            layers += _layers(path, name, found, layout)
        except ValueError as error:
            where = f"{path}: {name}" if name else path
            raise DiagnoseError(f"{where}: {error}") from error
    return layers


class _Found(NamedTuple):
    """The arrays of a layer by the names of this module, and the names of arrays not read."""

    arrays: dict[str, np.ndarray]
    unread: list[str]


def _layers(path: Path, name: str, of_file: _Found, layout: str | None) -> list[Layer]:
    """Returns the layer of one name; several layers where its sequences are padded differently.

    Raises:
      ValueError: an array is of another dtype, shape or value; the message does not name the layer.
    """
    found = of_file.arrays
    hiding = {n: found.pop(n) for n in _HIDING if n in found}
    for refused in masks.REFUSED.keys() & hiding.keys():
        raise ValueError(
            f"{refused} {masks.REFUSED[refused]}, and is not read; without it the scores would "
            "differ: diagnose a layer or batch without it, or rename the array"
        )
    layer = _layer(path, name, found, layout)
    if of_file.unread:
        shown = ", ".join(map(printable, of_file.unread[:_SHOWN]))
        more = f" and {n} more" if (n := len(of_file.unread) - _SHOWN) > 0 else ""
        layer = layer._replace(notes=(*layer.notes, f"not read, of an unknown name: {shown}{more}"))
    return masks.applied(layer, hiding)


def _layer(path: Path, name: str, found: dict[str, np.ndarray], layout: str | None) -> Layer:
    facts = {f: found.pop(f) for f in (*_FACTS, "soft_cap") if f in found}
    _check_facts(facts)
    arrays = {which: _as_floats(which, array) for which, array in found.items()}
    w_q, sinks = (arrays.pop(n, None) for n in ("w_q", "sinks"))  # without rows or a batch axis
    declared = str(facts["layout"].item()) if "layout" in facts else "BTNH"
    orders = axes.parse(layout or declared)
    arrays, split = axes.rows_first(arrays, orders)
    _check_shapes(arrays, orders)
    # A file that declares its own layout needs no note of doubt.
    doubts = [] if layout is None and "layout" in facts else axes.doubts(arrays, orders)
    notes = [*_conversions(found), *split, *doubts, *_not_kept(facts)]
    heads, head_size = arrays["q"].shape[2:]
    validation.sinks(sinks, heads)
    scale = float(facts["scale"].item()) if "scale" in facts else None
    return Layer(
        str(path),
        printable(name),
        arrays["q"],
        arrays["k"],
        arrays["v"],
        do=arrays.get("do"),
        x=arrays.get("x"),
        w_q=None if w_q is None else _heads_apart(w_q, heads, head_size),
        o=arrays.get("o"),
        lse=arrays.get("lse"),
        is_causal=bool(facts["is_causal"].item()) if "is_causal" in facts else None,
        scale=scale,
        window=_window(facts["window"], arrays) if "window" in facts else None,
        soft_cap=_soft_cap(facts, head_size**-0.5 if scale is None else scale),
        sinks=sinks,
        notes=tuple(notes),
    )


def _check_facts(facts: dict[str, np.ndarray]) -> None:
    for fact in ("is_causal", "scale", "soft_cap"):
        if fact not in facts:
            continue
        value = facts[fact]
        if value.size != 1 or value.dtype.kind not in "biuf":
            raise ValueError(
                f"{fact} must be one number or truth value, got shape {value.shape} of "
                f"{value.dtype}"
            )
        if fact == "scale":
            check_scale(fact, float(value.item()))
        elif fact != "soft_cap" and value.item() not in (0, 1):
            raise ValueError(f"{fact} must be true or false, got {value.item()}")
    text = facts.get("layout")
    if text is not None and (text.size != 1 or text.dtype.kind != "U"):
        raise ValueError(
            f"layout must be one text such as BNTH, got shape {text.shape} of {text.dtype}"
        )


def check_scale(name: str, scale: float) -> None:
    """Raises DiagnoseError unless the scale is finite and not 0 in float32, nor subnormal."""
    with np.errstate(over="ignore"):
        rounded = np.float32(scale)  # scores are computed in float32
    if not np.isfinite(rounded):
        of_float32 = " in float32" if math.isfinite(scale) else ""
        raise DiagnoseError(f"{name} must be a finite number{of_float32}, got {scale}")
    if abs(rounded) < np.finfo(np.float32).tiny:  # XLA takes subnormal numbers for 0
        raise DiagnoseError(f"{name} must not be 0 in float32, where every score is 0, got {scale}")


def _soft_cap(facts: dict[str, np.ndarray], scale: float) -> float | None:
    """Returns the file's soft cap; None for 0, which means no cap in flash_attn."""
    value = float(facts["soft_cap"].item()) if "soft_cap" in facts else 0.0
    return validation.soft_cap(value, scale) if value else None


def _not_kept(facts: dict[str, np.ndarray]) -> Iterator[str]:
    """Yields a note on the arguments that the call had and the file does not hold."""
    if "ignored" in facts and facts["ignored"].size:
        yield (
            f"{', '.join(map(str, facts['ignored'].ravel()))} of the call was not kept: rows are "
            "judged as if there were none; pass --causal if the mask is causal"
        )


def _read(path: Path) -> dict[str, _Found]:
    if not path.exists():
        raise DiagnoseError(
            f"{path}: no such file; give q, k, v and do in an .npz, or a run's directory"
        )
    if not path.is_file():
        raise DiagnoseError(f"{path}: not a file; give an .npz or .safetensors file")
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path, lambda names, read: _pick(path, names, read))
    raise DiagnoseError(
        f"{path}: only .npz and .safetensors files are read; "
        "from torch: safetensors.torch.save_file({'q': q, 'k': k, 'v': v, 'do': do}, FILE)"
    )


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns every tensor of a safetensors file by its name.

    Raises:
      DiagnoseError: the file cannot be read, or the package safetensors is not installed.
    """
    return _open_safetensors(path, lambda names, read: {name: read(name) for name in names})


def _read_npz(path: Path) -> dict[str, _Found]:
    try:
        with path.open("rb") as stream:
            if stream.read(2) not in _BEGINNINGS:  # NumPy calls any other file a pickle
                raise DiagnoseError(
                    f"{path}: not a readable npz file (it is no zip archive); save q, k, v and do "
                    "with numpy.savez"
                )
            stream.seek(0)
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DiagnoseError(f"{path}: holds a single array; save with numpy.savez")
            with file:
                return _pick(path, file.files, file.__getitem__)
    except DiagnoseError:
        raise
    except PermissionError as error:  # saving the file again does not help
        raise DiagnoseError(f"{path}: {error.strerror}; make it readable") from error
    # NumPy raises ValueError for pickled content, which stays unread. For damaged, encrypted and
    # absurd files zipfile, its decompressors and NumPy raise exceptions of many types.
    except Exception as error:
        if "pickle" in str(error):
            raise DiagnoseError(
                f"{path}: holds pickled Python objects, which are never loaded; "
                "save plain float arrays with numpy.savez"
            ) from error
        raise DiagnoseError(
            f"{path}: not a readable npz file ({_one_line(error)}); save it again"
        ) from error


def _open_safetensors(
    path: Path, use: Callable[[Iterable[str], Callable[[str], Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Opens a file and returns `use(names, read)`, where `read` returns the array of a name."""
    what = f"{path}: reading safetensors needs its package"
    with installation.needing("diagnose", DiagnoseError, what):
        import safetensors
    try:
        with safetensors.safe_open(path, framework="np") as file:

            def read(name: str) -> Any:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _SAFETENSORS_DTYPES:
                    raise DiagnoseError(
                        f"{path}: {name} is {dtype}, which is not read; save it as bfloat16, times "
                        "the scale that belongs to it"
                    )
                return file.get_tensor(name)

            return use(file.keys(), read)
    except DiagnoseError:
        raise
    except PermissionError as error:
        raise DiagnoseError(f"{path}: Permission denied; make it readable") from error
    # TypeError and AttributeError come from a format that NumPy has no name for.
    except (safetensors.SafetensorError, OSError, TypeError, AttributeError) as error:
        raise DiagnoseError(
            f"{path}: not a readable safetensors file ({_one_line(error)}); save it again"
        ) from error


def _pick(path: Path, names: Iterable[str], read: Callable[[str], Any]) -> dict[str, _Found]:
    """Returns the arrays of each layer by its name, which is '' for an unnamed layer."""
    by_layer: dict[str, dict[str, list[str]]] = {}
    names = sorted(names)
    for name in names:
        layer, _, own = name.rpartition("/")
        spelled = (w for w, spellings in _SPELLINGS.items() if own.lower() in spellings)
        for which in spelled:
            by_layer.setdefault(layer, {}).setdefault(which, []).append(name)
    # A group with none of q, k and v, for example an x or a scale alone, is not a layer.
    layers = {n: found for n, found in by_layer.items() if not found.keys().isdisjoint(_NEEDED)}
    if not layers:
        layers = {"": {}}
    of_all = {n: found for n, found in by_layer.get("", {}).items() if n in _OF_ALL}
    layers = {name: of_all | found for name, found in layers.items()}
    used = {spelled for found in by_layer.values() for known in found.values() for spelled in known}
    # Names beside the arrays of a layer, and names outside of all layers (under '').
    unread = {n: [name for name in names if name.rpartition("/")[0] == n] for n in {"", *layers}}
    return {
        layer: _Found(
            _pick_layer(path, layer, found, names, read),
            [name for name in dict.fromkeys(unread[""] + unread[layer]) if name not in used],
        )
        for layer, found in layers.items()
    }


def _pick_layer(
    path: Path,
    layer: str,
    found: dict[str, list[str]],
    names: list[str],
    read: Callable[[str], Any],
) -> dict[str, np.ndarray]:
    result = {}
    for which, spellings in _SPELLINGS.items():
        matches = found.get(which, [])
        if len(matches) > 1:
            raise DiagnoseError(f"{path}: {' and '.join(matches)} both mean {which}; keep one")
        if matches:
            array = _read_one(path, matches[0], read)
            if not isinstance(array, np.ndarray):  # the zip archive is no npz
                raise DiagnoseError(f"{path}: {matches[0]} is no array; save with numpy.savez")
            result[which] = array.astype(array.dtype.newbyteorder("="), copy=False)
        elif which in _NEEDED:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            of_layer = f" of {layer}" if layer else ""
            raise DiagnoseError(
                f"{path}: no array named {' or '.join(spellings)}{of_layer}; it holds "
                f"{shown or 'nothing'}"
            )
    return result


def _read_one(path: Path, name: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(name)
    # The header of a damaged or made-up file may claim any shape.
    except (MemoryError, OverflowError) as error:
        raise DiagnoseError(
            f"{path}: {name} does not fit into memory ({_one_line(error)}); if its shape is right, "
            "save fewer layers or a part of the batch; if not, save the file again"
        ) from error


def _as_floats(name: str, array: np.ndarray) -> np.ndarray:
    if _is_unnamed_bfloat16(array):
        return array.view(ml_dtypes.bfloat16)
    if array.dtype == np.float64:
        return _as_float32(name, array)
    if array.dtype.name not in validation.INPUT_DTYPES:
        raise ValueError(
            f"{name} must be one of {', '.join(validation.INPUT_DTYPES)}, got {array.dtype}"
        )
    return array


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    """Converts float64; refuses what overflows, because it would look like their infinity."""
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
    overflows = np.isinf(converted) & np.isfinite(array)
    if overflows.any():
        at = np.unravel_index(np.argmax(overflows), array.shape)
        raise ValueError(
            f"{name} holds {array[at]:.3g} at {list(map(int, at))}, which float32 cannot "
            "hold; save the arrays as attention reads them, in float32 or below"
        )
    return converted


def _conversions(found: dict[str, np.ndarray]) -> Iterator[str]:
    raw = [name for name, array in found.items() if _is_unnamed_bfloat16(array)]
    double = [name for name, array in found.items() if array.dtype == np.float64]
    if raw:
        yield (
            f"{', '.join(raw)}: read as bfloat16; npz files have no name for it, so they hold "
            "two-byte values without a type (|V2)"
        )
    if double:
        yield f"{', '.join(double)}: float64 converted to float32"


def _is_unnamed_bfloat16(array: np.ndarray) -> bool:
    return array.dtype == np.dtype("V2")


def _window(fact: np.ndarray, arrays: dict[str, np.ndarray]) -> tuple[int, int]:
    if fact.shape != (2,) or fact.dtype.kind not in "iu" or np.any(fact < 0):
        raise ValueError(
            "window must be two integers, 0 or more: how many keys a row sees to the "
            f"left and to the right of its own; got {fact.tolist()}"
        )
    left, right = fact.tolist()
    rows, keys = arrays["q"].shape[1], arrays["k"].shape[1]
    if rows > keys + left:
        raise ValueError(
            f"window {fact.tolist()} leaves the rows from {keys + left} on without a key: "
            f"there are {rows} rows and {keys} keys"
        )
    return left, right


def _heads_apart(w_q: np.ndarray, heads: int, head_size: int) -> np.ndarray:
    """Returns W_Q as [D, N, H]."""
    if w_q.ndim == 2 and w_q.shape[1] == heads * head_size:
        w_q = w_q.reshape(-1, heads, head_size)
    if w_q.ndim != 3 or w_q.shape[1:] != (heads, head_size) or w_q.size == 0:
        raise ValueError(
            f"w_q must be [D, {heads}, {head_size}] or [D, {heads * head_size}] with the "
            f"heads of q, got {w_q.shape}; the weight of a PyTorch Linear is the transpose"
        )
    return w_q


def _check_shapes(arrays: dict[str, np.ndarray], orders: axes.Orders) -> None:
    q, do, x = arrays["q"], arrays.get("do"), arrays.get("x")
    validation.check_inputs(q, arrays["k"], arrays["v"])  # type: ignore[arg-type]
    of_o = (*q.shape[:3], arrays["v"].shape[-1])
    if do is not None and do.shape != of_o:
        like = "the shape of q" if of_o == q.shape else "the shape of q and the head size of v"
        raise ValueError(
            f"do must have {like}, got {do.shape} and {of_o}{axes.why_do_differs(of_o, do, orders)}"
        )
    if x is not None and (x.ndim != 3 or x.shape[:2] != q.shape[:2]):
        raise ValueError(
            f"x, the input of W_Q, must be [B, T, D] with the B and T of q, got "
            f"{x.shape} and {q.shape}"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
