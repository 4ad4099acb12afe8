"""How far the weights of two runs lie apart, step by step, from their checkpoints.

Golden et al. (arXiv 2405.02803) put the deviation of an arithmetic into context by two distances
between the weights that it ends at and those of another run: the largest difference, and the
Wasserstein distance. Another initialisation and another precision are their yardsticks.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.stats import wasserstein_distance

from lowprec_attn.errors import RunError
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.saved_model import restore, settings_of

_NEWEST = 2**31  # steps are counted in int32


def compare_seeds(groups: Sequence[Sequence[Path]]) -> list[dict[str, Any]]:
    """The records of `compare` for several seeds.

    Args:
      groups: one for each seed, a base and others, whose directories bear the same names in each.

    Raises:
      UserError: as `compare`, or two groups have one seed or other names.
    """
    names: list[str] = []
    bases: dict[int, Path] = {}
    for base, *others in groups:
        found = [path.name for path in (base, *others)]
        names = names or found
        if found != names:
            raise RunError(
                f"--runs has {' '.join(found)} beside {' '.join(names)}; give the runs of each "
                "seed under the same names, in the same order"
            )
        seed = settings_of(base).seed
        if seed in bases:
            raise RunError(f"{bases[seed]} and {base} both have seed {seed}; give each seed once")
        bases[seed] = base
    return [record for base, *others in groups for record in compare(base, others)]


def compare(base: Path, others: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """A record for each other run and each step of which it and the base have a checkpoint.

    A record holds `base`, `other` (names of the directories), the base's `seed`, `changed` (the
    fields in which their configs differ, with the value of either), `step`, and over all weights:
    `max`, the largest difference of two weights in the same place; `rms`, the root mean square of
    these differences; `wasserstein`, the first Wasserstein distance between the values of a tensor
    here and there, as a mean over the tensors by their sizes, and the largest one's `tensor` and
    `wasserstein_max`.

    Args:
      base: run directory to compare with; it should keep every checkpoint (`checkpoints_kept`).
      others: run directories of models of the same shape.

    Raises:
      UserError: one is no run directory, they share no step, their models differ, or a weight is
        not finite.
    """
    seed = settings_of(base).seed
    steps = {path: _steps(path) for path in (base, *others)}
    for other in others:
        common = [step for step in steps[base] if step in steps[other]]
        if not common:
            raise RunError(
                f"{base} has checkpoints of the steps {_listed(steps[base])} and {other} of "
                f"{_listed(steps[other])}; compare runs with the same checkpoint_every, and "
                "checkpoints_kept large enough to keep them"
            )
        for step in common:
            yield {
                "base": base.name,
                "other": other.name,
                "seed": seed,
                "changed": RunDir(other).changes_from(RunDir(base)),
                "step": step,
                **_distances(_weights(base, step), _weights(other, step), other),
            }


def _distances(a: dict[str, np.ndarray], b: dict[str, np.ndarray], other: Path) -> dict[str, Any]:
    shapes = [{name: x.shape for name, x in side.items()} for side in (a, b)]
    if shapes[0] != shapes[1]:
        name = next(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
        theirs, ours = shapes[1].get(name, "none"), shapes[0].get(name, "none")
        raise RunError(
            f"{other} has {name} of shape {theirs}, the first run {ours}; compare models of one "
            "shape"
        )
    differences = {name: a[name].astype(np.float64) - b[name] for name in a}
    sizes = np.array([x.size for x in a.values()])
    moved = np.array([wasserstein_distance(a[name].ravel(), b[name].ravel()) for name in a])
    squares = sum(float(np.sum(x * x)) for x in differences.values())
    return {
        "max": max(float(np.max(np.abs(x))) for x in differences.values()),
        "rms": float(np.sqrt(squares / sizes.sum())),
        "wasserstein": float(moved @ sizes / sizes.sum()),
        "wasserstein_max": float(moved.max()),
        "tensor": list(a)[int(moved.argmax())],
    }


def _steps(path: Path) -> list[int]:
    """Steps of which there is a checkpoint, ascending."""
    settings_of(path)  # an error now, before weights are read
    found: list[int] = []
    with Checkpoints(RunDir(path).checkpoints) as checkpoints:
        step = checkpoints.newest(_NEWEST)
        while step is not None:
            found.insert(0, step)
            step = checkpoints.newest(step - 1)
    return found


def _weights(path: Path, step: int) -> dict[str, np.ndarray]:
    """By their places in the model."""
    saved = restore(settings_of(path), RunDir(path), step)
    if saved is None or saved.step != step:
        raise RunError(
            f"{path}: checkpoint {step} is damaged; leave the run out, or train it again"
        )
    found = {}
    for place, x in jax.tree.leaves_with_path(jax.device_get(saved.params)):
        name = jax.tree_util.keystr(place, simple=True, separator="/").removesuffix("/value")
        if not np.isfinite(x).all():
            raise RunError(
                f"{path}: {name} of checkpoint {step} is not finite, so that it has no distance; "
                "remove that checkpoint, or leave the run out"
            )
        found[name] = np.asarray(x)
    return found


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
