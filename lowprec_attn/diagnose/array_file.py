"""Reads q, k, v and optionally dO from a user's npz or safetensors file; never unpickles."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
from jaxtyping import Float

from lowprec_attn import installation
from lowprec_attn.attention import validation
from lowprec_attn.errors import UserError

Layout = Literal["BTNH", "BNTH"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

# Upper and lower case alike.
_NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "do": ("do", "dout"),
}


class DiagnoseError(UserError, ValueError):
    """Something about the request or the file is wrong; the message is one line for the user."""


class Inputs(NamedTuple):
    """One layer's arrays in one float dtype (dO in one of its own), all finite."""

    q: Float[np.ndarray, "B T N H"]
    k: Float[np.ndarray, "B S K H"]
    v: Float[np.ndarray, "B S K H"]
    do: Float[np.ndarray, "B T N H"] | None
    notes: tuple[str, ...]


def load(path: Path, layout: Layout = "BTNH") -> Inputs:
    """The arrays q (or query), k (key), v (value) and do (dout) of a file, case aside.

    Args:
      path: .npz, read without pickle, or .safetensors.
      layout: order of the axes in the file; the batch axis may be left out of all of them.

    Returns:
      The arrays as [B, T, N, H], and what was assumed or converted, as one-line notes.

    Raises:
      DiagnoseError: the file cannot be read, an array is missing, ambiguous, of another dtype,
        not finite, or the shapes do not fit.
    """
    found = _read(path)
    arrays = {name: _as_floats(name, array) for name, array in found.items()}
    notes = _conversions(found)
    ranks = {array.ndim for array in arrays.values()}
    if len(ranks) > 1 or not ranks <= {3, 4}:
        listed = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise DiagnoseError(
            f"{path}: arrays must all be {layout} or all {layout[1:]}, got shapes {listed}"
        )
    for name, array in arrays.items():
        array = array if array.ndim == 4 else array[None]
        arrays[name] = array.swapaxes(1, 2) if layout == "BNTH" else array
    _check_shapes(path, arrays)
    for name, array in arrays.items():
        _check_finite(path, name, array)
    _, length, heads, _ = arrays["q"].shape
    if heads > length and layout == "BTNH":
        notes.append(
            f"read as {length} rows of {heads} heads; if the heads come first, as in torch, "
            "use --layout BNTH"
        )
    return Inputs(arrays["q"], arrays["k"], arrays["v"], arrays.get("do"), tuple(notes))


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise DiagnoseError(f"{path}: no such file")
    if not path.is_file():
        raise DiagnoseError(f"{path}: not a file")
    if path.suffix == ".npz":
        return _read_npz(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    raise DiagnoseError(
        f"{path}: only .npz and .safetensors files are read; "
        "from torch: safetensors.torch.save_file({'q': q, 'k': k, 'v': v, 'do': do}, FILE)"
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DiagnoseError(f"{path}: holds a single array; save with numpy.savez")
            with file:
                return _pick(path, file.files, file.__getitem__)
    except DiagnoseError:
        raise
    # ValueError: pickled content, which stays unread. Damaged, encrypted and absurd files: whatever
    # zipfile, its decompressors and NumPy raise.
    except Exception as error:
        if "pickle" in str(error):
            raise DiagnoseError(
                f"{path}: holds pickled Python objects, which are never loaded; "
                "save plain float arrays with numpy.savez"
            ) from error
        raise DiagnoseError(f"{path}: not a readable npz file ({_one_line(error)})") from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        import safetensors
    except ImportError as error:
        raise DiagnoseError(
            f"{path}: reading safetensors needs its package: {installation.command('diagnose')}"
        ) from error
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return _pick(path, file.keys(), file.get_tensor)
    except DiagnoseError:
        raise
    # TypeError, AttributeError: a format that NumPy has no name for.
    except (safetensors.SafetensorError, OSError, TypeError, AttributeError) as error:
        raise DiagnoseError(
            f"{path}: not a readable safetensors file ({_one_line(error)})"
        ) from error


def _pick(
    path: Path, names: Iterable[str], read: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    names = sorted(names)
    result = {}
    for name, spellings in _NAMES.items():
        matches = [n for n in names if n.lower() in spellings]
        if len(matches) > 1:
            raise DiagnoseError(f"{path}: {' and '.join(matches)} both mean {name}; keep one")
        if matches:
            array = read(matches[0])
            if not isinstance(array, np.ndarray):  # of a zip archive that is no npz
                raise DiagnoseError(f"{path}: {matches[0]} is no array; save with numpy.savez")
            result[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        elif name != "do":
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise DiagnoseError(
                f"{path}: no array named {' or '.join(spellings)}; it holds {shown or 'nothing'}"
            )
    return result


def _as_floats(name: str, array: np.ndarray) -> np.ndarray:
    if _is_unnamed_bfloat16(array):
        return array.view(ml_dtypes.bfloat16)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.name not in validation.INPUT_DTYPES:
        raise DiagnoseError(
            f"{name} must be one of {', '.join(validation.INPUT_DTYPES)}, got {array.dtype}"
        )
    return array


def _conversions(found: dict[str, np.ndarray]) -> list[str]:
    raw = [name for name, array in found.items() if _is_unnamed_bfloat16(array)]
    double = [name for name, array in found.items() if array.dtype == np.float64]
    notes = []
    if raw:
        notes.append(
            f"{', '.join(raw)}: two-byte values without a type (|V2) read as bfloat16, "
            "which npz files have no name for"
        )
    if double:
        notes.append(f"{', '.join(double)}: float64 converted to float32")
    return notes


def _is_unnamed_bfloat16(array: np.ndarray) -> bool:
    return array.dtype == np.dtype("V2")


def _check_shapes(path: Path, arrays: dict[str, np.ndarray]) -> None:
    q, do = arrays["q"], arrays.get("do")
    try:
        validation.check_inputs(q, arrays["k"], arrays["v"])  # type: ignore[arg-type]
    except ValueError as error:
        raise DiagnoseError(f"{path}: {error}") from error
    if do is not None and do.shape != q.shape:
        raise DiagnoseError(f"{path}: do must have the shape of q, got {do.shape} and {q.shape}")


def _check_finite(path: Path, name: str, array: np.ndarray) -> None:
    bad = int(np.sum(~np.isfinite(array.astype(np.float32))))
    if bad:
        raise DiagnoseError(
            f"{path}: {bad} of {array.size} entries of {name} are NaN or infinite; "
            "save the arrays of an earlier step"
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
