"""Measures how far attention lies from float64, by format, length, tile and implementation.

    python -m benchmarks.deviation DIR               # two minutes on two CPU cores
    python -m benchmarks.deviation DIR --crossed     # every tile in every format at every length
    python -m benchmarks.deviation DIR --read        # table and figure of the records alone
    python -m benchmarks.deviation --weights A B C   # the weights of runs B and C beside those of A

This repeats the measurement of Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803). The
same random q, k and v go through attention in each arithmetic, and every result is compared with
attention in float64. Golden et al. vary the format, the length, the area of a tile, and its sides,
swapped or equal. Here dQ, dK and dV are compared as well, and the sign of the errors is measured
(arXiv 2510.04212). A deviation contains only errors of the arithmetic, because float64 attention
takes the inputs after they are rounded to the format. Weights are compared as in that paper, by the
largest difference and by the Wasserstein distance of a tensor's values, averaged over the tensors
with their sizes as weights.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import wasserstein_distance

from benchmarks import fidelity, program
from lowprec_attn import attention
from lowprec_attn.attention import tiled
from lowprec_attn.check.inputs import normal
from lowprec_attn.check.measure import RESULTS, WORDS, Found, both_passes, results
from lowprec_attn.check.problems import Problem, formed
from lowprec_attn.diagnostics.signed_errors import signed_error
from lowprec_attn.errors import RunError
from lowprec_attn.files import complete_lines, make_directory, write_atomically, write_json
from lowprec_attn.numerics import FLASH, PUBLISHED_EAGER, STANDARD, Numerics
from lowprec_attn.runs import environment
from lowprec_attn.runs.pages import style
from lowprec_attn.runs.pages.drawing import write_figure
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.tables import columns
from lowprec_attn.training.saved_model import restore, settings_of

FORMATS = ("bfloat16", "float16", "float32")
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
TENSORS = tuple(WORDS[name] for name in RESULTS)
LENGTHS = (128, 256, 512, 1024)
SQUARES = ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256))
TILES = (*SQUARES, (16, 256), (256, 16), (32, 128), (128, 32))
# The length at which formats and tiles are compared, and the tile with which formats and lengths
# are compared.
LENGTH, TILE = 512, (64, 64)
HEADS, HEAD_SIZE = 2, 64

Tile = tuple[int, int]  # numbers of queries and keys
Record = Mapping[str, Any]


class Arm(NamedTuple):
    """One way to compute attention.

    Attributes:
      numerics: the arithmetic in bfloat16; None for a function of `jax.nn`.
      implementation: an implementation of `attention`, or of `jax.nn.dot_product_attention`.
      platform: the platform that it needs; None for any.
    """

    numerics: Numerics | None
    implementation: str
    platform: str | None = None


ARMS: dict[str, Arm] = {
    "dense": Arm(STANDARD, "dense"),
    "xla": Arm(None, "xla"),
    "flash": Arm(FLASH, "tiled"),
    "eager": Arm(PUBLISHED_EAGER, "tiled"),
    "gpu": Arm(FLASH, "gpu", "gpu"),
    "hopper": Arm(FLASH, "hopper", "gpu"),
    "cudnn": Arm(None, "cudnn", "gpu"),
}


class Case(NamedTuple):
    """One program: an arm of `ARMS`, a format, a length T, and a tile if the arm has tiles."""

    arm: str
    format: str
    length: int
    tile: Tile | None


def cases(crossed: bool = False) -> list[Case]:
    """Returns the cases: all formats at all lengths, and all tiles.

    Tiles are tried with one format and length, or with every format and length if `crossed`.
    """
    places = list(itertools.product(FORMATS, LENGTHS))
    found = []
    for name, arm in ARMS.items():
        if arm.platform not in (None, jax.default_backend()):
            continue
        in_tiles = arm.implementation == "tiled"
        found += [Case(name, *place, TILE if in_tiles else None) for place in places]
        if in_tiles:
            of_tiles = places if crossed else [(FORMATS[0], LENGTH)]
            found += [Case(name, *place, tile) for place in of_tiles for tile in TILES]
    return list(dict.fromkeys(found))


def measure(case: Case, seeds: int) -> list[dict[str, Any]]:
    """Returns a record for each seed and tensor.

    A record holds the case, the RMS of the tensor's exact values (`size`), and four statistics of
    the deviation. `signed_error` computes them by head. `max` is the largest of the heads, `rms` is
    their RMS, and `mean` and `coherence` are their means.
    """
    function = _compiled(case)
    records = []
    for seed in range(seeds):
        problem, exact = _exact(case.format, case.length, seed)
        found = function(problem)
        records += [
            {**case._asdict(), "seed": seed, "tensor": WORDS[n], **_statistics(found[n], exact[n])}
            for n in RESULTS
        ]
    return records


def _compiled(case: Case) -> Callable[[Problem], Found]:
    """Returns a function that computes the results of a problem."""
    arm = ARMS[case.arm]
    options: dict[str, Any] = {"implementation": arm.implementation}
    function: Any = jax.nn.dot_product_attention
    if arm.numerics is not None:
        function = attention.dot_product_attention
        numerics = arm.numerics.with_format(case.format)
        if not numerics.normalize_probs:
            numerics = numerics.replace(kv_block=min((case.tile or TILE)[1], case.length))
        options["numerics"] = numerics
        if case.tile is not None:
            query, keys = (min(side, case.length) for side in case.tile)
            options["block_sizes"] = tiled.BlockSizes(query=query, kv_bwd=keys)
    return fidelity.called(function, **options)


# The exact results are cached, because several arms and tiles share a format and a length.
@functools.lru_cache(maxsize=64)
def _exact(fmt: str, length: int, seed: int) -> tuple[Problem, Found]:
    """Draws normal q, k, v and dO in a format, and computes their float64 results."""
    rng = np.random.default_rng(seed)
    arrays = normal(rng, 1, (length, length), (HEADS, HEADS), HEAD_SIZE)
    problem = formed("normal", "", arrays, fmt, causal=True)
    return problem, results(problem, *both_passes(problem))


def _statistics(found: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    # The difference is taken in float64, because float32 could not resolve float32 results' errors.
    difference = (found - exact).astype(np.float32)
    heads = signed_error(jnp.asarray(difference), jnp.zeros(exact.shape, jnp.float32))
    by_head = {name: np.asarray(x).astype(np.float64) for name, x in heads.items()}
    values = {
        "size": math.sqrt(np.mean(exact**2)),
        "max": by_head["max"].max(),
        "mean": by_head["mean"].mean(),
        "rms": math.sqrt(np.mean(by_head["rms"] ** 2)),
        "coherence": by_head["coherence"].mean(),
    }
    return {name: float(f"{x:.6g}") for name, x in values.items()}


def table(records: Sequence[Record]) -> str:
    """Returns a table with one row per case, averaged over the seeds.

    It shows the largest and the RMS deviation of O and dQ, the RMS deviation divided by the RMS of
    the exact values (`part`), and the coherence of all tensors.
    """
    shown = [(t, name) for t in ("O", "dQ") for name in ("max", "rms", "part")]
    shown += [(t, "coherence") for t in TENSORS]
    by_case: dict[Any, list[Record]] = {}
    for r in records:
        tile = "–" if r["tile"] is None else "{} x {}".format(*r["tile"])
        by_case.setdefault((r["format"], r["arm"], str(r["length"]), tile), []).append(r)
    rows = [["format", "arm", "length", "tile"]]
    rows[0] += [f"{t} {name.removesuffix('rence')}" for t, name in shown]
    for case, of_case in by_case.items():
        values = (
            statistics.mean(
                r["rms"] / r["size"] if name == "part" else r[name]
                for r in of_case
                if r["tensor"] == tensor
            )
            for tensor, name in shown
        )
        forms = (".1f" if name == "coherence" else ".2e" for _, name in shown)
        rows.append([*case, *map(format, values, forms)])
    return columns(rows, "<<>>" + ">" * len(shown))


def figure(records: Sequence[Record]) -> Figure:
    """Draws the largest and the RMS deviation of each tensor by format, one point per seed."""
    chosen = [r for r in records if r["length"] == LENGTH and tuple(r["tile"] or TILE) == TILE]
    arms = [name for name in ARMS if any(r["arm"] == name for r in chosen)]
    drawn = Figure(figsize=(style.WIDTH, 8.6), layout="constrained")
    panels = drawn.subplots(len(TENSORS), 2, sharex="all", sharey="col")
    for column, name in enumerate(("max", "rms")):
        for axis, tensor in zip(panels[:, column], TENSORS, strict=True):
            for i, arm in enumerate(arms):
                of_arm = [r for r in chosen if (r["arm"], r["tensor"]) == (arm, tensor)]
                # Arms are shifted sideways, because the points of several arms coincide.
                place = [FORMATS.index(r["format"]) + 0.12 * (i - len(arms) / 2) for r in of_arm]
                axis.plot(place, [r[name] for r in of_arm], "o", ms=4, label=arm)
            axis.set(yscale="log", ylabel=tensor if column == 0 else "")
            axis.set_xticks(range(len(FORMATS)), [_SHORT[name] for name in FORMATS])
            axis.grid(**style.GRID)
        panels[0, column].set_title({"max": "largest", "rms": "RMS"}[name])
    drawn.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    drawn.suptitle(
        f"deviation from float64 at length {LENGTH},\ntiles of {TILE[0]} x {TILE[1]}",
        fontsize=style.TITLE,
    )
    return drawn


def apart(base: Path, other: Path) -> tuple[int, float, float]:
    """Compares the weights of two runs at their newest checkpoints.

    Returns:
      The step, the largest difference, and the mean Wasserstein distance of the tensors.

    Raises:
      UserError: one of them is not a run directory or has no checkpoint, or the checkpoints differ
        in step or model.
    """
    (step, a), (theirs, b) = _weights(base), _weights(other)
    shapes = [{name: x.shape for name, x in weights.items()} for weights in (a, b)]
    if step != theirs or shapes[0] != shapes[1]:
        raise RunError(
            f"{base} is at step {step} and {other} at {theirs}; compare runs of one length and "
            "models of one shape"
        )
    largest = max(float(np.max(np.abs(a[name] - b[name]))) for name in a)
    moved = [wasserstein_distance(a[name].ravel(), b[name].ravel()) for name in a]
    return step, largest, float(np.average(moved, weights=[x.size for x in a.values()]))


def _weights(path: Path) -> tuple[int, dict[str, np.ndarray]]:
    saved = restore(settings_of(path), RunDir(path))
    if saved is None:
        raise RunError(f"{path} has no complete checkpoint; train it with checkpoint_every")
    leaves = jax.tree.leaves_with_path(jax.device_get(saved.params))
    return saved.step, {
        jax.tree_util.keystr(place): np.asarray(x).astype(np.float64) for place, x in leaves
    }


def _measure_all(crossed: bool) -> Iterator[dict[str, Any]]:
    """Yields the records of all cases, and prints what a device or a library lacks."""
    for case in cases(crossed):
        try:
            yield from measure(case, seeds=1 if crossed else 3)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            # JAX raises any of these if a device or a library lacks a format.
            ours = ARMS[case.arm].numerics is not None
            if ours and not isinstance(error, attention.UnsupportedError):
                raise
            print(f"note: {case} is left out: {str(error).splitlines()[0]}", flush=True)


@program.told
def main() -> None:
    """Measures deviations and draws them, or compares weights."""
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("directory", type=Path, nargs="?", metavar="DIR", help="of records and figure")
    add("--crossed", action="store_true", help="every tile in every format at every length")
    add("--read", action="store_true", help="measure nothing")
    add("--weights", type=Path, nargs="+", metavar="RUN", help="run directories, the base first")
    args = parser.parse_args()
    if (args.directory is None) == (args.weights is None):
        parser.error("give DIR, or --weights with run directories")
    if args.weights:
        _compare(*args.weights)
    else:
        _deviate(args)


def _compare(base: Path, *others: Path) -> None:
    rows = [["run", "step", "largest difference", "Wasserstein distance"]]
    for other in others:
        step, largest, moved = apart(base, other)
        rows.append([str(other), str(step), f"{largest:.2e}", f"{moved:.2e}"])
    print(columns(rows, "<>>>"))


def _deviate(args: argparse.Namespace) -> None:
    path = args.directory / "attention.jsonl"
    if not args.read:
        make_directory(args.directory)
        records = list(_measure_all(args.crossed))
        text = "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in records)
        write_atomically(path, text.encode())
        write_json(args.directory / "measured.json", {"environment": environment.describe()})
    records = [json.loads(line) for line in complete_lines(path)]
    print(table(records))
    write_figure(args.directory / "formats.png", figure(records))
    print(args.directory / "formats.png")


if __name__ == "__main__":
    sys.exit(main())
