"""Finds the arithmetic that explains a kernel's results, by emulating presets and changes of them.

The emulation runs `tiled` on the CPU, operation by operation, for all core problems at once, so
that nothing is compiled for a single arithmetic. The search starts from every preset, with one step
over all keys. It then tries other tiles and exponents of the nearest presets. Finally it changes
one point at a time, for as long as this brings the results clearly nearer.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import attention
from lowprec_attn.attention.tiled import BlockSizes
from lowprec_attn.check.measure import RESULTS, Exact, Found
from lowprec_attn.check.problems import Problem
from lowprec_attn.errors import UserError
from lowprec_attn.numerics import EXACT, PRESETS, Numerics

TILES = (64, 128)
_LEAST = 1e-6  # smaller distances are float32 rounding
_CLEARLY = 0.8  # a change must bring the distance below this part of the former distance
_ALIKE = 1.5  # two arithmetics can be told apart if their distances differ by more than this factor
_BEGIN_AT = 3  # number of presets whose tiles and exponents are tried

# Changes of the nearest preset, tried one at a time: a point is rounded or not, or fields change.
_ROUNDED = ("scores", "probs", "probs_bwd", "ds", "pv", "dp", "normalizer")
_CHOICES: tuple[Mapping[str, object], ...] = (
    {"scores": "f32_m10"},  # TF32
    *(
        {"delta": way, "saved_output": "same"}
        for way in ("do_o", "dp_p", "normalized", "after_cast")
    ),
    *({"delta": "do_o", "saved_output": o} for o in ("float32", "halves", "auxiliary")),
    {"normalize_probs": True, "kv_block": "all"},
    {"normalize_probs": False},
    {"row_sum": "rounded"},
    {"row_sum": "unrounded"},
)
# The fields that the forward pass does not read.
_OF_BACKWARD = {"probs_bwd", "ds", "dp", "delta", "saved_output"}

# Arithmetics of other libraries that are not presets. Eager attention in 16 bits, as in Hugging
# Face's transformers, rounds the result of every operation: it rounds q kᵀ, and then its product
# with the scale, unless the scale is a power of two. `_TWICE` stands for these two roundings,
# because one rounding to a bit less has an equal error.
_TWICE = "bf16_m6"
_EAGER = PRESETS["jax_nn"].replace(scores="bfloat16", shift="bfloat16", ds="bfloat16")
OTHERS = {
    "eager": _EAGER,
    "eager_scaled": _EAGER.replace(scores=_TWICE),
    "tf32": EXACT.replace(scores="f32_m10", probs="f32_m10", probs_bwd="f32_m10", ds="f32_m10"),
}
BY_NAME = PRESETS | OTHERS

# The search does not start from these presets: other presets contain them, no kernel repeats them,
# or, for the 8-bit ones, they belong to other input arrays.
_NOT_BEGUN_WITH = (
    *("stochastic_output", "published_as_compiled"),
    *("flash_attention_3_fp8", "transformer_engine_fp8"),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An arithmetic: a preset, possibly changed.

    Attributes:
      preset: the preset's name.
      numerics: the preset in the format of the arrays, with the changes.
      base: the preset in the format of the arrays, without them.
    """

    preset: str
    numerics: Numerics
    base: Numerics

    @property
    def changes(self) -> dict[str, str]:
        """The changed fields and their values, except for `kv_block`, `exponent` and `output`."""
        base = self.base
        names = (field.name for field in dataclasses.fields(base))
        return {
            name: str(getattr(self.numerics, name))
            for name in names
            if name not in ("kv_block", "exponent", "output")
            and getattr(self.numerics, name) != getattr(base, name)
        }

    def __str__(self) -> str:
        changes = [f"{name}={value}" for name, value in self.changes.items()]
        return f"{self.preset}{' with ' if changes else ''}{', '.join(changes)}"


@dataclasses.dataclass(frozen=True)
class Match:
    """A candidate's results, and the distance of each from the kernel's, averaged over problems."""

    candidate: Candidate
    found: Found
    distances: Mapping[str, float]

    @property
    def distance(self) -> float:
        """The geometric mean over the results, or infinity if a bug has spoilt all of them."""
        if not self.distances:
            return np.inf
        return float(np.exp(np.mean([np.log(d) for d in self.distances.values()])))


