"""Checkpoints that survive a kill and that detect damage.

A checkpoint of step 1500 has two parts on the disk:

    00001500.json    the manifest: the content directory's name, and the size and SHA-256 of its
                     files and of the run's records up to the step
    00001500-0/      the content, written by Orbax

A checkpoint exists exactly when its manifest does. The manifest is written by an atomic rename
after all of the content, and is removed before any of the content. Content without a manifest is
left over from a killed save or deletion. It never counts, and the next save removes it. A step that
is saved again gets a new content directory, so its first version counts until the second is
complete.

The hashes are necessary because Orbax loads flipped bits without an error.

In a run of several processes each process writes and reads the shards of its own devices. The first
process chooses the content directory, verifies it, and writes and removes the manifests.
"""

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import jax

from lowprec_attn import hosts
from lowprec_attn.errors import RunError
from lowprec_attn.files import Fingerprint, make_directory
from lowprec_attn.runs import checkpoint_content
from lowprec_attn.runs.manifest import DamagedError, Manifest

_MANIFEST = re.compile(r"(\d{8,})\.json")
_CONTENT = re.compile(r"(\d{8,})-\d+(\.orbax-checkpoint-tmp.*)?")

_logger = logging.getLogger(__name__)


class CheckpointError(RunError):
    """A checkpoint cannot be written or read."""


class _UnfinishedError(DamagedError):
    """A checkpoint was never completed, so skipping it loses nothing."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: the step under which it was saved.
      state: a pytree with the target's structure.
      data_state: the data iterator's state.
      records: the `records` given to `save`; empty in checkpoints of earlier versions.
      measured: the `measured` given to `save`; None if none was given or none was requested.
    """

    step: int
    state: Any
    data_state: dict[str, Any]
    records: dict[str, Fingerprint]
    measured: Any = None


