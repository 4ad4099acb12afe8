"""The content of one checkpoint, pytrees of arrays and a JSON dict, as Orbax stores it."""

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

_METADATA_BYTES = 1 << 20  # upper bound of a checkpoint's size on the disk without its arrays
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")  # TensorStore's format


class MismatchError(Exception):
    """A checkpoint does not fit the target; the message names the first path that differs."""


def copy(state: Any) -> dict[str, Any]:
    """Returns copies of a pytree's leaves by path, which remain readable when `state` is donated.

    In a run of one process the copies are on the host. In a run of several processes each process
    has only a part of each array, so the copies stay on the devices and `begin` copies them to the
    host.
    """
    if jax.process_count() > 1:
        return {path: _own(leaf) for path, leaf in _leaves_by_path(state).items()}
    # On a CPU, `device_get` returns views of the buffers, which the next step may overwrite.
    return {path: np.array(leaf) for path, leaf in _leaves_by_path(jax.device_get(state)).items()}


def begin(
    content: Path, parts: dict[str, dict[str, Any]], data_state: dict[str, Any]
) -> Callable[[], None]:
    """Starts writing the directory `content`.

    When this returns, the arrays are on the host. In a run of several processes each process writes
    the shards of its own devices, and all must call this at the same point of their main threads.

    Args:
      content: the directory to create, which must not exist.
      parts: results of `copy`, each by a name.
      data_state: the data iterator's state, which JSON can represent.

    Returns:
      A function that returns when all processes are done; any thread may call it.

    Raises:
      OSError: the disk has too little room.
      Exception: whatever Orbax raises, here or in the returned function; see `reason`.
    """
    _require_room(content, [array for part in parts.values() for array in part.values()])
    with _orbax_context():
        return ocp.save_checkpointables_async(content, {**parts, "data": data_state}).result


def read(content: Path, targets: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads parts of a checkpoint.

    Args:
      content: the content directory.
      targets: by name, pytrees that give the structure, shapes, dtypes and shardings of the parts
        to read.

    Returns:
      The parts by name, without those that the checkpoint lacks; and the data state.

    Raises:
      MismatchError: an array differs from its target in path, shape or dtype.
      Exception: whatever Orbax raises; see `reason`.
    """
    with _orbax_context():
        saved = ocp.checkpointables_metadata(content).metadata
        by_path = {
            name: _leaves_by_path(target) for name, target in targets.items() if name in saved
        }
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
    return trees, loaded["data"]


def _require_shapes(saved: dict[str, Any], targets: dict[str, Any]) -> None:
    for path in {**targets, **saved}:
        theirs, ours = _shape(saved.get(path)), _shape(targets.get(path))
        if theirs != ours:
            raise MismatchError(f"{path} is {theirs} in the checkpoint and {ours} here")


def reason(error: BaseException) -> str:
    """Returns the root cause of an error in one line; a system error in the system's own words."""
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
    # Checked in advance, because Orbax prints pages of tracebacks when the disk fills up.
    needed = sum(array.nbytes for array in arrays) + _METADATA_BYTES
    free = shutil.disk_usage(content.parent).free
    if free < needed:
        shortage = f"{os.strerror(errno.ENOSPC)} ({needed:,} bytes needed, {free:,} free)"
        raise OSError(errno.ENOSPC, shortage)


def _own(array: jax.Array) -> jax.Array:
    """Returns an array that remains readable after `array` is donated."""
    # Orbax copies the array to the host at once, but on a CPU that copy is a view of its buffer.
    return jnp.copy(array) if jax.default_backend() == "cpu" else array


def _leaves_by_path(state: Any) -> dict[str, Any]:
    """Returns a pytree's leaves by path, such as `params/wte/embedding`, in tree order."""
    leaves = jax.tree.leaves_with_path(state)
    by_path = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
    }
    if len(by_path) != len(leaves):
        raise ValueError("two leaves of the state have the same path; rename one that holds a '/'")
    return by_path


def _shape(leaf: Any) -> str:
    """Returns the dtype and shape of a leaf as text, such as `float32[3, 4]`; `absent` for None."""
    if leaf is None:
        return "absent"
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _abstract(leaf: Any) -> Any:
    """Returns a stand-in for a leaf, which tells Orbax the kind and sharding of array to load."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.asarray(leaf)


def _orbax_context() -> ocp.Context:
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(ocp.handlers.JsonHandler, checkpointable_name="data")
    context.memory.deepcopy_host_arrays = False  # `copy` has already copied them
    # Compression shrinks the weights by only 8 % and takes 7 times as long to write.
    context.array.saving.use_compression = False
    # If directories were created in the background, an error there would leave threads that keep
    # the process alive for ten minutes.
    context.asynchronous.create_directories_asynchronously = False
    return context
