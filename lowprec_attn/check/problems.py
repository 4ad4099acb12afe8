"""Hard inputs of attention, small and by name.

`core` problems share one shape, so that every candidate's arithmetic meets all of them in one
call. `feature` problems each ask for one more thing: odd lengths, groups of heads, masks, another
scale, a window, a soft cap, sinks, a bias, a gradient of lse. Values are rounded to the dtype asked
for, so that float64 sees what the kernel sees.
"""

import dataclasses
from collections.abc import Callable, Iterator
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

# Of a core problem: two and a half tiles of 64, one and a quarter of 128.
TOKENS, HEADS, HEAD_SIZE = 160, 2, 64
_SOFT_CAP = 2.0  # of the problem that asks for one: its scores reach ± 4
_BIAS = 2.0  # standard deviation


@dataclasses.dataclass(frozen=True)
class Problem:
    """q, dO [B, T, N, H], k, v [B, S, K, H], and which keys a row sees.

    Attributes:
      name: of the problem, such as `clustered keys, scores up to 1,000`.
      about: what it is, in a few words.
      scale: factor of q kᵀ.
      masking: with the bias [1, N, T, S] and the sinks [N], in the dtype of q, where there are any.
      needs: what a kernel must be able to do: `causal` or `full`, and of `groups`, `lengths` (other
        numbers of keys than of queries), `mask`, `scale` (another than 1/√H), `window`, `soft_cap`,
        `sinks`, `bias`, `lse` (its gradient).
      soft_cap: c of c tanh(q kᵀ · scale / c).
      dlse: gradient of lse, float32 [B, T, N].
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
        """Those of `reference.attention`."""
        return {"scale": self.scale, "soft_cap": self.soft_cap, "masking": self.masking}

    def replace(self, **changes: object) -> "Problem":
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def masked(self, **changes: object) -> "Problem":
        """A copy with other fields of its masking."""
        return self.replace(masking=dataclasses.replace(self.masking, **changes))  # type: ignore[arg-type]


def products(problem: Problem) -> np.ndarray:
    """q kᵀ · scale in float64 [B, N, T, S], before a soft cap."""
    q, k = (x.astype(np.float64) for x in (problem.q, problem.k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return reference.pairs(q, k) * problem.scale


def scores(problem: Problem) -> np.ndarray:
    """S in float64 [B, N, T, S], of hidden keys too."""
    everywhere = Masking(bias=problem.masking.bias)
    settings = problem.settings | {"masking": everywhere}
    return reference.attention(problem.q, problem.k, problem.v, **settings).s


def core(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """The problems on which arithmetics differ, all of one shape."""
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
    """The name of a problem with this largest |score|."""
    return f"{words}, scores up to {score:,.0f}"


def extremes(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """Scores of 1e7: every row is one key, and a result must be finite. None in float16."""
    if dtype == "float16":
        return []
    x = drawn("clustered", 1e7, (tokens, HEADS, head_size), seed)
    return [formed(up_to(1e7), "rows of one key, scores of 1e7", x, dtype, causal=causal)]


def features(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, seed: int = 0
) -> list[Problem]:
    """One problem for everything else that a kernel may get wrong."""
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
    """Row t sees the keys t − left to t + right alone."""
    return seeing(problem.masked(window=window).replace(needs=problem.needs | {"window"}))


def capped(problem: Problem, soft_cap: float) -> Problem:
    """With scores c tanh(q kᵀ · scale / c)."""
    return problem.replace(soft_cap=soft_cap, needs=problem.needs | {"soft_cap"})


def with_sinks(problem: Problem, seed: int) -> Problem:
    """With a sink of every head near the median lse of its rows: half of the weight of many."""
    of = reference.attention(problem.q, problem.k, problem.v, **problem.settings)
    draw = np.random.default_rng(seed + 4).standard_normal(problem.q.shape[2])
    lse = np.where(np.isfinite(of.lse), of.lse, np.nan)
    sinks = (np.nanmedian(lse, axis=(0, 1)) + draw).astype(problem.q.dtype)
    return problem.masked(sinks=sinks).replace(needs=problem.needs | {"sinks"})


def biased(problem: Problem, seed: int) -> Problem:
    """With a bias of every head, query and key."""
    shape = (1, problem.q.shape[2], problem.q.shape[1], problem.k.shape[1])
    bias = _BIAS * np.random.default_rng(seed + 5).standard_normal(shape)
    bias = bias.astype(problem.q.dtype)
    return problem.masked(bias=bias).replace(needs=problem.needs | {"bias"})


def _with_dlse(problem: Problem, rng: np.random.Generator) -> Problem:
    dlse = rng.standard_normal(problem.q.shape[:3]).astype(np.float32)
    return problem.replace(dlse=dlse, needs=problem.needs | {"lse"})


def seeing(problem: Problem) -> Problem:
    """A loss leaves out rows that see no key: their dO and dlse are 0."""
    s = reference.attention(problem.q, problem.k, problem.v, **problem.settings).s
    sees = np.any(s > -np.inf, axis=-1).swapaxes(1, 2)
    dlse = None if problem.dlse is None else np.where(sees, problem.dlse, np.float32(0))
    do = np.where(sees[..., None], problem.do, np.zeros((), problem.do.dtype))
    return problem.replace(do=do, dlse=dlse)


def padded(problem: Problem, multiple: int) -> Problem:
    """With rows and keys to a multiple, which nothing sees; who sees what is a mask, alone."""
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


def sequence(problem: Problem, index: int) -> Problem:
    """One sequence of a batch."""
    one = slice(index, index + 1)
    q, k, v, do = (x[one] for x in problem.arrays)
    dlse = None if problem.dlse is None else problem.dlse[one]
    mask = problem.masking.mask
    if mask is not None and len(mask) > 1:
        problem = problem.masked(mask=mask[one])
    return problem.replace(q=q, k=k, v=v, do=do, dlse=dlse)


def formed(
    name: str, about: str, arrays: Arrays, dtype: str, *, causal: bool, scale: float | None = None
) -> Problem:
    """A problem of arrays that are rounded to the dtype; scale: another than 1/√H."""
    q, k, v, do = (x.astype(DTYPES[dtype]) for x in arrays)
    needs = {"causal" if causal else "full"}
    needs |= {"groups"} if q.shape[2] != k.shape[2] else set()
    needs |= {"lengths"} if q.shape[1] != k.shape[1] else set()
    needs |= set() if scale is None else {"scale"}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Problem(name, about, q, k, v, do, scale, Masking(is_causal=causal), frozenset(needs))


def _masked(problem: Problem, seen: np.ndarray) -> Problem:
    """With a mask [#T, S]."""
    mask = np.broadcast_to(seen, (problem.q.shape[1], problem.k.shape[1]))[None, None]
    return seeing(problem.masked(mask=mask).replace(needs=problem.needs | {"mask"}))


def served(problems: list[Problem], can: frozenset[str]) -> Iterator[Problem]:
    """The problems that need nothing else than a kernel can do."""
    return (problem for problem in problems if problem.needs <= can)