class Emulation:
    """Computes candidates' results on problems of one shape, each of them once.

    Args:
      problems: they share one shape, scale, causality, window and soft cap. If there are several,
        each has one sequence and no mask. They are put side by side as heads of one call, so each
        keeps its own sinks and bias.
      dtype: the name of the problems' format.
    """

    def __init__(self, problems: Sequence[Problem], dtype: str) -> None:
        self.problems, self.dtype = problems, dtype
        arrays = zip(*(p.arrays for p in problems), strict=True)
        self._arrays = [np.concatenate(x, axis=2) for x in arrays]
        maskings = [p.masking for p in problems]
        self._extras = {
            name: np.concatenate([getattr(m, name) for m in maskings], axis)
            for name, axis in (("bias", 1), ("sinks", 0), ("mask", 1))
            if getattr(maskings[0], name) is not None
        }
        self._found: dict[tuple[Numerics, int | None], Found] = {}

    def presets(self) -> list[Candidate]:
        """Returns all presets in the problems' format, with one step over all keys."""
        return [
            Candidate(name, base.replace(kv_block="all"), base)
            for name, numerics in BY_NAME.items()
            if name not in _NOT_BEGUN_WITH
            for base in (self._in_format(numerics),)
        ]

    def _in_format(self, numerics: Numerics) -> Numerics:
        if self.dtype == "bfloat16":
            return numerics
        if self.dtype == "float16":
            if numerics.recomputed_probs == "rounded":  # refused because of float16's subnormals
                return numerics.replace(output=None)
            numerics = numerics.with_format("float16")
            once_less = str(numerics.scores) == _TWICE
            return numerics.replace(scores="f32_m9") if once_less else numerics
        return numerics.replace(output=None)

    def run(self, numerics: Numerics, tile: int | None = None) -> Found:
        """Returns the results of all problems as float64 rows, with the problems on the first axis.

        Args:
          numerics: the arithmetic of every head.
          tile: the number of queries, and of keys in the backward pass, in a tile. It sets the
            order of sums. None: 256, or everything at once if `kv_block` is `all`.

        Raises:
          UnsupportedError: this arithmetic is not defined for the problems, for example with a soft
            cap.
        """
        key = numerics, tile
        if key not in self._found:
            problem = self.problems[0]
            # `dense` computes what `tiled` does with one tile, in a fifth of the operations.
            is_dense = tile is None and numerics.kv_block == "all"
            sizes = BlockSizes(query=tile or 256, kv_bwd=tile or 256)
            settings: Any = {
                "mask": self._extras.get("mask"),
                "is_causal": problem.masking.is_causal,
                "local_window_size": problem.masking.window,
                "query_offset": problem.masking.query_offset,
                "scale": problem.scale,
                "logits_soft_cap": problem.soft_cap,
                "numerics": numerics,
                "implementation": "dense" if is_dense else "tiled",
                "block_sizes": None if is_dense else sizes,
                "return_residual": True,
            }

            def attend(q: Any, k: Any, v: Any, extras: dict[str, Any]) -> Any:
                return attention.dot_product_attention(q, k, v, **extras, **settings)

            with _on_the_cpu(), jax.disable_jit(), np.errstate(all="ignore"):
                q, k, v, do = map(jnp.asarray, self._arrays)
                extras = {n: jnp.asarray(x) for n, x in self._extras.items() if n != "mask"}
                (o, lse), pullback = jax.vjp(attend, q, k, v, extras)
                given = np.zeros(lse.shape) if problem.dlse is None else problem.dlse
                dlse = jnp.asarray(given, lse.dtype)
                *grads, of_extras = pullback((do.astype(o.dtype), dlse))
            rows = zip(("o", "dq", "dk", "dv", "lse"), (o, *grads, lse[..., None]), strict=True)
            found = {n: self._apart(np.asarray(x).astype(np.float64)) for n, x in rows}
            for name, x in of_extras.items():
                x = np.asarray(x).astype(np.float64)
                x = x.swapaxes(1, 2) if name == "bias" else x[None, None, :, None]
                found[f"d{name}"] = self._apart(x)
            self._found[key] = found
        return self._found[key]

    def _apart(self, x: np.ndarray) -> np.ndarray:
        """Reshapes rows of all P problems, [1, rows, P N, H], to [P, rows, N, H]."""
        count = len(self.problems)
        if count == 1:
            return x
        _, rows, heads, size = x.shape
        return np.moveaxis(x.reshape(rows, count, heads // count, size), 1, 0)


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Makes the CPU JAX's default device within the block.

    Raises:
      UserError: JAX has no CPU backend here.
    """
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "the arithmetics are emulated on the CPU, which JAX_PLATFORMS leaves out; "
            "set JAX_PLATFORMS=cuda,cpu"
        ) from error
    with jax.default_device(device):
        yield


class Search:
    """Finds the candidate nearest to a kernel's results.

    Args:
      emulation: the emulation of the core problems.
      exact: the exact results of the same problems.
      found: the kernel's results of each problem, or None where it has none.
      left_out: pairs of a problem's index and the name of a result that a bug has spoilt there.
    """

    def __init__(
        self,
        emulation: Emulation,
        exact: Sequence[Exact],
        found: Sequence[Found | None],
        left_out: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self._emulation, self._exact, self._found = emulation, exact, found
        self._backward = any(of is not None and "dq" in of for of in found)
        self._noises: dict[Numerics, dict[str, float]] = {}
        self._counted = {
            name: [
                i
                for i, of in enumerate(found)
                if of is not None and name in of and (i, name) not in left_out
            ]
            for name in RESULTS
        }

    def match(self, candidate: Candidate) -> Match:
        """Runs a candidate and returns its results and distances."""
        found = self._emulation.run(candidate.numerics)
        return Match(candidate, found, self.distances(found, None))

    def distances(self, found: Found, other: Found | None) -> dict[str, float]:
        """Returns the distance of each result: the RMS over rows, geometric mean over problems.

        Args:
          found: the results of a candidate.
          other: the results of another candidate to compare with, or None for the kernel's results.
        """
        distances = {}
        for name, counted in self._counted.items():
            logs = []
            for i in counted:
                kernel = self._found[i]
                assert kernel is not None
                x = kernel[name] if other is None else other[name][i : i + 1]
                rows = np.linalg.norm(x - found[name][i : i + 1], axis=-1)
                rows = rows / self._exact[i].units[name]
                rows = np.where(np.isfinite(rows), rows, 1.0)
                logs.append(np.log(np.clip(np.sqrt((rows**2).mean()), _LEAST, 1.0)))
            if logs:
                distances[name] = float(np.exp(np.mean(logs)))
        return distances

    def nearest(self) -> list[Match]:
        """Returns every candidate that was tried, nearest first.

        The first one is the simplest: of all that are alike to the nearest, it has the fewest
        changes.
        """
        tried: dict[Numerics, Match] = {}

        def attempt(candidate: Candidate) -> Match | None:
            if candidate.numerics not in tried:
                try:
                    tried[candidate.numerics] = self.match(candidate)
                except attention.UnsupportedError:
                    return None
            return tried[candidate.numerics]

        of_presets = filter(None, map(attempt, self._emulation.presets()))
        begun = sorted(of_presets, key=lambda m: m.distance)
        for match in begun[:_BEGIN_AT]:
            for change in _tiles_and_exponents(match.candidate.numerics):
                attempt(dataclasses.replace(match.candidate, numerics=change))
        best = min(tried.values(), key=lambda m: m.distance)
        while True:
            tries = map(attempt, _changed(best.candidate, self._emulation.dtype, self._backward))
            changed = [match for match in tries if match is not None]
            if not changed:
                break
            nearer = min(changed, key=lambda m: m.distance)
            if nearer.distance >= _CLEARLY * best.distance:
                break
            best = nearer
        ranked = sorted(tried.values(), key=lambda m: m.distance)
        # Among arithmetics that are equally near, prefer the one with the fewest changes.
        alike = [m for m in ranked if self.is_alike(m, best)]
        first = min(alike, key=lambda m: (len(m.candidate.changes), m.distance))
        return [first, *(m for m in ranked if m is not first)]

    def noise(self, match: Match) -> dict[str, float]:
        """Returns how far the order of sums moves each result: the distance to other tile sizes."""
        numerics = match.candidate.numerics
        if numerics not in self._noises:
            # Dividing P by l before rounding it takes all keys at once: there are no other tiles.
            other = match.found
            if not numerics.normalize_probs:
                other = self._emulation.run(numerics, tile=48)
            self._noises[numerics] = self.distances(other, match.found)
        return self._noises[numerics]

    def is_alike(self, match: Match, best: Match) -> bool:
        """Whether no result is clearly farther from `match` than from `best`.

        Distances that the order of sums explains do not count.
        """
        noise = self.noise(best)
        return all(
            match.distances[name] <= _ALIKE * max(distance, noise[name])
            for name, distance in best.distances.items()
        )


def _tiles_and_exponents(numerics: Numerics) -> Iterator[Numerics]:
    if numerics.normalize_probs:
        return
    for kv_block in TILES:
        yield numerics.replace(kv_block=kv_block)
    if numerics.exponent is None and numerics.shift.is_identity:
        yield numerics.replace(exponent="scale_first")


def _changed(candidate: Candidate, dtype: str, backward: bool) -> Iterator[Candidate]:
    low = "float16" if dtype == "float16" else "bfloat16"
    rounded = ({point: fmt} for point in _ROUNDED for fmt in ("float32", low))
    changes: list[Mapping[str, object]] = [*rounded, *_CHOICES]
    for change in changes:
        if not backward and _OF_BACKWARD.issuperset(change):
            continue
        with contextlib.suppress(ValueError):  # choices that exclude each other
            numerics = candidate.numerics.replace(**change)
            if numerics != candidate.numerics:
                yield dataclasses.replace(candidate, numerics=numerics)
    for numerics in _tiles_and_exponents(candidate.numerics):
        yield dataclasses.replace(candidate, numerics=numerics)
