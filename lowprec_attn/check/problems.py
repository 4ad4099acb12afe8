"""Hard inputs of attention, small and by name.

`core` problems share one shape, so that every candidate's arithmetic meets all of them in one
call. `feature` problems each ask for one more thing: odd lengths, groups of heads, masks, another
scale. Values are rounded to the dtype asked for, so that float64 sees what the kernel sees.
"""

import dataclasses
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from lowprec_attn.attention.reference import Masking

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

# Of a core problem: two and a half tiles of 64, one and a quarter of 128.
TOKENS, HEADS, HEAD_SIZE = 160, 2, 64
_DIRECTIONS, _SPREAD = 6, 0.3  # of the clusters

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """q, dO [B, T, N, H], k, v [B, S, K, H], and which keys a row sees.

    Attributes:
      name: of the problem, such as `clustered 1e+03`.
      about: what it is, in a few words.
      scale: factor of q kᵀ.
      needs: what a kernel must be able to do: `causal` or `full`, and of `groups`, `lengths` (other
        numbers of keys than of queries), `mask`, `scale` (another than 1/√H).
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

    @property
    def arrays(self) -> Arrays:
        """q, k, v and dO."""
        return self.q, self.k, self.v, self.do

    def replace(self, **changes: object) -> "Problem":
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def largest_scores(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Of every head the largest |score| that a causal row sees; as many heads in k as in q."""
    s = np.einsum("btnh,bsnh->nbts", *(x.astype(np.float64) for x in (q, k))) * scale
    return np.abs(np.tril(s)).max((1, 2, 3))


def drawn(kind: str, score: float, shape: tuple[int, int, int], seed: int) -> Arrays:
    """q, k, v and dO [1, T, N, H] in float64 with this largest |score|.

    Args:
      kind: `normal`; or `clustered`: tokens near six directions that q and k share, values with a
        common part, as in layers of trained models (after the sweep of
        github.com/KohakuBlueleaf/KohakuFA).
      score: the largest |score|, causal, with the scale 1/√H.
      shape: T, N and H.
      seed: of the draw.
    """
    tokens, heads, size = shape
    draw = np.random.default_rng(seed).standard_normal
    q, k, v, do = draw((4, 1, tokens, heads, size))
    if kind == "clustered":
        directions = draw((_DIRECTIONS, heads, size))
        of = np.random.default_rng(seed + 1).integers(_DIRECTIONS, size=(2, tokens))
        q, k = (directions[of[i]][None] + _SPREAD * x for i, x in enumerate((q, k)))
        v = 1 + _SPREAD * v
    factor = np.sqrt(score / largest_scores(q, k, size**-0.5).max())
    return q * factor, k * factor, v, do


