"""Copies a run directory to storage that outlives this machine: a mounted drive or a bucket.

The run itself stays on a local disk, because it needs locks and atomic renames. `push` copies the
files that a resumed run needs, even while the run trains. `pull` copies them to a new machine.

A checkpoint vouches for the records as they were at its step, and a store has no rename of several
files at once. So the records of a new checkpoint first lie beside its content:

    checkpoints/00001500.json       the manifest, which makes the checkpoint and its records count
    checkpoints/00001500-0/         the content
    checkpoints/00001500-0.records/ its records, until they are in their places

Records that lie there without the manifest do not count. With it they count instead of those in
their places, and no other checkpoint counts.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from lowprec_attn.errors import RunError
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.manifest import DamagedError, Manifest
from lowprec_attn.runs.run_dir import RunDir

_NOT_COPIED = (".lock", ".tmp")
_CONFIG, _CHECKPOINTS = "config.json", "checkpoints"
_BESIDE = ".records"


class MirrorError(RunError):
    """A run directory cannot be copied."""


def push(run_dir: RunDir, url: str) -> None:
    """Copies the newest complete checkpoint and all records of a run to `url`.

    If there is no checkpoint, nothing is copied. Records are copied after the checkpoint, so they
    reach at least its step. Other checkpoints at `url` are removed last. If the process is
    interrupted at any instant, `url` holds the previous checkpoint with records that fit it, or the
    new one with its own. Only one process at a time may push to a `url`.

    Args:
      run_dir: a run, finished or not.
      url: a directory for this run alone: a path (`/content/drive/MyDrive/run`), or an address
        that fsspec supports (`gs://bucket/run` with the package gcsfs, `s3://…` with s3fs).

    Raises:
      MirrorError: the run directory cannot be read or its newest checkpoint is damaged, `url`
        cannot be written, or the run went back to an earlier step meanwhile.
      RunError: `rollbacks.jsonl` is damaged.
    """
    try:
        target = _directory(url)
        manifest = _newest_manifest(run_dir.checkpoints)
        if manifest is None:
            return
        _finish(target)
        ours = Manifest.read(manifest)
        content, text = _put_checkpoint(run_dir, manifest, ours, target)
        # Beside the content until the manifest is there; a known checkpoint fits them already.
        to = "{}.tmp" if text is None else f"{_CHECKPOINTS}/{content}{_BESIDE}/{{}}"
        moves = {}
        for path in _records(run_dir):
            name = path.relative_to(run_dir.path).as_posix()
            moves[to.format(name)] = name
            _put(path, to.format(name), target)
        _require_not_undone(run_dir, int(manifest.stem), ours)
        if text is not None:
            _publish(f"{_CHECKPOINTS}/{manifest.name}", text, target)
        _move(moves, target)
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
        if not target.exists(_CONFIG):
            return False
        shutil.rmtree(partial, ignore_errors=True)
        for name in target.find(""):
            if not name.endswith(_NOT_COPIED):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                target.get_file(name, str(partial / name))
        _finish(_directory(str(partial)))
        for left in partial.glob(f"{_CHECKPOINTS}/*{_BESIDE}"):
            shutil.rmtree(left)
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


def _newest_manifest(checkpoints: Path) -> Path | None:
    manifests = (path for path in checkpoints.glob("*.json") if path.stem.isdecimal())
    return max(manifests, key=lambda path: int(path.stem), default=None)


def _records(run_dir: RunDir) -> list[Path]:
    """Returns every file of a run except checkpoints, locks and unfinished temporary files."""
    return [
        path
        for path in sorted(run_dir.path.rglob("*"))
        if path.is_file()
        and run_dir.checkpoints not in path.parents
        and path.suffix not in _NOT_COPIED
    ]


def _put_checkpoint(
    run_dir: RunDir, manifest: Path, ours: Manifest, target: DirFileSystem
) -> tuple[str, str | None]:
    """Copies the content of a checkpoint, unless `target` already has it; not its manifest.

    A checkpoint exists exactly when its manifest does, both here and in the copy. After a rollback
    the same step may have another checkpoint there, under the same names. That one stays intact
    until the new one is complete, so the new one gets another content directory.

    Returns:
      The name of the content directory in the copy, and the manifest to write; None if it is there.
    """
    name = f"{_CHECKPOINTS}/{manifest.name}"
    fields, content = dataclasses.asdict(ours), ours.content
    if target.exists(name):
        theirs = _fields(target.cat_file(name))
        if {**theirs, "content": content} == fields:
            return str(theirs["content"]), None
        if theirs.get("content") == content:
            step, _, version = content.rpartition("-")
            content = f"{step}-{int(version) + 1}"
    ours.verify(run_dir.checkpoints)  # the copy is what a damaged checkpoint is restored from
    _put_content(run_dir, ours, content, target)
    return content, json.dumps({**fields, "content": content}, indent=1)


def _require_not_undone(run_dir: RunDir, step: int, ours: Manifest) -> None:
    """Raises MirrorError if a rollback, which the records may hold, has undone a checkpoint."""
    if rollbacks.undone(rollbacks.read(run_dir.rollbacks), step, ours.records):
        raise MirrorError(
            f"{run_dir.path} went back from checkpoint {step} while it was copied; the copy stays "
            "as it was, and the next one has the checkpoint that the run went back to"
        )


def _publish(name: str, text: str, target: DirFileSystem) -> None:
    """Writes a manifest; from then on its checkpoint and the records beside it count."""
    target.pipe_file(f"{name}.tmp", f"{text}\n".encode())
    target.mv(f"{name}.tmp", name)
    _remove_other_manifests(name, target)


def _remove_other_manifests(name: str, target: DirFileSystem) -> None:
    directory = name.rpartition("/")[0]
    for other in target.find(directory, maxdepth=1):
        if other.endswith(".json") and other != name:
            target.rm_file(other)


def _move(names: Mapping[str, str], target: DirFileSystem) -> None:
    """Renames files, by name; the config last, because a copy exists exactly when its config does.

    If it is interrupted, each file is either the previous one or the new one.
    """
    for old, new in sorted(names.items(), key=lambda pair: pair[1] == _CONFIG):
        target.makedirs(new.rpartition("/")[0], exist_ok=True)
        target.mv(old, new)


def _finish(target: DirFileSystem) -> None:
    """Completes a `push` that was interrupted after its manifest, and undoes one before that."""
    beside: dict[str, dict[str, str]] = {}
    for name in target.find(_CHECKPOINTS):
        content, is_beside, record = name.removeprefix(f"{_CHECKPOINTS}/").partition(f"{_BESIDE}/")
        if is_beside:
            beside.setdefault(content, {})[name] = record
    for content, moves in beside.items():
        manifest = f"{_CHECKPOINTS}/{content.rpartition('-')[0]}.json"
        there = target.cat_file(manifest) if target.exists(manifest) else b""
        if _fields(there).get("content") == content:
            _remove_other_manifests(manifest, target)
            _move(moves, target)
        else:
            for name in moves:
                target.rm_file(name)


def _put_content(run_dir: RunDir, ours: Manifest, content: str, target: DirFileSystem) -> None:
    for inside, path in ours.paths(run_dir.checkpoints):
        name = inside.removeprefix(f"{ours.content}/")
        _put(path, f"{_CHECKPOINTS}/{content}/{name}", target)


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
    inside = f"{_CHECKPOINTS}/"
    kept = (f"{inside}{manifest.name}", f"{inside}{content}/")
    others = [n for n in target.find(_CHECKPOINTS) if not n.startswith(kept)]
    for name in sorted(others, key=lambda name: name.count("/")):
        target.rm_file(name)
    # A run that goes on after a failure removes `failure.json`.
    for path in (run_dir.failure, run_dir.summary, run_dir.origin, run_dir.rollbacks):
        if not path.exists() and target.exists(path.name):
            target.rm_file(path.name)
