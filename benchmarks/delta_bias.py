"""Measures whether the error of δ has a mean, at one checkpoint of a run, over many sequences.

    python -m benchmarks.delta_bias runs/seed1 runs/seed2 --draws 1500 [--out FILE.jsonl]

The error of a row's δ = rowsum(dO ∘ O) is the value that the run computes minus the exact value. An
error e of O makes it dO · e. If the forward pass has used e too, dO is the gradient at O + e, which
is g + H e. If H is positive, as it is near a minimum, dO · e has a positive mean even if e has
mean 0.

Every draw is a sequence of the training text with its own random bits. For each layer and head, the
mean over all draws is divided by the error's RMS, and its standard error is given. Several runs are
measured one after the other, up to the first that cannot be measured.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import program
from lowprec_attn.errors import UserError
from lowprec_attn.files import append_line
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.tables import columns
from lowprec_attn.training.run import open_corpus
from lowprec_attn.training.saved_model import restore, settings_of
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.signals import make_signals
from lowprec_attn.training.step import make_steps, root_key, step_key


class Errors(NamedTuple):
    """Mean and RMS of the error over the rows of each draw, by layer and head [draws, L, N]."""

    mean: np.ndarray
    rms: np.ndarray


class Bias(NamedTuple):
    """The mean error of all rows divided by their RMS, and its standard error over draws [L, N]."""

    mean: np.ndarray
    error: np.ndarray


def bias(errors: Errors) -> Bias:
    """Computes the bias of errors; it is 0 in a head without errors."""
    rms = np.sqrt(np.mean(errors.rms**2, axis=0))
    unit = np.where(rms > 0, rms, 1)
    spread = errors.mean.std(axis=0, ddof=1) / math.sqrt(len(errors.mean))
    return Bias(errors.mean.mean(axis=0) / unit, spread / unit)


def measure(path: Path, draws: int) -> tuple[int, Errors]:
    """Returns the step of a run's newest checkpoint, and the errors of δ there."""
    settings = settings_of(path)
    saved = restore(settings, RunDir(path))
    if saved is None:
        raise UserError(f"{path}: holds no complete checkpoint; train with checkpoint_every > 0")
    settings = dataclasses.replace(settings, attention=saved.attention)  # a rollback may change it
    steps = make_steps(settings, saved.devices.attend_whole)
    signals = saved.devices.jit(make_signals(settings.model, settings.attention, steps.loss))
    root, found = root_key(settings), []
    for draw, ids in enumerate(_sequences(settings, draws)):
        key = step_key(root, jnp.int32(saved.step + draw))
        layers, _ = signals(saved.params, ids[:, :-1], ids[:, 1:], key)
        found.append(jax.device_get(layers))
    return saved.step, Errors(
        *(
            np.array([[draw[layer][name] for layer in draw] for draw in found])
            for name in ("delta_error_mean", "delta_error_rms")
        )
    )


def _sequences(settings: TrainSettings, draws: int) -> Iterator[np.ndarray]:
    """Yields windows [1, context + 1] of the training text, from random places."""
    ids, length = open_corpus(settings.data).train.ids, settings.model.context + 1
    for start in np.random.default_rng(0).integers(len(ids) - length, size=draws):
        yield np.asarray(ids[start : start + length], np.int32)[None]


@program.told
def main() -> None:
    """Measures each run, prints its table and writes its line."""
    parser = program.parser(__doc__)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="directory of a run with a checkpoint"
    )
    parser.add_argument("--draws", type=int, default=1500, help="sequences, at least 2")
    parser.add_argument("--out", type=Path, help="JSON lines file to append to")
    args = parser.parse_args()
    if args.draws < 2:
        parser.error(f"--draws must be at least 2, got {args.draws}")
    for run in args.runs:
        step, errors = measure(run, args.draws)
        _report(run, step, args.draws, bias(errors), args.out)


def _report(run: Path, step: int, draws: int, found: Bias, out: Path | None) -> None:
    """Prints a table, and appends a line to `out`."""
    rows = [("layer", "head", "mean / RMS", "standard error")]
    for layer, head in np.ndindex(found.mean.shape):
        mean, spread = (x[layer, head] for x in found)
        rows.append((str(layer), str(head), f"{mean:+.4f}", f"{spread:.4f}"))
    print(f"{run}, step {step}, {draws} sequences")
    print(columns(rows, ">>>>"), flush=True)  # shown at once, since the next run takes minutes
    if out:
        record = {"run": run.name, "step": step, "draws": draws}
        record |= {name: x.round(5).tolist() for name, x in found._asdict().items()}
        append_line(out, json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