def core(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """The problems on which arithmetics differ, all of one shape."""
    shape = (tokens, HEADS, head_size)
    kinds: list[tuple[str, str, Arrays]] = [
        (f"{kind} {score:.0e}", about, drawn(kind, score, shape, seed))
        for kind, about, scores in (
            ("normal", "nothing is shared", (4e0, 1e2, 1e4)),
            ("clustered", "keys near six directions, values with a common part", CLUSTERED),
        )
        for score in scores
    ]
    rng = np.random.default_rng(seed + 2)
    kinds += [(name, about, make(rng, shape)) for name, about, make in _KINDS]
    return [_problem(name, about, x, dtype, causal=causal) for name, about, x in kinds]


CLUSTERED = (1e1, 1e2, 1e3, 1e4)


def extremes(
    dtype: str, *, causal: bool, head_size: int = HEAD_SIZE, tokens: int = TOKENS, seed: int = 0
) -> list[Problem]:
    """Scores of 1e7: every row is one key, and a result must be finite. None in float16."""
    if dtype == "float16":
        return []
    x = drawn("clustered", 1e7, (tokens, HEADS, head_size), seed)
    return [_problem("clustered 1e+07", "rows of one key, scores of 1e7", x, dtype, causal=causal)]


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
        x = _normal(rng, batch, lengths, heads, head_size)
        problem = _problem(name, about, x, dtype, causal=causal, scale=scale)
        return problem if mask is None else _masked(problem, mask())

    one = np.arange(150)
    return [
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


def _normal(
    rng: np.random.Generator,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    size: int,
) -> Arrays:
    (t, s), (n, kv) = lengths, heads
    shapes = (batch, t, n, size), (batch, s, kv, size), (batch, s, kv, size), (batch, t, n, size)
    q, k, v, do = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, do


def _one_key(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Row t lies on a key s ≤ t alone."""
    _, k, v, do = _normal(rng, 1, (shape[0],) * 2, (shape[1],) * 2, shape[2])
    at = (rng.random(shape[0]) * np.arange(1, shape[0] + 1)).astype(int)
    k *= np.sqrt(shape[2]) / np.linalg.norm(k, axis=-1, keepdims=True)
    return _to_score(k[:, at], k, v, do, 1e3)


def _saturated(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Row t lies between two keys, one of them ahead by about one."""
    q, k, v, do = _normal(rng, 1, (shape[0],) * 2, (shape[1],) * 2, shape[2])
    k *= np.sqrt(shape[2]) / np.linalg.norm(k, axis=-1, keepdims=True)
    first, second = (
        (rng.random(shape[0]) * np.arange(1, shape[0] + 1)).astype(int) for _ in range(2)
    )
    return _to_score(1.003 * k[:, first] + k[:, second] + 0.003 * q, k, 1 + v / 4, do, 3e2)


def _ties(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Sixteen different keys, each many times: maxima repeat exactly."""
    q, k, v, do = _normal(rng, 1, (shape[0],) * 2, (shape[1],) * 2, shape[2])
    return np.rint(2 * q) / 2, np.rint(2 * k[:, rng.integers(16, size=shape[0])]) / 2, v, do


def _sink(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Every row has its maximum at key 0, ahead by ten: P̄ is rounded alike in tiles of any size."""
    q, k, v, do = _normal(rng, 1, (shape[0],) * 2, (shape[1],) * 2, shape[2])
    common = np.full(shape[2], 1.0)
    k[:, 0] = common
    q = q + (10 / np.sqrt(shape[2])) * common
    k[:, 1:] -= k[:, 1:].mean(-1, keepdims=True)  # of the rest, no level
    return q, k, v, do


def _level(sign: int) -> Callable[[np.random.Generator, tuple[int, int, int]], Arrays]:
    """All scores of a row near ± 1e3, as where q and k have common parts."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
        q, k, v, do = _normal(rng, 1, (shape[0],) * 2, (shape[1],) * 2, shape[2])
        part = np.where(np.arange(shape[2]) % 2 == 0, 1.0, -1.0) * np.sqrt(1e3 / np.sqrt(shape[2]))
        return q + part, k + sign * part, 1 + v / 4, do

    return make


_KINDS: tuple[tuple[str, str, Callable[..., Arrays]], ...] = (
    ("one key", "rows of one key, scores of 1e3", _one_key),
    ("saturated", "rows between two keys, values with a common part", _saturated),
    ("ties", "maxima that repeat exactly", _ties),
    ("sink", "key 0 leads in every row", _sink),
    ("level +1e3", "all scores near 1,000", _level(1)),
    ("level −1e3", "all scores near −1,000", _level(-1)),
)


def _to_score(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, score: float) -> Arrays:
    factor = np.sqrt(score / largest_scores(q, k, q.shape[-1] ** -0.5).max())
    return q * factor, k * factor, v, do


def _problem(
    name: str, about: str, arrays: Arrays, dtype: str, *, causal: bool, scale: float | None = None
) -> Problem:
    q, k, v, do = (x.astype(DTYPES[dtype]) for x in arrays)
    needs = {"causal" if causal else "full"}
    needs |= {"groups"} if q.shape[2] != k.shape[2] else set()
    needs |= {"lengths"} if q.shape[1] != k.shape[1] else set()
    needs |= set() if scale is None else {"scale"}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Problem(name, about, q, k, v, do, scale, Masking(is_causal=causal), frozenset(needs))


def _masked(problem: Problem, seen: np.ndarray) -> Problem:
    """With a mask [#T, S]. A loss leaves out rows that see no key: their dO is 0."""
    mask = np.broadcast_to(seen, (problem.q.shape[1], problem.k.shape[1]))[None, None]
    masking = dataclasses.replace(problem.masking, mask=mask)
    visible = np.array(mask)
    if masking.is_causal:
        visible &= np.tri(*mask.shape[2:]).astype(bool)
    sees: np.ndarray = np.any(visible, axis=-1)
    do = np.where(sees[..., None].swapaxes(1, 2), problem.do, np.zeros((), problem.do.dtype))
    return problem.replace(masking=masking, do=do, needs=problem.needs | {"mask"})


def served(problems: list[Problem], can: frozenset[str]) -> Iterator[Problem]:
    """The problems that need nothing else than a kernel can do."""
    return (problem for problem in problems if problem.needs <= can)
