"""The state of a directory after a kill or a power loss, at every instant of a change."""

import contextlib
import functools
import os
import shutil
import threading
from pathlib import Path

CHANGES = ["rename", "replace", "unlink", "remove", "rmdir", "mkdir", "fsync"]


def snapshots_of(monkeypatch, directory, target, change, copy_to=None):
    """Runs `change`; copies `directory` before and after every operation on the file system.

    Returns the copies in order. Each is what a kill at that instant would leave behind.
    """
    copies = []
    copy_to = copy_to or functools.partial(shutil.copytree, directory)
    idle = threading.Lock()  # held during a copy, which creates directories itself

    def copy():
        copies.append(target / str(len(copies)))
        # TensorStore's threads continue meanwhile, so a file may vanish while it is copied.
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
    """Only the bytes that fsync has written to the disk."""
    return synced


def half_of_the_rest(synced, now):
    """The synced bytes and half of the bytes appended since."""
    if not now.startswith(synced):
        return synced
    return now[: (len(synced) + len(now)) // 2]


def zeros_for_the_rest(synced, now):
    """The synced bytes, and zeros for appended ones: on some file systems only the size arrives."""
    return synced + bytes(max(len(now) - len(synced), 0))


class Disk:
    """The part of a directory that a machine finds again after a power loss.

    A file has its contents at its last fsync, or none before the first; any part of the bytes
    appended since may be there as well. A directory has the names of its last fsync, and any of the
    changes made since, because these may reach the disk at any time.
    """

    def __init__(self, root):
        self.root, self.contents, self.names, self.held = root, {}, {}, {}
        for path in (root, *root.rglob("*")):
            self.keep(path)

    def keep(self, path):
        status = path.stat()
        self.held.setdefault(status.st_ino, os.open(path, os.O_RDONLY))  # held open for its inode
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
        """Writes the directory as the machine finds it.

        Args:
          target: a directory to make.
          reached: maps (directory, its names as synced, its names now) to the names on the disk.
          of_file: maps (its bytes as synced, its bytes now) to the bytes on the disk.
        """
        while True:
            # TensorStore's threads continue meanwhile. If a file vanishes, start over: an image of
            # the files seen before it would lack the rest, which no power loss causes.
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
        """The names on the disk by directory, and the current bytes of the files."""
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
