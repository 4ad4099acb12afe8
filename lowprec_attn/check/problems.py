"""Makes small, hard, named inputs of attention.

All `core` problems share one shape, so that a candidate arithmetic can run all of them in one call.
Each of the `features` problems adds one thing: odd lengths, grouped heads, a mask, another scale, a
window, a soft cap, sinks, a bias or a gradient of lse. Values are rounded to the requested dtype,
so that the float64 reference sees the same values as the kernel.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from lowprec_attn.attention import reference
from lowprec_attn.attention.reference import Masking
from lowprec_attn.check.inputs import KINDS, Arrays, drawn, normal

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

# The size of a core problem. 160 tokens fill 2.5 tiles of 64, or 1.25 tiles of 128.
TOKENS, HEADS, HEAD_SIZE = 160, 2, 64
_SOFT_CAP = 2.0  # the cap of the soft-cap problem, whose scores reach ± 4
_BIAS = 2.0  # the standard deviation of a bias


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one call: q, dO [B, T, N, H], k, v [B, S, K, H], and which keys a row sees.

    Attributes:
      name: the problem's name, for example `clustered keys, scores up to 1,000`.
      about: a description in a few words.
      scale: the factor of q kᵀ.
      masking: which keys a row sees. It also holds the bias [1, N, T, S] and the sinks [N] if there
        are any, in the dtype of q.
      needs: what a kernel must be able to do: `causal` or `full`, and any of `groups`, `lengths`
        (unequal numbers of keys and queries), `mask`, `scale` (other than 1/√H), `window`,
        `soft_cap`, `sinks`, `bias` and `lse` (a gradient of lse).
      soft_cap: c in c tanh(q kᵀ · scale / c), or None.
      dlse: the gradient of the loss by lse, float32 [B, T, N], or None.
    """

    name: str
    about: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: float
    masking: Masking
    needs: frozenset[str]
    soft_cap: float | None = None
    dlse: np.ndarray | None = None

    @property
    def arrays(self) -> Arrays:
        """q, k, v and dO."""
        return self.q, self.k, self.v, self.do

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments for `reference.attention`."""
        return {"scale": self.scale, "soft_cap": self.soft_cap, "masking": self.masking}

    def replace(self, **changes: object) -> "Problem":
        """Returns a copy with the given fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def masked(self, **changes: object) -> "Problem":
        """Returns a copy with the given fields of its masking replaced."""
        return self.replace(masking=dataclasses.replace(self.masking, **changes))  # type: ignore[arg-type]


def products(problem: Problem) -> np.ndarray:
    """Returns q kᵀ · scale in float64 [B, N, T, S], before a soft cap."""
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return reference.pairs(q, k) * problem.scale


def scores(problem: Problem) -> np.ndarray:
    """Returns S in float64 [B, N, T, S], including the scores of hidden keys."""
    everywhere = Masking(bias=problem.masking.bias)
    settings = problem.settings | {"masking": everywhere}
    return reference.attention(problem.q, problem.k, problem.v, **settings).s


