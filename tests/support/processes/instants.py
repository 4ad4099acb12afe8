"""What a kill or a loss of power leaves of a directory, at every instant of what changes it."""

import contextlib
import functools
import os
import shutil
import threading
from pathlib import Path

CHANGES = ["rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync"]


def snapshots_of(monkeypatch, directory, target, change, copy_to=None):
    """Runs `change`; copies `directory` before and after every operation on the file system.

    A copy is what a kill at that instant would leave behind. Returns them in their order.
    """
    copies = []
    copy_to = copy_to or functools.partial(shutil.copytree, directory)
    idle = threading.Lock()  # held while copying, which itself makes directories

    def copy():
        copies.append(target / str(len(copies)))
        # TensorStore's threads go on meanwhile: a file may vanish while it is copied.
        with contextlib.suppress(shutil.Error, FileNotFoundError):
            copy_to(copies[-1])

    def copying(operation):
        @functools.wraps(operation)
        def wrapper(*args, **kwargs):
            if idle.acquire(blocking=False):
                copy()
                idle.release()
            return operation(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, copying(getattr(os, name)))
        change()
    copy()
    return copies


def as_synced(synced, now):
    """Nothing but what fsync has brought to the disk."""
    return synced


def half_of_the_rest(synced, now):
    """As well half of what was appended since."""
    if not now.startswith(synced):
        return synced
    return now[: (len(synced) + len(now)) // 2]


def zeros_for_the_rest(synced, now):
    """The size has reached the disk, and what was appended has not: zeros, on some file systems."""
    return synced + bytes(max(len(now) - len(synced), 0))


class Disk:
    """What of a directory a machine that loses its power finds again: what fsync has brought there.

    A file has the contents of its last fsync, and none before; of what was appended since, any part
    may be there as well. A directory has the names of its last fsync, and any of the changes since,
    for these may reach the disk at any time.
    """

    def __init__(self, root):
        self.root, self.contents, self.names, self.held = root, {}, {}, {}
        for path in (root, *root.rglob("*")):
            self.keep(path)

    def keep(self, path):
        status = path.stat()
        self.held.setdefault(status.st_ino, os.open(path, os.O_RDONLY))  # so none is used again
        if path.is_dir():
            self.names[status.st_ino] = self.listed(path)
        else:
            self.contents[status.st_ino] = path.read_bytes()

    def fsync(self, descriptor, fsync=os.fsync):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(self.root):
            self.keep(path)

    def listed(self, path):
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}

    def image(self, target, reached, of_file=as_synced):
        """Writes what is found.

        Args:
          target: a directory to make.
          reached: (directory, its names as synced, and now) -> those that have reached the disk.
          of_file: (its bytes as synced, and now) -> those that have.
        """
        while True:
            # TensorStore's threads go on meanwhile. What was seen before a file vanished would make
            # an image that lacks the rest, which no loss of power leaves.
            with contextlib.suppress(FileNotFoundError):
                names, now = self._found(reached)
                break

        def write(inode, path):
            path.mkdir()
            for name, (child, is_directory) in names.get(inode, {}).items():
                if is_directory:
                    write(child, path / name)
                else:
                    synced = self.contents.get(child, b"")
                    (path / name).write_bytes(of_file(synced, now.get(child, synced)))

        write(self.root.stat().st_ino, target)

    def _found(self, reached):
        """Names that have reached the disk, by directory, and the bytes of files that are there."""
        names, now = dict(self.names), {}
        for path in (self.root, *self.root.rglob("*")):
            inode = path.stat().st_ino
            if path.is_dir():
                names[inode] = reached(path, names.get(inode, {}), self.listed(path))
            else:
                now[inode] = path.read_bytes()
        return names, now

    def close(self):
        for descriptor in self.held.values():
            os.close(descriptor)