class Checkpoints:
    """The checkpoints of one run, in one directory that all of its processes see.

    Example:
      with Checkpoints(run_dir.checkpoints) as checkpoints:
          restored = checkpoints.restore(state)
          ...
          checkpoints.save(step, state, iterator.get_state())
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        """Sets the directory; creates nothing before the first `save`.

        Args:
          directory: the directory of the checkpoints.
          keep: how many of the newest checkpoints to keep, at least 1.

        Raises:
          ValueError: keep is less than 1.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint; it must be at least 1")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._damaged: set[int] = set()  # steps whose checkpoints `restore` has found damaged
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any],
        records: Mapping[str, Fingerprint] = MappingProxyType({}),
        keep_from: int | None = None,
        measured: Any = None,
    ) -> None:
        """Saves a checkpoint in the background, and then deletes older ones beyond `keep`.

        When this returns, `state` has been copied, so its buffers may be donated. A thread writes
        and hashes the content. If it fails, the next call of any method raises its error. A
        checkpoint that already exists for the step is replaced.

        Args:
          step: the number of the step, at least 0.
          state: a pytree of non-empty JAX or NumPy arrays and numbers.
          data_state: the data iterator's state, which JSON can represent.
          records: fingerprints, by name, of the files that the run wrote before this step.
          keep_from: checkpoints of this and later steps are kept in addition to the newest `keep`.
          measured: a pytree of arrays to save beside the state, or None.

        Raises:
          CheckpointError: this checkpoint or the previous one could not be written. All complete
            checkpoints remain.
          ValueError: step is negative.
        """
        if step < 0:
            raise ValueError(f"step={step} cannot be saved; it must be at least 0")
        require_storable(self._directory)
        self.wait()
        parts = _parts(state, measured)
        copies = {name: checkpoint_content.copy(part) for name, part in parts.items()}
        begin = partial(self._begin, step, copies, json.loads(json.dumps(data_state)))
        # Several processes can coordinate only in their main threads. A single process begins in
        # the worker thread.
        write = begin() if jax.process_count() > 1 else lambda: begin()()
        self._pending = self._worker.submit(self._complete, step, write, dict(records), keep_from)

    def restore(
        self, target_state: Any, last_step: int | None = None, target_measured: Any = None
    ) -> Restored | None:
        """Loads the newest intact checkpoint.

        Newer checkpoints are skipped, each with one logged warning: they were never completed, or
        one of their files is missing, cannot be read, or differs from its checksum.

        Args:
          target_state: a pytree with the structure of the `state` given to `save`. For a leaf that
            is a JAX array, or a `jax.ShapeDtypeStruct` with a sharding, the restored leaf is a JAX
            array with the same sharding. For any other leaf it is a NumPy array.
          last_step: the last step to consider; None considers all checkpoints.
          target_measured: a pytree like `target_state` for the `measured` given to `save`; None
            does not load it.

        Returns:
          The checkpoint, or None if no checkpoint was ever completed.

        Raises:
          CheckpointError: no checkpoint is intact, or the newest intact one differs from the target
            in the path, shape or dtype of an array.
        """
        self.wait()
        with self._explain_errors("read checkpoints in"):
            found = hosts.from_first(lambda: self._newest_intact(last_step))
            if found is None:
                return None
            step, content, records = found
            targets = _parts(target_state, target_measured)
            parts, data_state = self._load(step, self._directory / content, targets)
            fingerprints = {name: Fingerprint(**fields) for name, fields in records.items()}
            return Restored(step, parts["state"], data_state, fingerprints, parts.get("measured"))

    def prune(self) -> None:
        """Deletes all but the newest `keep` checkpoints, including those that `keep_from` kept.

        Raises:
          CheckpointError: a checkpoint cannot be deleted.
        """
        steps = self.steps()
        if steps:
            with self._explain_errors("remove checkpoints in"):
                self._delete_older(steps[-1], None)

    def newest(self, last_step: int) -> int | None:
        """Returns the newest step up to `last_step` with a checkpoint; reads none of its files."""
        return max((step for step in self.steps() if step <= last_step), default=None)

    def steps(self) -> list[int]:
        """Returns every step that has a checkpoint, the oldest first; reads none of their files."""
        self.wait()
        return hosts.from_first(lambda: sorted(step for step, _ in self._entries(_MANIFEST)))

    def discard(self, unwanted: Callable[[int, Mapping[str, Fingerprint]], bool]) -> None:
        """Removes the checkpoints for which `unwanted(step, records)` is true, the newest first.

        If the process is killed in between, the older ones remain, and the next call removes them.
        A checkpoint with a damaged manifest remains, and `restore` skips it.

        Raises:
          CheckpointError: a checkpoint cannot be removed.
        """
        self.wait()

        def remove() -> None:
            for step, path in sorted(self._entries(_MANIFEST), reverse=True):
                with contextlib.suppress(DamagedError):
                    if unwanted(step, Manifest.read(path).records):
                        _remove(path)
            if self._directory.exists():
                # Otherwise `restore` would warn about content without a manifest.
                self._remove_leftovers()

        with self._explain_errors("remove checkpoints in"):
            hosts.from_first(remove)

    def _newest_intact(self, last_step: int | None) -> tuple[int, str, dict[str, Any]] | None:
        """Returns the step, content directory and records of the checkpoint to restore.

        JSON can represent the result, which `hosts.from_first` sends to the other processes.
        """
        skipped: dict[int, DamagedError] = {}
        # Every step with a manifest or content, complete or not.
        entries = self._entries(_MANIFEST) + self._entries(_CONTENT)
        for step in sorted({step for step, _ in entries}, reverse=True):
            if last_step is not None and step > last_step:
                continue
            try:
                manifest = self._verified(step)
            except DamagedError as damage:
                skipped[step] = damage
                self._damaged.add(step)
                continue
            self._log_skipped(skipped, f"using checkpoint {step} instead")
            return step, manifest.content, dataclasses.asdict(manifest)["records"]
        if all(isinstance(damage, _UnfinishedError) for damage in skipped.values()):
            self._log_skipped(skipped, "there is no older one, so nothing is restored")
            return None
        damages = "; ".join(f"checkpoint {step}: {damage}" for step, damage in skipped.items())
        raise CheckpointError(
            f"no checkpoint in {self._directory} is intact ({damages}); "
            "restore the directory from a copy, or start anew in another run directory"
        )

    def wait(self) -> None:
        """Returns once the last `save` is complete.

        Raises:
          CheckpointError: the last `save` failed.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Completes the last `save` and ends the thread; raises the errors of `wait`."""
        self._worker.shutdown(wait=True)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Saving.

    def _begin(
        self, step: int, parts: dict[str, dict[str, Any]], data_state: dict[str, Any]
    ) -> Callable[[], Path]:
        """Starts writing a content directory; the result waits for it and returns its path."""
        with self._explain_errors(f"write checkpoint {step} to"):
            content = self._directory / hosts.from_first(lambda: self._new_content(step).name)
            wait = checkpoint_content.begin(content, parts, data_state)

        def write() -> Path:
            wait()
            return content

        return write

    def _new_content(self, step: int) -> Path:
        """Returns the path of a new content directory, which does not exist yet."""
        make_directory(self._directory)
        self._remove_leftovers()
        paths = (self._directory / f"{step:08d}-{version}" for version in itertools.count())
        return next(path for path in paths if not path.exists())

    def _complete(
        self,
        step: int,
        write: Callable[[], Path],
        records: dict[str, Fingerprint],
        keep_from: int | None,
    ) -> None:
        """Writes the content and then the manifest, in the worker thread; deletes older ones.

        The checkpoint exists from the moment its manifest is written.
        """
        with self._explain_errors(f"write checkpoint {step} to"):
            try:
                content = write()
                if hosts.is_first():
                    manifest = self._manifest_path(step)
                    if manifest.is_dir():  # damage: a rename cannot replace a directory
                        shutil.rmtree(manifest)
                    Manifest.of(content, records).write(manifest)
            except BaseException:
                with contextlib.suppress(OSError):  # leftovers do not count and are removed later
                    self._remove_leftovers()
                raise
            self._damaged.discard(step)
            self._delete_older(step, keep_from)

    @hosts.first_only
    def _delete_older(self, step: int, keep_from: int | None) -> None:
        """Deletes all but the newest `keep` checkpoints up to `step`, and all leftovers.

        Checkpoints known to be damaged do not count among the `keep`. Checkpoints from `keep_from`
        on remain. Checkpoints after `step` remain too: they are damaged, because otherwise this run
        would have started from them.
        """
        older = sorted((other, path) for other, path in self._entries(_MANIFEST) if other < step)
        intact = [other for other, _ in older if other not in self._damaged]
        kept = intact[max(0, len(intact) - self._keep + 1) :]
        for other, manifest in older:
            if other not in kept and (keep_from is None or other < keep_from):
                _remove(manifest)
        self._remove_leftovers()

    @hosts.first_only
    def _remove_leftovers(self) -> None:
        for temporary in self._directory.glob("*.json.tmp"):
            _remove(temporary)
        for step, content in self._entries(_CONTENT):
            if self._is_leftover(step, content):
                _remove(content)

    def _is_leftover(self, step: int, content: Path) -> bool:
        if not self._manifest_path(step).exists():
            return True
        try:
            return Manifest.read(self._manifest_path(step)).content != content.name
        except DamagedError:
            return False  # a damaged manifest is no reason to delete anything

    # Restoring.

    def _verified(self, step: int) -> Manifest:
        """Returns the manifest of a step after checking the size and checksum of every file.

        Raises:
          DamagedError: the checkpoint was not completed, or a file is missing or damaged.
        """
        if not self._manifest_path(step).exists():
            raise _UnfinishedError(
                f"{self._manifest_path(step).name} is missing: saving was not completed"
            )
        manifest = Manifest.read(self._manifest_path(step))
        manifest.verify(self._directory)
        return manifest

    def _load(
        self, step: int, content: Path, targets: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            return checkpoint_content.read(content, targets)
        except checkpoint_content.MismatchError as mismatch:
            raise CheckpointError(
                f"checkpoint {step} in {self._directory} is of another model: {mismatch}; "
                "use the config it was saved with"
            ) from None

    def _log_skipped(self, skipped: Mapping[int, DamagedError], consequence: str) -> None:
        for step, damage in skipped.items():
            _logger.warning(
                "skipping checkpoint %d in %s: %s; %s", step, self._directory, damage, consequence
            )

    # Names on the disk.

    def _entries(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        """Returns the step and path of every directory entry whose name matches the pattern."""
        if not self._directory.exists():
            return []
        matches = [(pattern.fullmatch(path.name), path) for path in self._directory.iterdir()]
        return [(int(match[1]), path) for match, path in matches if match]

    def _manifest_path(self, step: int) -> Path:
        return self._directory / f"{step:08d}.json"

    @contextlib.contextmanager
    def _explain_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # Orbax passes on misleading errors of any type from its layers
            raise CheckpointError(
                f"cannot {action} {self._directory}: {checkpoint_content.reason(error)}; "
                "checkpoints that were complete stay as they are"
            ) from error


def _parts(state: Any, measured: Any) -> dict[str, Any]:
    """Returns the pytrees of a checkpoint by the names under which Orbax stores them."""
    return {"state": state} if measured is None else {"state": state, "measured": measured}


def require_storable(directory: Path) -> None:
    """Checks that Orbax can write checkpoints to a directory, which need not exist.

    Orbax takes the path as a pattern of glob, TensorStore takes a backslash for a slash, and both
    take UTF-8 alone. Where they do, the arrays would get lost without an error.

    Raises:
      CheckpointError: it cannot.
    """
    path = directory.absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        what = "it is not UTF-8"
    else:
        odd = [part for part in path.parts if not fnmatch.fnmatchcase(part, part) or "\\" in part]
        if not odd:
            return
        what = f"{odd[0]!r} has square brackets or a backslash, which Orbax takes for others"
    raise CheckpointError(
        f"cannot write checkpoints to {path}: {what}; choose another place, without such names"
    )


def _remove(path: Path) -> None:
    """Removes a file, or a directory and its contents; after damage a path may be either."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
