"""Which arithmetic explains a kernel's results: presets and their one-point changes, emulated.

The emulation is `tiled` on the CPU, operation by operation, for all core problems at once: nothing
is compiled for one arithmetic alone. The search begins at every preset with one step over all keys,
goes on with tiles and exponents of the nearest ones, and then changes one point at a time as long
as that brings the results clearly nearer.
"""

import contextlib
import dataclasses
import functools
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
_LEAST = 1e-6  # distances below are float32's
_CLEARLY = 0.8  # a change must bring the distance below this part of it
_ALIKE = 1.5  # two arithmetics are told apart by a distance larger by this factor
_BEGIN_AT = 3  # presets whose tiles are tried

# What the nearest preset is changed by, one at a time: a name for it, and the fields.
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

# What others compute beside the presets. Eager attention in 16 bits, as of transformers, rounds the
# result of every operation: of q kᵀ, and again of its product with the scale, unless that is a
# power of two. One rounding to a bit less errs as much as the two.
_TWICE = "bf16_m6"
_EAGER = PRESETS["jax_nn"].replace(scores="bfloat16", shift="bfloat16", ds="bfloat16")
OTHERS = {
    "eager": _EAGER,
    "eager_scaled": _EAGER.replace(scores=_TWICE),
    "tf32": EXACT.replace(scores="f32_m10", probs="f32_m10", probs_bwd="f32_m10", ds="f32_m10"),
}
BY_NAME = PRESETS | OTHERS

