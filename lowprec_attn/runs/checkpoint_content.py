"""The content of one checkpoint, a pytree of arrays and a JSON dict, as Orbax stores it."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

_METADATA_BYTES = 1 << 20  # what a checkpoint takes on the disk besides its arrays, at most
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # how TensorStore reports one


class MismatchError(Exception):
    """A checkpoint does not fit the target; the message names the first path that differs."""


def copy(state: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, as arrays that may be read while `state` is donated.

    In a run of one process they are on the host. Of several processes each has only a part of
    them, so they stay on the devices, and `begin` copies them.
    """
    if jax.process_count() > 1:
        return {path: _own(leaf) for path, leaf in _leaves_by_path(state).items()}
    # On a CPU, device_get returns views of the very buffers that the next step is given to reuse.
    return {path: np.array(leaf) for path, leaf in _leaves_by_path(jax.device_get(state)).items()}


def begin(
    content: Path,
    arrays: dict[str, Any],
    data_state: dict[str, Any],
    beside: dict[str, dict[str, Any]],
) -> Callable[[], None]:
    """Starts to write the directory `content`.

    When this returns, `arrays` are on the host. Each of several processes writes the shards of its
    own devices; all must call this at the same point of their main threads.

    Args:
      content: must not exist.
      arrays: what `copy` returns.
      data_state: JSON-able.
      beside: more such arrays, by a name of theirs.

    Returns:
      A function, for any thread, that returns when all processes are done.

    Raises:
      OSError: the disk has not enough room.
      Exception: whatever Orbax raises, here or from the function; see `reason`.
    """
    parts = {"state": arrays, **beside}
    _require_room(content, [array for part in parts.values() for array in part.values()])
    with _orbax_context():
        checkpointables = {**parts, "data": data_state}
        return ocp.save_checkpointables_async(content, checkpointables).result


def read(
    content: Path, target_state: Any, target_measured: Any = None
) -> tuple[Any, dict[str, Any], Any]:
    """Reads the state, as arrays of the target's shardings, the data state, and what was measured.

    The last is None where the target is, or where there is none in the checkpoint.

    Raises:
      MismatchError: an array differs from the target's in path, shape or dtype.
      Exception: whatever Orbax raises; see `reason`.
    """
    with _orbax_context():
        saved = ocp.checkpointables_metadata(content).metadata
        targets = {"state": target_state}
        if target_measured is not None and "measured" in saved:
            targets["measured"] = target_measured
        by_path = {name: _leaves_by_path(target) for name, target in targets.items()}
        for name, leaves in by_path.items():
            _require_shapes(saved[name], leaves)
        abstract: dict[str, Any] = {
            name: {path: _abstract(leaf) for path, leaf in leaves.items()}
            for name, leaves in by_path.items()
        }
        loaded = ocp.load_checkpointables(content, {**abstract, "data": None})
    trees = {
        name: jax.tree.unflatten(
            jax.tree.structure(targets[name]), [loaded[name][path] for path in leaves]
        )
        for name, leaves in by_path.items()
    }
    return trees["state"], loaded["data"], trees.get("measured")


def _require_shapes(saved: dict[str, Any], targets: dict[str, Any]) -> None:
    for path in {**targets, **saved}:
        theirs, ours = _shape(saved.get(path)), _shape(targets.get(path))
        if theirs != ours:
            raise MismatchError(f"{path} is {theirs} in the checkpoint and {ours} here")


def reason(error: BaseException) -> str:
    """The first cause of an error in one line; an error of the system in the system's words."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error) or type(error).__name__
    if code := _OS_ERROR_CODE.search(text):
        return os.strerror(int(code[1]))
    return text.splitlines()[0]


def _require_room(content: Path, arrays: list[Any]) -> None:
    """Raises OSError if the disk has too little room for the arrays."""
    # Asked first, because Orbax prints pages of tracebacks when the disk fills up.
    needed = sum(array.nbytes for array in arrays) + _METADATA_BYTES
    free = shutil.disk_usage(content.parent).free
    if free < needed:
        shortage = f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes needed, {free:,} free)"
        raise OSError(errno.ENOSPC, shortage)


def _own(array: jax.Array) -> jax.Array:
    """An array that may be read while `array` is donated."""
    # Orbax copies it to the host at once, but on a CPU that is a view of the same buffer.
    return jnp.copy(array) if jax.default_backend() == "cpu" else array


def _leaves_by_path(state: Any) -> dict[str, Any]:
    """The leaves of a pytree by paths such as `params/wte/embedding`, in tree order."""
    leaves = jax.tree.leaves_with_path(state)
    by_path = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
    }
    if len(by_path) != len(leaves):
        raise ValueError("two leaves of the state have the same path; rename one that holds a '/'")
    return by_path


def _shape(leaf: Any) -> str:
    """Type and shape of a leaf, such as `float32[3, 4]`, for comparison and messages."""
    if leaf is None:
        return "absent"
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _abstract(leaf: Any) -> Any:
    """A stand-in of a leaf: it tells Orbax which kind of array to load, and its sharding."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf)


def _orbax_context() -> ocp.Context:
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name="data")
    context.memory.deepcopy_host_arrays = False  # `copy` has made one
    # Weights shrink by 8 % for 7 times the writing time.
    context.array.saving.use_compression = False
    # In the background, an error there leaves threads that keep the process for ten minutes.
    context.asynchronous.create_directories_asynchronously = False
    return context
