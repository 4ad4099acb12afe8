"""`Numerics`: one field per place inside attention where a value is rounded.

All arithmetic is float32. A point is a place where a value is rounded to another format. Let S be
the scores, P̄ the probabilities before the division by l, and Ō the output before that division
(`lowprec_attn.attention.reference` has the legend of all letters):

    S  = round_scores(round_query(q) round_key(k)ᵀ · scale + bias)
                                                            m = round_stats(row-max rule(S, m))
    P̄  = exp(round_shift(S − m))                            α = exp(round_shift(m_old − m))
    l  = round_stats(α l + rowsum(P̄))                       (row_sum: P̄ rounded or not)
    Ō  = round_accumulator(round_rescale(α Ō) + round_pv(round_probs(P̄) round_value(v)))

and after the last step

    l  = round_normalizer(l)
    O  = round_output(Ō / l)                                lse = round_lse(m + log l)

The backward pass recomputes P = exp(S − lse), or exp(S − m) / l with `statistics='m_and_l'`, and

                                  δ = round_delta_value(rowsum(dO ∘ round_output_bwd(O_saved))),
                                      or as `delta` says
    dP = round_dp(dO round_value(v)ᵀ)                       (dO, q and k as rounded here too)
                                  dS = P ∘ (dP − δ)
    dV = round_grads(Σ round_tile_grads(round_probs_bwd(P)ᵀ dO))
    dQ = round_grads(Σ round_tile_grads(round_ds(dS · scale) k))
    dK = round_grads(Σ round_tile_grads(round_ds(dS · scale)ᵀ q))

Unless `exponent` or the implementation says otherwise, both passes form exp(S − m) as
2^((S − m) · log2 e), which is `shift_first`. With `exponent='scale_first'`, c = scale · log2 e, m
is the maximum of q kᵀ, and

    P̄  = 2^(fma(q kᵀ, c, −round_float32(c m)))              P  = 2^(fma(q kᵀ, c, −lse · log2 e))
    α  = 2^(c (m_old − m))

with the fused multiply-add rounded once. The rounding of c m is a factor of all P̄ of a step. It
cancels in Ō / l while m stays. Where a later step raises m, the factor becomes another one, and α
contains neither factor. The exponent is fma(S, log2 e, −m · log2 e) instead if
`scores` rounds S, if a bias is added to S, if m is rounded, or if the scale is traced or not
positive. With `exponent='unfused'`, both products and their difference are rounded separately:

    P̄  = 2^(round_float32(c q kᵀ) − round_float32(c m))
    P  = 2^(round_float32(c q kᵀ) − round_float32(lse · log2 e))

With `exponent='whole_max'`, m is M, the result of the row-max rule times log2 e, rounded up to a
whole number, and

    P̄  = 2^(S₂ − M), S₂ = c q kᵀ rounded once, to a multiple of 2^-17          α = 2^(M_old − M)
    P  = P̄ / l                                                lse = round_lse(M ln 2 + log l)

Therefore α is exact, and a P̄ above 2^-32 has the same significand whatever M is. With
`recomputed_probs='rounded'`, the P̄ in P = P̄ / l is round_probs(P̄), the number that enters P̄ V and,
with `row_sum='rounded'`, l in the forward pass. Up to float32 rounding, Σ_j P is then 1, and
Σ_j P dP is δ if δ reads O before it is rounded. Rows of dS thus sum to zero with a single pass over
the keys. With `divided_in_dv='do'`, l divides dO in the product of dV:

    dV = round_grads(Σ round_tile_grads(round_probs(P̄)ᵀ round_probs_bwd(dO / l)))

The sums Σ in the gradients run over tiles of `kv_block` keys and `kv_block` queries. With
`delta='normalized'`, δ₀ is the δ defined above, r = Σ_j P (dP − δ₀) and s = Σ_j P:

    δ  = δ₀ + r / s, so that a row of dS sums to zero whatever O, P̄ and dP were rounded to
    dQ = round_grads(Σ round_tile_grads(round_ds(P ∘ (dP − δ₀) · scale) k)
                     − scale · (r / s) · Σ round_probs_bwd(P) k)

With `delta='after_cast'`, the row sum is removed after rounding. The operands of the products are
D = round_ds(P ∘ (dP − δ₀) · scale) and R = round_probs_bwd(P), and dlse is the gradient of lse:

    λ  = Σ_j D / Σ_j R − scale · dlse, so that rows of D − λ R sum to scale · dlse · Σ_j R
    dQ = round_grads(Σ round_tile_grads(D k) − λ Σ R k)
    dK = round_grads(Σ round_tile_grads(Dᵀ q) − Σ Rᵀ round_ds(λ q))

The gradients of a bias and of the scale use dS = P ∘ (dP − δ₀ − λ / scale).

Sinks are an argument of the call: a score c_n of every row of head n, without key or value. With
sinks a row starts from m = c_n, l = 1 and Ō = 0 instead of m = −inf and l = 0; with `whole_max` it
starts from M = ⌈c_n log2 e⌉ and l = 2^(c_n log2 e − M). If the products q kᵀ are kept in place of
S, c_n / scale replaces c_n. No point rounds c_n or the probability P_sink of the sink, which is
formed in the same way as P. Over the keys, P then sums to 1 − P_sink, and dS sums to P_sink δ,
because dP is 0 at the sink. The sums r, s and Σ_j are therefore taken over keys and sink:

    δ  = 'normalized': r = Σ_j P (dP − δ₀) − P_sink δ₀, s = Σ_j P + P_sink
    λ  = 'after_cast': with −P_sink δ₀ · scale in Σ_j D and P_sink in Σ_j R
    dc = Σ P_sink (dlse − δ) in float32, over rows and batch, δ as it is in dS

`mean_key='subtracted'` is refused, because it assumes that rows of dS sum to zero over the keys.

With a soft cap c (an argument of the call, not a rounding), S is formed in float32 as

    t  = tanh(q kᵀ · round_float32(scale / c))              S  = round_scores(c t + bias)

before the mask. If the products q kᵀ would be kept in place of S, t is kept in place of S, and
c = cap · log2 e in the formulas of the exponent above. tanh is the function of the platform, with
an error of up to 5 ulp. FlashAttention's `tanh.approx` errs by 2^-11, which with a cap of 50
changes an exponent by 0.02. The backward pass forms t in float32 again, with these changes:

    dQ, dK, the gradient of the scale: (1 − t)(1 + t) dS in place of dS, rounded once, at `ds`
    δ  = 'normalized': r and s as above, and round_probs_bwd(P (1 − t)(1 + t)) k in the place of
                       round_probs_bwd(P) k

The cap enters neither dV nor the gradient of a bias. Rows of dS sum to zero, because softmax does
not change if a row of S is shifted. Rows of (1 − t)(1 + t) dS need not sum to zero, because the cap
turns no shift of a row of q kᵀ into a shift of S. `delta='after_cast'` and `mean_key='subtracted'`
are refused, because they assume that these rows do sum to zero.

With `mean_key='subtracted'`, dQ uses k − k̄ rounded to the format of k in place of k, where k̄ is
the mean of all keys. Without dlse, rows of dS sum to zero up to rounding, so dQ does not change in
exact arithmetic. With dlse it would change, so scale · dlse · k̄ is added back to dQ.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, get_args

import jax.numpy as jnp
import numpy as np

from lowprec_attn.numerics.formats import get_format
from lowprec_attn.numerics.rounding import Rounding, get_rounding

SavedOutput = Literal["same", "float32", "auxiliary", "halves"]
Delta = Literal["do_o", "do_o_storage", "dp_p", "normalized", "after_cast"]
RowSum = Literal["unrounded", "rounded"]
Statistics = Literal["lse", "m_and_l"]
Exponent = Literal["shift_first", "scale_first", "unfused", "whole_max"]
RecomputedProbs = Literal["unrounded", "rounded"]
DividedInDv = Literal["probs", "do"]
MeanKey = Literal["kept", "subtracted"]
Divisor = Literal["rounded", "first_unrounded"]

KvBlock = int | Literal["all"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "saved_output": get_args(SavedOutput),
    "delta": get_args(Delta),
    "row_sum": get_args(RowSum),
    "statistics": get_args(Statistics),
    "exponent": (None, *get_args(Exponent)),
    "divisor": get_args(Divisor),
    "mean_key": get_args(MeanKey),
    "recomputed_probs": get_args(RecomputedProbs),
    "divided_in_dv": get_args(DividedInDv),
}

Point = Literal[
    "query", "key", "scores", "shift", "probs", "value", "pv", "rescale", "accumulator", "stats",
    "normalizer", "lse", "output", "do", "output_bwd", "delta_value", "probs_bwd", "dp", "ds",
    "tile_grads", "grads",
]  # fmt: skip
POINTS: tuple[Point, ...] = get_args(Point)  # in the order of the computation

# Points at which only `tiled` and `dense` round; no kernel does.
PLAIN_POINTS: tuple[Point, ...] = ("query", "key", "do")

# The kinds of scale that each point takes. A point can take a scale if it rounds whole arrays, or
# tiles whose amax is known or is found in a separate pass.
_OF_ARRAYS = ("x", "tensor", "head")
_SCALES: dict[Point, tuple[str, ...]] = {
    **dict.fromkeys(("query", "key", "value", "do"), (*_OF_ARRAYS, "block", "mx", "nvfp4")),
    **dict.fromkeys(("output_bwd", "grads"), _OF_ARRAYS),
    **dict.fromkeys(("probs", "probs_bwd"), ("x", "mx", "nvfp4")),
    "ds": (*_OF_ARRAYS, "mx", "nvfp4"),
}

# The number that salts a point's random bits. Numbers are never reused, so a new point does not
# change the bits of the others.
SALTS: dict[Point, int] = {
    "scores": 0, "probs": 1, "pv": 2, "rescale": 3, "accumulator": 4, "stats": 5, "output": 6,
    "probs_bwd": 7, "dp": 8, "ds": 9, "grads": 10, "lse": 11, "shift": 12, "normalizer": 13,
    "tile_grads": 14, "output_bwd": 15, "delta_value": 16, "value": 17, "query": 18, "key": 19,
    "do": 20,
}  # fmt: skip

_FLOAT32 = get_rounding("float32")

_Held = TypeVar("_Held", bound=Rounding | None)


class RoundingField(Generic[_Held]):
    """A field of `Numerics` that accepts a rounding or its text, and returns a rounding."""

    def __init__(self, default: _Held) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, record: "Numerics | None", owner: type) -> _Held:
        """Returns a record's rounding, or on the class the default, which `dataclasses` reads."""
        return self._default if record is None else vars(record)[self._name]

    def __set__(self, record: "Numerics", value: _Held | str) -> None:
        given: Any = value
        follows_input = given is None and self._default is None
        vars(record)[self._name] = None if follows_input else get_rounding(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """Every rounding of one attention call; hashable, so usable as a static argument.

    Points take a `Rounding` or its text, such as 'bfloat16', 'bfloat16:stochastic' or, with a scale
    of `numerics.scaling`, 'float8_e4m3fn/tensor'.

    Attributes:
      query, key, value, do: q, k, V and dO as attention reads them. q, k and V are rounded in both
        passes. If scales belong to blocks along the axis of a product (mx, nvfp4), an array is
        rounded separately for each axis over which products sum, and δ reads dO itself, as in
        cuDNN. dQ, dK and dV are the gradients with respect to the rounded arrays.
      scores, probs, pv, rescale, accumulator, probs_bwd, dp, ds: see the module.
      shift: the exponents of P̄ and α. An exponent below −128, where exp is 0, becomes −128.
      stats: m and l after every step.
      normalizer: l after the last step, which divides Ō and enters lse.
      divisor: the l that divides Ō. `rounded`: l as rounded at `normalizer`; `first_unrounded`: l
        before that rounding in the first `kv_block` rows (in all rows if `kv_block` is not a
        number), as in the public code of arXiv 2510.04212 where PyTorch compiles it. P uses the
        rounded l in all rows.
      lse: lse as saved for the backward pass. If it is rounded to bfloat16 and scores reach 1,000,
        Σ_j P can have any value between 1/50 and 50, because bfloat16 numbers of that size lie 4 to
        8 apart.
      tile_grads: the products of a tile before they are added to dQ, dK and dV. If they are
        rounded, the number of query rows of a tile affects the results too; it is `kv_block`.
      output: O as returned. None: the format of q.
      grads: the finished dQ, dK and dV. None: the format of the corresponding input, in which they
        are stored in any case.
      saved_output: the O that δ reads. `same`: the rounded O; `float32`: Ō / l before rounding;
        `auxiliary`: O′, formed from unrounded P̄ with float32 accumulation and kept in bfloat16
        (Attn-QAT, arXiv 2603.00040); `halves`: the returned O plus its rounding error, which is
        kept in bfloat16, O + round_bfloat16(Ō / l − O), as in FlashAttention-4's sparse MLA.
      output_bwd: the O of `saved_output`, rounded once more for δ = rowsum(dO ∘ O). With
        `saved_output='float32'` it rounds only the O of δ.
      delta_value: δ, one number per row, before dS is formed from it. JAX's Pallas kernel for GPUs
        rounds δ to the format of O (docs/who_rounds_what.md). With `delta='normalized'` and
        'after_cast' the point rounds δ₀, whose error these choices remove.
      delta: how δ is formed. `do_o`: rowsum(dO ∘ O_saved) in float32; `do_o_storage`: the same sum
        of products that are first rounded to the format of O; `dp_p`: rowsum(dP ∘ P), with the P of
        dS and dP as rounded at `dp`; `normalized`: see the module; `after_cast`: see the module;
        two rank-one corrections of dQ and dK, computed from the rounded dS and P (Chen et al.,
        arXiv 2609.34272; ECMWF's anemoi-core).
      exponent: how the exponents of P̄ and P are formed. `shift_first`: the largest P̄ of a row is 1;
        `scale_first`: the largest P̄ is 2 to the power of the rounding error of c m, as in `hopper`
        and in FlashAttention-2, -3 and -4 as their authors build them. O loses some 5 % at scores
        of 4e6 if m moves from step to step; `unfused`: the largest P̄ is
        1, but the other P̄ contain the rounding error of c S, as in FlashAttention-2 as PyTorch
        builds it (docs/who_rounds_what.md); `whole_max`: m is a whole number in base 2, so that α
        is a power of two. `whole_max` needs `statistics='m_and_l'`. It rounds the largest P̄ too, so
        the error of δ grows unless `row_sum` and `recomputed_probs` are 'rounded'. None: the
        implementation chooses for speed (`attention.exponent_of` says how). Experiments name one.
      statistics: the row statistics that the backward pass reads. `lse`: one float32 number, which
        at scores of 1e6 has lost log l, so that Σ_j P can have any value up to the number of keys;
        `m_and_l`: m and 1 / l separately. The lse that a caller gets is m + log l in either case.
        With `m_and_l` a kernel may still form P from lse in rows with |lse| · log2 e up to 1024,
        where that changes P by less than a relative 1e-4; `hopper` does if `delta` sums rows.
      row_sum: whether l sums the `unrounded` P̄ or the P̄ `rounded` at `probs`.
      recomputed_probs: whether P = P̄ / l in dS and dV of the backward pass uses the `unrounded` P̄
        or the P̄ `rounded` at `probs` (Attn-QAT, arXiv 2603.00040). The rounded P̄ equals the one of
        the forward pass with `exponent='whole_max'`, or if one step takes all keys. `rounded` needs
        `statistics='m_and_l'`. With several steps it also needs a format at `probs` that has
        float32's exponents, because among the subnormals of float16 and float8 rounding does not
        commute with a change of M.
      divided_in_dv: which operand of dV is divided by l before rounding at `probs_bwd`. `probs`: P̄;
        `do`: dO, so that the other operand is P̄, rounded only once, at `probs`.
      mean_key: whether dQ = dS k uses the keys as they are (`kept`) or with their mean `subtracted`
        (as in SageBwd, which smooths k); see the module.
      normalize_probs: whether P = P̄ / l is formed before rounding at `probs`, as in unfused
        attention. It needs all keys in one step (`dense`).
      kv_block: keys per online-softmax step. It belongs to the arithmetic, because P̄ is rounded
        relative to the running maximum and the row-max rules look at one step. 'all': one step over
        all keys. None: the implementation chooses for speed.

    Raises:
      ValueError: a format, mode or choice is unknown, fields contradict each other, or `kv_block`
        is neither positive nor 'all'.
    """

    query: RoundingField[Rounding] = RoundingField(_FLOAT32)
    key: RoundingField[Rounding] = RoundingField(_FLOAT32)
    scores: RoundingField[Rounding] = RoundingField(_FLOAT32)
    shift: RoundingField[Rounding] = RoundingField(_FLOAT32)
    probs: RoundingField[Rounding] = RoundingField(_FLOAT32)
    value: RoundingField[Rounding] = RoundingField(_FLOAT32)
    pv: RoundingField[Rounding] = RoundingField(_FLOAT32)
    rescale: RoundingField[Rounding] = RoundingField(_FLOAT32)
    accumulator: RoundingField[Rounding] = RoundingField(_FLOAT32)
    stats: RoundingField[Rounding] = RoundingField(_FLOAT32)
    normalizer: RoundingField[Rounding] = RoundingField(_FLOAT32)
    divisor: Divisor = "rounded"
    lse: RoundingField[Rounding] = RoundingField(_FLOAT32)
    output: RoundingField[Rounding | None] = RoundingField(None)
    saved_output: SavedOutput = "same"
    do: RoundingField[Rounding] = RoundingField(_FLOAT32)
    output_bwd: RoundingField[Rounding] = RoundingField(_FLOAT32)
    delta_value: RoundingField[Rounding] = RoundingField(_FLOAT32)
    delta: Delta = "do_o"
    probs_bwd: RoundingField[Rounding] = RoundingField(_FLOAT32)
    dp: RoundingField[Rounding] = RoundingField(_FLOAT32)
    ds: RoundingField[Rounding] = RoundingField(_FLOAT32)
    tile_grads: RoundingField[Rounding] = RoundingField(_FLOAT32)
    grads: RoundingField[Rounding | None] = RoundingField(None)
    exponent: Exponent | None = None
    statistics: Statistics = "lse"
    row_sum: RowSum = "unrounded"
    recomputed_probs: RecomputedProbs = "unrounded"
    divided_in_dv: DividedInDv = "probs"
    mean_key: MeanKey = "kept"
    normalize_probs: bool = False
    kv_block: KvBlock | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {listed}, got {value!r}")
        if self.mean_key == "subtracted" and self.delta == "after_cast":
            raise ValueError(
                "mean_key='subtracted' changes nothing with delta='after_cast', where rounded rows "
                "of dS sum to zero; use mean_key='kept'"
            )
        if self.divisor != "rounded" and self.normalize_probs:
            raise ValueError(
                f"divisor={self.divisor!r} divides O, which normalize_probs=True leaves undivided; "
                "use divisor='rounded'"
            )
        if self.exponent not in (None, "shift_first") and not self.shift.is_identity:
            raise ValueError(
                f"shift={self.shift} rounds S − m, which exponent={self.exponent!r} does not form; "
                "use exponent='shift_first'"
            )
        self._check_recomputed_probs()
        self._check_scales()
        if self.statistics == "m_and_l" and not self.lse.is_identity:
            raise ValueError(
                f"lse={self.lse} is not saved with statistics='m_and_l'; use statistics='lse'"
            )
        if not isinstance(self.normalize_probs, bool):
            raise ValueError(f"normalize_probs must be True or False, got {self.normalize_probs!r}")
        if self.kv_block not in (None, "all") and (
            isinstance(self.kv_block, bool)
            or not isinstance(self.kv_block, int)
            or self.kv_block < 1
        ):
            raise ValueError(
                f"kv_block must be a positive number of keys, 'all' or None, got {self.kv_block!r}"
            )

    def _check_recomputed_probs(self) -> None:
        """Checks what `exponent='whole_max'`, a rounded P̄ in P and a divided dO require."""
        apart = [
            f"{name}={value!r}"
            for name, value in (
                ("exponent", self.exponent),
                ("recomputed_probs", self.recomputed_probs),
            )
            if value in ("whole_max", "rounded")
        ]
        if apart and self.statistics != "m_and_l":
            raise ValueError(
                f"{apart[0]} forms P̄ against m, which statistics={self.statistics!r} does not "
                "save; use statistics='m_and_l'"
            )
        if self.divided_in_dv == "do" and self.recomputed_probs != "rounded":
            raise ValueError(
                "divided_in_dv='do' has P̄ as rounded at `probs` in dV; "
                "use recomputed_probs='rounded'"
            )
        if self.recomputed_probs != "rounded":
            return
        if self.normalize_probs:
            raise ValueError(
                "recomputed_probs='rounded' rounds P̄ before it is divided by l, and "
                "normalize_probs=True after; use recomputed_probs='unrounded'"
            )
        in_float32 = self.probs.mode.startswith("error_")
        if not (self.probs.format.has_float32_exponents or in_float32 or self.kv_block == "all"):
            raise ValueError(
                f"probs={self.probs} has subnormals, so recomputed_probs='rounded' is not the P̄ of "
                "the forward pass; use probs='bfloat16' or kv_block='all'"
            )

    def _check_scales(self) -> None:
        """Checks that scales stand only at points that take them and that round one array each."""
        for point in POINTS:
            rounding: Rounding | None = getattr(self, point)
            scaling = None if rounding is None else rounding.scaling
            taken = _SCALES.get(point, ())
            if scaling is not None and scaling.kind not in taken:
                what = f"takes scales {', '.join(taken)}" if taken else "takes no scale"
                raise ValueError(f"{point}={rounding}: {point} {what}")
        for name, value, several in (
            ("delta", "after_cast", "ds"),
            ("delta", "after_cast", "probs_bwd"),
            ("divided_in_dv", "do", "probs_bwd"),
        ):
            if getattr(self, name) == value and getattr(self, several).scaling is not None:
                raise ValueError(
                    f"{name}={value!r} rounds other numbers at {several} too, for which "
                    f"{several}={getattr(self, several)} has no scale; leave out the scale"
                )
        if self.mean_key == "subtracted" and not self.key.is_identity:
            raise ValueError(
                f"mean_key='subtracted' rounds k − k̄ to the format of the array, not to "
                f"key={self.key}; use mean_key='kept'"
            )

    def replace(self, **changes: Any) -> "Numerics":
        """Returns a copy with some fields changed, as in `FLASH.replace(output='float32')`.

        If the changes round `lse` but do not name `statistics`, `statistics` becomes 'lse', because
        only a saved lse can be rounded.

        Raises:
          ValueError: a field or value is unknown; the message lists the fields or the values.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"unknown numerics point {name!r}; points are {', '.join(known)}")
        if "lse" in changes and not get_rounding(changes["lse"]).is_identity:
            changes.setdefault("statistics", "lse")
        return dataclasses.replace(self, **changes)

    def with_format(self, fmt: str) -> "Numerics":
        """Returns a copy in which every bfloat16 point rounds to `fmt` instead; modes are kept."""
        target = get_format(fmt)
        changes = {
            point: Rounding(target, rounding.mode)
            for point in POINTS
            if (rounding := getattr(self, point)) is not None and rounding.format.name == "bfloat16"
        }
        return self.replace(**changes)

    def step_of(self, length: int, default: int) -> int:
        """The number of keys per online-softmax step over `length` keys.

        With `length` queries it is also the number of query rows per tile if `tile_grads` rounds.

        Args:
          length: the number of keys or queries; it may be symbolic.
          default: the number to use if `kv_block` is None.
        """
        if self.kv_block == "all":
            return length
        block = self.kv_block or default
        return min(block, length) if isinstance(length, int) else block  # a symbolic length

    def rounding_at(self, point: Point, dtype: np.dtype) -> Rounding:
        """The rounding at a point, for inputs of `dtype`.

        Where `output` or `grads` is None, it rounds to the format of the inputs.
        """
        rounding: Rounding | None = getattr(self, point)
        return get_rounding(jnp.dtype(dtype).name) if rounding is None else rounding

    @property
    def saved_dtype(self) -> np.dtype | None:
        """The dtype of the array saved for δ besides O; None if δ reads O itself or no O."""
        if self.delta == "dp_p" or self.saved_output == "same":
            return None
        return jnp.dtype(jnp.float32 if self.saved_output == "float32" else jnp.bfloat16)

    def output_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype of O: `dtype`, which q has, if it holds the output's format, else float32."""
        result = self.rounding_at("output", dtype).result_format
        return jnp.dtype(dtype) if result.is_exact_in(dtype) else jnp.dtype(jnp.float32)

    def operand_dtype(self, point: Point, dtype: np.dtype) -> np.dtype:
        """The dtype of an array as attention reads it, after rounding at the point.

        It is the array's own `dtype` if that holds the format of the point, else the dtype of that
        format.
        """
        rounding = self.rounding_at(point, dtype)
        if rounding.is_identity or rounding.result_format.is_exact_in(dtype):
            return jnp.dtype(dtype)
        return rounding.result_format.dtype

    @property
    def rounds_scores(self) -> bool:
        """Whether rounding at `scores`, `query` or `key` changes S."""
        points = (self.scores, self.query, self.key)
        return not all(rounding.is_identity for rounding in points)

    @property
    def needs_bits(self) -> bool:
        """Whether any point draws random bits, so that the call needs a PRNG key."""
        return any(
            rounding.needs_bits
            for point in POINTS
            if (rounding := getattr(self, point)) is not None
        )

    def __str__(self) -> str:
        return f"Numerics({', '.join(f'{name}={value}' for name, value in self._changed())})"

    def __repr__(self) -> str:
        """A short expression that evaluates to the record: a preset, or the fields that differ."""
        from lowprec_attn.numerics.presets import PRESETS  # here, as presets need this class

        for name, preset in PRESETS.items():
            if preset == self:
                return f"numerics.{name.upper()}"
        written = (
            (name, str(value) if isinstance(value, Rounding) else value)
            for name, value in self._changed()
        )
        return f"Numerics({', '.join(f'{name}={value!r}' for name, value in written)})"

    def _changed(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of every field that differs from its default."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                yield field.name, value
