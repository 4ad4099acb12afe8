"""Finds the smallest case that still shows a bug, and writes it with a script that shows the bug.

The script runs without this package.
"""

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lowprec_attn.check.problems import Problem, part_of
from lowprec_attn.check.target import Target
from lowprec_attn.files import write_atomically, writing

_SECONDS = 15.0


def smallest(problem: Problem, shows: Callable[[Problem], bool]) -> Problem:
    """Removes sequences, heads, rows and keys from a problem for as long as the bug shows.

    Args:
      problem: a problem that shows the bug.
      shows: returns whether another problem shows it; must not raise.
    """
    end = time.monotonic() + _SECONDS
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(problem):
            # T and N must differ, so that the axes of lse can be told apart by their sizes.
            if candidate.q.shape[1] == candidate.q.shape[2] > 1:
                continue
            if time.monotonic() > end:
                return problem
            if shows(candidate):
                problem, smaller = candidate, True
                break
    return problem


def _smaller(problem: Problem) -> Iterator[Problem]:
    """Yields smaller problems, those with the largest cuts first."""
    batch, rows, heads, _ = problem.q.shape
    keys, kv_heads = problem.k.shape[1:3]
    group = heads // kv_heads
    if batch > 1:
        for b in range(batch):
            yield part_of(problem, batch=slice(b, b + 1))
    if kv_heads > 1:
        for i in range(kv_heads):
            yield part_of(problem, heads=slice(i * group, (i + 1) * group), kv=slice(i, i + 1))
    if group > 2:
        yield part_of(problem, heads=np.arange(heads).reshape(kv_heads, group)[:, :2].ravel())
    for part in (2, 4, 8):
        less = max(1, rows // part) if part == 2 else max(1, rows - rows // part)
        if less == rows:
            continue
        for cut in (slice(less), slice(rows - less, rows)):
            if rows == keys:
                yield part_of(problem, rows=cut, keys=cut)
            else:
                yield part_of(problem, rows=cut)
        if rows != keys:
            less = max(1, keys // part) if part == 2 else max(1, keys - keys // part)
            yield part_of(problem, keys=slice(less))
            yield part_of(problem, keys=slice(keys - less, keys))
    if rows == keys and rows > 1:
        yield part_of(problem, rows=slice(rows - 1), keys=slice(rows - 1))


def save(problem: Problem, target: Target, folder: Path, stem: str) -> tuple[Path, Path]:
    """Writes inputs and exact results to `STEM.npz` and a script to `STEM.py`; returns both paths.

    Raises:
      DiskError: the files cannot be written.
    """
    assert target.script is not None  # `check` has refused a folder otherwise
    data, script = folder / f"{stem}.npz", folder / f"{stem}.py"
    arrays, lines = target.script(problem, data.name)
    content = io.BytesIO()
    np.savez(content, **arrays)
    with writing(data):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(data, content.getvalue())
        write_atomically(script, ("\n".join(lines) + "\n").encode())
    return data, script