# Presets that others contain, or that no kernel repeats; those of 8 bits are of other arrays.
_NOT_BEGUN_WITH = (
    *("stochastic_output", "published_as_compiled"),
    *("flash_attention_3_fp8", "transformer_engine_fp8"),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An arithmetic: a preset, in the format of the arrays, and what of it is changed."""

    preset: str
    numerics: Numerics
    base: Numerics

    @property
    def changes(self) -> dict[str, str]:
        """The fields in which it differs from its preset, but for tile and exponent."""
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
    """How near a candidate is: the distance of each result, averaged over the problems."""

    candidate: Candidate
    found: Found
    distances: Mapping[str, float]

    @property
    def distance(self) -> float:
        """Geometric mean over the results; infinite where a bug has spoilt all of them."""
        if not self.distances:
            return np.inf
        return float(np.exp(np.mean([np.log(d) for d in self.distances.values()])))


class Emulation:
    """Candidates' results on problems of one shape; each is computed once.

    Args:
      problems: of one shape, scale, causality, window and soft cap; several have one sequence
        each and no mask. They stand side by side as heads of one call: so each has its own sinks
        and bias.
      dtype: name of their format.
    """

    def __init__(self, problems: Sequence[Problem], dtype: str) -> None:
        self.problems, self.dtype = problems, dtype
        self._arrays = [_side_by_side(x) for x in zip(*(p.arrays for p in problems), strict=True)]
        maskings = [p.masking for p in problems]
        self._extras = {
            name: np.concatenate([getattr(m, name) for m in maskings], axis)
            for name, axis in (("bias", 1), ("sinks", 0), ("mask", 1))
            if getattr(maskings[0], name) is not None
        }
        self._found: dict[tuple[Numerics, int | None], Found] = {}

    def presets(self) -> list[Candidate]:
        """All presets in one step over all keys, in the problems' format."""
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
            if numerics.recomputed_probs == "rounded":  # float16's subnormals: refused
                return numerics.replace(output=None)
            numerics = numerics.with_format("float16")
            once_less = str(numerics.scores) == _TWICE
            return numerics.replace(scores="f32_m9") if once_less else numerics
        return numerics.replace(output=None)

    def run(self, numerics: Numerics, tile: int | None = None) -> Found:
        """The results of all problems as rows in float64, problem by problem on the first axis.

        Args:
          numerics: of every head.
          tile: queries, and keys in the backward pass, of a tile: the order of sums. None: all.

        Raises:
          UnsupportedError: this arithmetic is not defined for the problems, as with a soft cap.
        """
        key = numerics, tile
        if key not in self._found:
            problem = self.problems[0]
            # `dense` is `tiled` with one tile, in a fifth of the operations.
            is_dense = tile is None and numerics.kv_block == "all"
            sizes = BlockSizes(query=tile or 256, kv_bwd=tile or 256)
            settings: Any = {
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

            def attend(q: Any, k: Any, v: Any, extras: dict[str, Any], **hidden: Any) -> Any:
                return attention.dot_product_attention(q, k, v, **extras, **hidden, **settings)

            with _on_the_cpu(), jax.disable_jit(), np.errstate(all="ignore"):
                q, k, v, do = map(jnp.asarray, self._arrays)
                extras = {name: jnp.asarray(x) for name, x in self._extras.items()}
                hidden: Any = {n: extras.pop(n) for n in ("mask",) if n in extras}
                of = functools.partial(attend, **hidden)
                (o, lse), pullback = jax.vjp(of, q, k, v, extras)
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
        """Rows of all problems [1, rows, P N, H] as [P, rows, N, H]."""
        count = len(self.problems)
        if count == 1:
            return x
        _, rows, heads, size = x.shape
        return np.moveaxis(x.reshape(rows, count, heads // count, size), 1, 0)


def _side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays, axis=2)


@contextlib.contextmanager
def _on_the_cpu() -> Iterator[None]:
    """
    Raises:
      UserError: JAX has no CPU here.
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
      emulation: of the core problems.
      exact: of the same problems.
      found: the kernel's results of each problem; None where it has none.
      left_out: pairs of a problem's index and a result, which a bug has spoilt.
    """

    def __init__(
        self,
        emulation: Emulation,
        exact: Sequence[Exact],
        found: Sequence[Found | None],
        left_out: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self._emulation, self._exact, self._found = emulation, exact, found
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
        """The distance of a candidate."""
        found = self._emulation.run(candidate.numerics)
        return Match(candidate, found, self.distances(found, None))

    def distances(self, found: Found, other: Found | None) -> dict[str, float]:
        """Of each result, the geometric mean over the problems of the RMS distance of its rows.

        Args:
          found: results of a candidate.
          other: of another; None: the kernel's.
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
        """Every candidate tried, nearest first."""
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
            tries = map(attempt, _changed(best.candidate, self._emulation.dtype))
            changed = [match for match in tries if match is not None]
            if not changed:
                break
            nearer = min(changed, key=lambda m: m.distance)
            if nearer.distance >= _CLEARLY * best.distance:
                break
            best = nearer
        ranked = sorted(tried.values(), key=lambda m: m.distance)
        # Of arithmetics as near as each other, that with the fewest changes names it.
        alike = [m for m in ranked if self.is_alike(m, best)]
        first = min(alike, key=lambda m: (len(m.candidate.changes), m.distance))
        return [first, *(m for m in ranked if m is not first)]

    def noise(self, match: Match) -> dict[str, float]:
        """What the order of sums alone changes: the same arithmetic in tiles of another size."""
        numerics = match.candidate.numerics
        if numerics not in self._noises:
            other = match.found  # of all keys at once, where P must be divided before rounding
            if not numerics.normalize_probs:
                other = self._emulation.run(numerics, tile=48)
            self._noises[numerics] = self.distances(other, match.found)
        return self._noises[numerics]

    def is_alike(self, match: Match, best: Match) -> bool:
        """Whether no result tells two candidates apart by more than the order of sums explains."""
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


def _changed(candidate: Candidate, dtype: str) -> Iterator[Candidate]:
    low = "float16" if dtype == "float16" else "bfloat16"
    rounded = ({point: fmt} for point in _ROUNDED for fmt in ("float32", low))
    changes: list[Mapping[str, object]] = [*rounded, *_CHOICES]
    for change in changes:
        with contextlib.suppress(ValueError):  # choices that exclude each other
            numerics = candidate.numerics.replace(**change)
            if numerics != candidate.numerics:
                yield dataclasses.replace(candidate, numerics=numerics)
    for numerics in _tiles_and_exponents(candidate.numerics):
        yield dataclasses.replace(candidate, numerics=numerics)
