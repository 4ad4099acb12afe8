"""Copies a run directory to storage that outlives this machine: a mounted drive or a bucket.

The run itself stays on a local disk, because it needs locks and atomic renames. `push` copies the
files that a resumed run needs, even while the run trains. `pull` copies them to a new machine.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from lowprec_attn.errors import RunError
from lowprec_attn.runs.manifest import DamagedError, Manifest
from lowprec_attn.runs.run_dir import RunDir

_NOT_COPIED = (".lock", ".tmp")


class MirrorError(RunError):
    """A run directory cannot be copied."""


def push(run_dir: RunDir, url: str) -> None:
    """Copies the newest complete checkpoint and all records of a run to `url`.

    If there is no checkpoint, nothing is copied. Records are copied after the checkpoint, so they
    reach at least its step. Other checkpoints at `url` are removed last. If the process is
    interrupted at any instant, `url` holds the previous checkpoint or the new one. Only one process
    at a time may push to a `url`.

    Args:
      run_dir: a run, finished or not.
      url: a directory for this run alone: a path (`/content/drive/MyDrive/run`), or an address
        that fsspec supports (`gs://bucket/run` with the package gcsfs, `s3://…` with s3fs).

    Raises:
      MirrorError: the run directory cannot be read or `url` cannot be written.
    """
    try:
        target = _directory(url)
        manifest = max(run_dir.checkpoints.glob("*.json"), default=None)
        if manifest is None:
            return
        content = _push_checkpoint(run_dir, manifest, target)
        for path in _records(run_dir):
            _replace(path, path.relative_to(run_dir.path).as_posix(), target)
        _remove_others(run_dir, manifest, content, target)
    except (OSError, DamagedError, ImportError) as error:
        raise MirrorError(f"cannot copy {run_dir.path} to {url}: {error}") from error


def pull(url: str, path: str | os.PathLike[str]) -> bool:
    """Restores the run directory `path` from the copy at `url`.

    Args:
      url: the `url` given to `push`.
      path: a directory that does not exist or is empty.

    Returns:
      Whether there was a copy. If there was none, nothing is created.

    Raises:
      MirrorError: `url` cannot be read, or `path` has contents.
    """
    path = Path(path).absolute()
    partial = path.with_name(f"{path.name}.partial")
    try:
        target = _directory(url)
        if not target.exists("config.json"):
            return False
        shutil.rmtree(partial, ignore_errors=True)
        for name in target.find(""):
            if not name.endswith(_NOT_COPIED):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                target.get_file(name, str(partial / name))
        partial.replace(path)  # atomic: `path` gets all files or none
    except (OSError, ImportError) as error:
        raise MirrorError(f"cannot copy {url} to {path}: {error}") from error
    return True


def _directory(url: str) -> DirFileSystem:
    """Returns the directory at `url`, which need not exist yet, as a file system."""
    try:
        files, root = fsspec.url_to_fs(url)
    except ValueError as error:  # fsspec knows no such protocol
        raise MirrorError(f"{url} is no path and no address that fsspec serves: {error}") from error
    files.invalidate_cache()
    return DirFileSystem(root.rstrip("/"), files)


def _put(path: Path, name: str, target: DirFileSystem) -> None:
    target.makedirs(name.rpartition("/")[0], exist_ok=True)
    target.put_file(str(path), name)


def _replace(path: Path, name: str, target: DirFileSystem) -> None:
    """Copies a file as `_put` does; if it is interrupted, the previous file remains."""
    _put(path, f"{name}.tmp", target)
    target.mv(f"{name}.tmp", name)


def _records(run_dir: RunDir) -> list[Path]:
    """Returns every file of a run except checkpoints, locks and unfinished temporary files.

    The config is last, because a copy exists exactly when its config does.
    """
    files = [
        path
        for path in sorted(run_dir.path.rglob("*"))
        if path.is_file()
        and run_dir.checkpoints not in path.parents
        and path.suffix not in _NOT_COPIED
    ]
    return sorted(files, key=lambda path: path == run_dir.config)


def _push_checkpoint(run_dir: RunDir, manifest: Path, target: DirFileSystem) -> str:
    """Copies a checkpoint, its manifest last, unless `target` already has it.

    A checkpoint exists exactly when its manifest does, both here and in the copy. After a rollback
    the same step may have another checkpoint there, under the same names. That one stays intact
    until the new one is complete, so the new one gets another content directory.

    Returns:
      The name of the content directory in the copy.
    """
    name = f"{run_dir.checkpoints.name}/{manifest.name}"
    ours = Manifest.read(manifest)
    if not target.exists(name):
        _put_content(run_dir, ours, ours.content, target)
        _put(manifest, name, target)
        return ours.content
    fields, theirs = dataclasses.asdict(ours), _fields(target.cat_file(name))
    content = theirs.get("content")
    if {**theirs, "content": ours.content} == fields:
        return str(content)
    if content != ours.content:
        content = ours.content
    else:
        step, _, version = ours.content.rpartition("-")
        content = f"{step}-{int(version) + 1}"
    _put_content(run_dir, ours, content, target)
    text = json.dumps({**fields, "content": content}, indent=1)
    target.pipe_file(f"{name}.tmp", f"{text}\n".encode())
    target.mv(f"{name}.tmp", name)
    return content


def _put_content(run_dir: RunDir, ours: Manifest, content: str, target: DirFileSystem) -> None:
    for inside, path in ours.paths(run_dir.checkpoints):
        name = inside.removeprefix(f"{ours.content}/")
        _put(path, f"{run_dir.checkpoints.name}/{content}/{name}", target)


def _fields(text: bytes) -> dict[str, Any]:
    """Returns the fields of a manifest in the copy; none if it was cut short."""
    try:
        fields = json.loads(text)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _remove_others(run_dir: RunDir, manifest: Path, content: str, target: DirFileSystem) -> None:
    """Removes all other checkpoints of the copy, and records that the run itself has removed.

    Manifests go before contents, so no manifest is ever without its content.
    """
    inside = f"{run_dir.checkpoints.name}/"
    kept = (f"{inside}{manifest.name}", f"{inside}{content}/")
    others = [n for n in target.find(run_dir.checkpoints.name) if not n.startswith(kept)]
    for name in sorted(others, key=lambda name: name.count("/")):
        target.rm_file(name)
    # A run that goes on after a failure removes `failure.json`.
    for path in (run_dir.failure, run_dir.summary, run_dir.origin, run_dir.rollbacks):
        if not path.exists() and target.exists(path.name):
            target.rm_file(path.name)
