"""Makes the float64 arrays of hard problems: scores of a chosen size, and named kinds of rows."""

from collections.abc import Callable

import numpy as np

_DIRECTIONS, _SPREAD = 6, 0.3  # the number of clusters, and the spread of tokens within one

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def largest_scores(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Returns each head's largest |score| that a causal row sees [N]; q and k have N heads each."""
    s = np.einsum("btnh,bsnh->nbts", *(x.astype(np.float64) for x in (q, k))) * scale
    return np.abs(np.tril(s)).max((1, 2, 3))


def drawn(kind: str, score: float, shape: tuple[int, int, int], seed: int) -> Arrays:
    """Returns q, k, v and dO [1, T, N, H] in float64 whose largest |score| is `score`.

    Args:
      kind: `normal` or `clustered`. Clustered tokens lie near six directions that q and k share,
        and their values have a common part, as in layers of trained models (after the sweep of
        github.com/KohakuBlueleaf/KohakuFA).
      score: the largest |score| that a causal row sees, with the scale 1/√H.
      shape: T, N and H.
      seed: the seed of the random draw.
    """
    tokens, heads, size = shape
    draw = np.random.default_rng(seed).standard_normal
    q, k, v, do = draw((4, 1, tokens, heads, size))
    if kind == "clustered":
        directions = draw((_DIRECTIONS, heads, size))
        of = np.random.default_rng(seed + 1).integers(_DIRECTIONS, size=(2, tokens))
        q, k = (directions[of[i]][None] + _SPREAD * x for i, x in enumerate((q, k)))
        v = 1 + _SPREAD * v
    return _to_score(q, k, v, do, score)


def normal(
    rng: np.random.Generator,
    batch: int,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    size: int,
) -> Arrays:
    """Returns standard normal q, k, v and dO with these lengths (T, S) and heads (N, K)."""
    (t, s), (n, kv) = lengths, heads
    shapes = (batch, t, n, size), (batch, s, kv, size), (batch, s, kv, size), (batch, t, n, size)
    q, k, v, do = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v, do


def _normal(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Returns standard normal q, k, v and dO of one shape (T, N, H)."""
    tokens, heads, size = shape
    return normal(rng, 1, (tokens, tokens), (heads, heads), size)


def _seen_keys(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Returns a random key s ≤ t for every row t."""
    return (rng.random(tokens) * np.arange(1, tokens + 1)).astype(int)


def _equally_long(k: np.ndarray) -> np.ndarray:
    """Returns k with vectors of length √H."""
    return k * (np.sqrt(k.shape[-1]) / np.linalg.norm(k, axis=-1, keepdims=True))


def _one_key(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Row t puts all its weight on one key s ≤ t."""
    _, k, v, do = _normal(rng, shape)
    at = _seen_keys(rng, shape[0])
    k = _equally_long(k)
    return _to_score(k[:, at], k, v, do, 1e3)


def _saturated(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Row t divides its weight between two keys; the score of one is larger by about 1."""
    q, k, v, do = _normal(rng, shape)
    k = _equally_long(k)
    first, second = _seen_keys(rng, shape[0]), _seen_keys(rng, shape[0])
    return _to_score(1.003 * k[:, first] + k[:, second] + 0.003 * q, k, 1 + v / 4, do, 3e2)


def _ties(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Sixteen distinct keys repeat many times, so that row maxima repeat exactly."""
    q, k, v, do = _normal(rng, shape)
    return np.rint(2 * q) / 2, np.rint(2 * k[:, rng.integers(16, size=shape[0])]) / 2, v, do


def _sink(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
    """Every row has its maximum at key 0, ahead by ten, so tiles of any size round P̄ alike."""
    q, k, v, do = _normal(rng, shape)
    common = np.full(shape[2], 1.0)
    k[:, 0] = common
    q = q + (10 / np.sqrt(shape[2])) * common
    k[:, 1:] -= k[:, 1:].mean(-1, keepdims=True)  # the other keys are orthogonal to `common`
    return q, k, v, do


def _level(sign: int) -> Callable[[np.random.Generator, tuple[int, int, int]], Arrays]:
    """Makes rows whose scores are all near ± 1e3, as they are if q and k have common parts."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> Arrays:
        q, k, v, do = _normal(rng, shape)
        part = np.where(np.arange(shape[2]) % 2 == 0, 1.0, -1.0) * np.sqrt(1e3 / np.sqrt(shape[2]))
        return q + part, k + sign * part, 1 + v / 4, do

    return make


KINDS: tuple[tuple[str, str, Callable[..., Arrays]], ...] = (
    ("one key a row", "rows of one key, scores of 1e3", _one_key),
    ("two keys a row", "rows between two keys, values with a common part", _saturated),
    ("repeated maxima", "maxima that repeat exactly", _ties),
    ("key 0 leads every row", "the maximum of every row, ahead by ten", _sink),
    ("all scores near +1,000", "q and k have common parts", _level(1)),
    ("all scores near −1,000", "q and k have common parts", _level(-1)),
)


def _to_score(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, score: float) -> Arrays:
    factor = np.sqrt(score / largest_scores(q, k, q.shape[-1] ** -0.5).max())
    return q * factor, k * factor, v, do