def core(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """Returns the problems on which arithmetics differ, all of one shape."""
    shape = (tokens, HEADS, head_size)
    kinds: list[tuple[str, str, Arrays]] = [
        (up_to(score, words), about, drawn(kind, score, shape, seed))
        for words, kind, about, scores in (
            ("normal inputs", "normal", "nothing is shared", (4e0, 1e2, 1e4)),
            (
                "clustered keys",
                "clustered",
                "keys near six directions, values with a common part",
                CLUSTERED,
            ),
        )
        for score in scores
    ]
    rng = np.random.default_rng(seed + 2)
    kinds += [(name, about, make(rng, shape)) for name, about, make in KINDS]
    return [formed(name, about, x, dtype, causal=causal) for name, about, x in kinds]


CLUSTERED = (1e1, 1e2, 1e3, 1e4)


def up_to(score: float, words: str = "clustered keys") -> str:
    """Returns the name of a problem whose largest |score| is `score`."""
    return f"{words}, scores up to {score:,.0f}"


def extremes(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """Returns a problem with scores up to 1e7, or no problem in float16.

    Every row puts all its weight on one key, and every result must be finite.
    """
    if dtype == "float16":
        return []
    x = drawn("clustered", 1e7, (tokens, HEADS, head_size), seed)
    return [formed(up_to(1e7), "rows of one key, scores of 1e7", x, dtype, causal=causal)]


def features(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, seed: int = 0
) -> list[Problem]:
    """Returns one problem for each further thing that a kernel may get wrong."""
    rng = np.random.default_rng(seed + 3)

    def made(
        name: str,
        about: str,
        lengths: tuple[int, int],
        heads: tuple[int, int] = (2, 2),
        *,
        mask: Callable[[], np.ndarray] | None = None,
        scale: float | None = None,
        batch: int = 1,
    ) -> Problem:
        x = normal(rng, batch, lengths, heads, head_size)
        problem = formed(name, about, x, dtype, causal=causal, scale=scale)
        return problem if mask is None else _masked(problem, mask())

    one = np.arange(150)
    plain = [
        made("seven tokens", "far less than a tile", (7, 7)),
        made("odd length", "the last tile is not full", (203, 203)),
        made("a batch", "three sequences", (130, 130), batch=3),
        made("long", "several tiles of any size", (256, 256)),
        made("grouped heads", "four query heads, two key heads", (130, 130), (4, 2)),
        made("one key head", "six query heads, one key head", (66, 66), (6, 1)),
        made("fewer queries", "37 queries, 203 keys", (37, 203)),
        made("fewer keys", "203 queries, 37 keys", (203, 37)),
        made("another scale", "three times 1/√H", (100, 100), scale=3 * head_size**-0.5),
        made("left padding", "40 keys hidden first", (150, 150), mask=lambda: (one >= 40)[None]),
        made("right padding", "40 keys hidden last", (150, 150), mask=lambda: (one < 110)[None]),
        made(
            "packed segments",
            "documents of 61, 50 and 39 tokens",
            (150, 150),
            mask=lambda: np.equal.outer(*2 * (np.searchsorted((60, 110), one),)),
        ),
    ]
    return [
        *plain,
        windowed(made("local window", "20 keys before, 9 behind", (150, 150)), (20, 9)),
        capped(made("soft cap", "scores reach twice the cap", (130, 130)), _SOFT_CAP),
        with_sinks(made("attention sinks", "half of a row's weight", (130, 130), batch=2), seed),
        biased(made("additive bias", "a number for each pair", (130, 130), batch=2), seed),
        _with_dlse(made("gradient of lse", "beside that of O", (130, 130)), rng),
        _with_dlse(
            with_sinks(made("gradient of lse, sinks", "beside that of O", (66, 66)), seed), rng
        ),
    ]


def windowed(problem: Problem, window: tuple[int, int]) -> Problem:
    """Adds a window (left, right): row t sees only the keys t − left to t + right."""
    return seeing(problem.masked(window=window).replace(needs=problem.needs | {"window"}))


def capped(problem: Problem, soft_cap: float) -> Problem:
    """Adds a soft cap c: scores become c tanh(q kᵀ · scale / c)."""
    return problem.replace(soft_cap=soft_cap, needs=problem.needs | {"soft_cap"})


def with_sinks(problem: Problem, seed: int) -> Problem:
    """Adds a sink to every head, near the median lse of its rows.

    Such a sink takes about half of the weight of many rows.
    """
    of = reference.attention(problem.q, problem.k, problem.v, **problem.settings)
    draw = np.random.default_rng(seed + 4).standard_normal(problem.q.shape[2])
    lse = np.where(np.isfinite(of.lse), of.lse, np.nan)
    sinks = (np.nanmedian(lse, axis=(0, 1)) + draw).astype(problem.q.dtype)
    return problem.masked(sinks=sinks).replace(needs=problem.needs | {"sinks"})


def biased(problem: Problem, seed: int) -> Problem:
    """Adds a random bias for every head, query and key."""
    shape = (1, problem.q.shape[2], problem.q.shape[1], problem.k.shape[1])
    bias = _BIAS * np.random.default_rng(seed + 5).standard_normal(shape)
    bias = bias.astype(problem.q.dtype)
    return problem.masked(bias=bias).replace(needs=problem.needs | {"bias"})


def _with_dlse(problem: Problem, rng: np.random.Generator) -> Problem:
    dlse = rng.standard_normal(problem.q.shape[:3]).astype(np.float32)
    return problem.replace(dlse=dlse, needs=problem.needs | {"lse"})


def seeing(problem: Problem) -> Problem:
    """Sets dO and dlse to 0 in rows that see no key, since a loss leaves such rows out."""
    s = reference.attention(problem.q, problem.k, problem.v, **problem.settings).s
    sees = np.any(s > -np.inf, axis=-1).swapaxes(1, 2)
    dlse = None if problem.dlse is None else np.where(sees, problem.dlse, np.float32(0))
    do = np.where(sees[..., None], problem.do, np.zeros((), problem.do.dtype))
    return problem.replace(do=do, dlse=dlse)


def padded(problem: Problem, multiple: int) -> Problem:
    """Pads rows and keys to a multiple, and says by a mask alone which keys a row sees.

    No row sees a padded key, and a padded row sees no key.
    """
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    more_rows, more_keys = (0, -rows % multiple), (0, -keys % multiple)
    q, do = (np.pad(x, ((0, 0), more_rows, (0, 0), (0, 0))) for x in (problem.q, problem.do))
    k, v = (np.pad(x, ((0, 0), more_keys, (0, 0), (0, 0))) for x in (problem.k, problem.v))
    s = reference.attention(problem.q, problem.k, problem.v, **problem.settings).s
    pairs = ((0, 0), (0, 0), more_rows, more_keys)
    masking = problem.masking
    seen = Masking(
        mask=np.pad(np.any(s > -np.inf, axis=1, keepdims=True), pairs),
        bias=None if masking.bias is None else np.pad(masking.bias, pairs),
        sinks=masking.sinks,
    )
    dlse = None if problem.dlse is None else np.pad(problem.dlse, ((0, 0), more_rows, (0, 0)))
    return problem.replace(q=q, k=k, v=v, do=do, dlse=dlse, masking=seen)


def part_of(
    problem: Problem,
    *,
    batch: slice = slice(None),
    heads: slice | np.ndarray = slice(None),
    kv: slice = slice(None),
    rows: slice = slice(None),
    keys: slice = slice(None),
) -> Problem:
    """Returns the problem of some sequences, query heads, key heads, rows and keys alone."""
    q, do = (x[batch, rows][:, :, heads] for x in (problem.q, problem.do))
    k, v = (x[batch, keys][:, :, kv] for x in (problem.k, problem.v))
    masking = problem.masking
    if masking.mask is not None:
        mask = np.broadcast_to(masking.mask, (problem.q.shape[0], *masking.mask.shape[1:]))
        masking = dataclasses.replace(masking, mask=mask[batch, :, rows][..., keys])
    if masking.bias is not None:
        masking = dataclasses.replace(masking, bias=masking.bias[:, heads, rows][..., keys])
    if masking.sinks is not None:
        masking = dataclasses.replace(masking, sinks=masking.sinks[heads])
    if np.asarray(masking.query_offset).item():
        masking = dataclasses.replace(masking, query_offset=k.shape[1] - q.shape[1])
    dlse = None if problem.dlse is None else problem.dlse[batch, rows][:, :, heads]
    smaller = problem.replace(q=q, k=k, v=v, do=do, masking=masking, dlse=dlse)
    return smaller if masking.window is None else seeing(smaller)


def formed(
    name: str, about: str, arrays: Arrays, dtype: str, *, causal: bool, scale: float | None = None
) -> Problem:
    """Makes a problem of arrays, rounded to the dtype; a scale of None stands for 1/√H."""
    q, k, v, do = (x.astype(DTYPES[dtype]) for x in arrays)
    needs = {"causal" if causal else "full"}
    needs |= {"groups"} if q.shape[2] != k.shape[2] else set()
    needs |= {"lengths"} if q.shape[1] != k.shape[1] else set()
    needs |= set() if scale is None else {"scale"}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Problem(name, about, q, k, v, do, scale, Masking(is_causal=causal), frozenset(needs))


def _masked(problem: Problem, seen: np.ndarray) -> Problem:
    """Adds a mask [#T, S]."""
    mask = np.broadcast_to(seen, (problem.q.shape[1], problem.k.shape[1]))[None, None]
    return seeing(problem.masked(mask=mask).replace(needs=problem.needs | {"mask"}))
