"""An attention function of any library, what it can do, and how a user says so."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from lowprec_attn.attention.validation import check_window
from lowprec_attn.check import problems
from lowprec_attn.check.calls import TargetError
from lowprec_attn.check.measure import Found
from lowprec_attn.check.problems import HEAD_SIZE, TOKENS, Problem

Alignment = Literal["start", "end"]
# What a kernel may be able to do; see `Problem.needs`.
ABILITIES = (
    "causal",
    "full",
    "groups",
    "lengths",
    "mask",
    "scale",
    "window",
    "soft_cap",
    "sinks",
    "bias",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How `check` calls a function.

    Attributes:
      framework: `jax` or `torch`; None: that which its module imports, if it is one.
      layout: of q, k, v, O: `BTNH` or `BNTH`; None: `BNTH` for a function with the parameters of
        PyTorch's scaled_dot_product_attention, which is then called as that, else `BTNH`.
      causal: whether it is causal; None where `keywords` has `causal`.
      keywords: what the function calls `causal`, `scale`, `mask` (boolean [B, 1, T, S], True
        where a key is seen), `window` (a pair), `soft_cap`, `sinks` ([N]) and `bias`
        ([1, N, T, S]), of those that it takes; None: none of them.
      scale: factor of q kᵀ that it has by itself; None: 1/√H.
      window: (left, right), or one number for both: in every problem row t sees the keys t − left
        to t + right alone. The function has it by itself, or takes it by its keyword.
      soft_cap: c of scores c tanh(q kᵀ · scale / c) in every problem, likewise.
      sinks: whether every problem has attention sinks, one more score per head. The function takes
        them by its keyword, `sinks` unless `keywords` says another.
      bias: whether every problem has a bias, added to the scaled and capped scores; likewise.
      groups: whether it takes fewer key heads than query heads.
      lse_gradient: whether the gradient of an lse that it returns beside O is tried.
      alignment: which row and key the causal diagonal and the window align where the lengths
        differ, the first (`start`) or the last (`end`); None: whichever its O shows.
      numerics: of this library's implementations.
      tokens, head_size: of the core problems; None: what suits the target.
    """

    framework: str | None = None
    layout: str | None = None
    causal: bool | None = None
    keywords: Mapping[str, str] | None = None
    scale: float | None = None
    window: tuple[int, int] | int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: bool = False
    groups: bool = True
    lse_gradient: bool = True
    alignment: Alignment | None = None
    numerics: str = "flash"
    tokens: int | None = None
    head_size: int | None = None


# Sixteen keys make ties; scores of all pairs are held in float64, several times.
_SIZES = {"tokens": (16, 4096), "head_size": (1, 1024)}
_FAR = 2**30


def _in_float32(value: float) -> bool:
    """Whether float32 holds the number, and not as 0."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(value)
    return bool(np.isfinite(rounded)) and rounded != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The window, soft cap, sinks and bias that every problem has.

    Attributes:
      scale: that the function has by itself; None: 1/√H, and that which a problem asks for.
      window, soft_cap, sinks, bias: see `Options`.
    """

    scale: float | None = None
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: bool = False

    @classmethod
    def of(cls, options: Options) -> "Setting":
        """What the options ask for.

        Raises:
          TargetError: a window or soft cap that is none, or another number out of its range.
        """
        for name, (least, most) in _SIZES.items():
            size = getattr(options, name)
            if size is not None and not least <= size <= most:
                flag = f"--{name.replace('_', '-')}"
                raise TargetError(f"{flag} must be from {least} to {most}, got {size}")
        try:
            window = check_window(options.window)
        except ValueError as error:
            raise TargetError(
                "--window must be LEFT,RIGHT, or one number for both, each 0 or more, got "
                f"{options.window!r}"
            ) from error
        if window is not None:  # beyond every length
            window = (min(window[0], _FAR), min(window[1], _FAR))
        for name in ("scale", "soft_cap"):
            value = getattr(options, name)
            is_cap = name == "soft_cap"
            if value is not None and not (_in_float32(value) and (value > 0 or not is_cap)):
                what = "greater than 0" if is_cap else "other than 0"
                raise TargetError(
                    f"--{name.replace('_', '-')} must be a number of float32 {what}, got {value!r}"
                )
        cap = options.soft_cap
        return cls(window=window, soft_cap=cap, sinks=options.sinks, bias=options.bias)

    @property
    def names(self) -> frozenset[str]:
        """Those of `ABILITIES` that every problem has, but for the scale."""
        given = {name: getattr(self, name) for name in ("window", "soft_cap", "sinks", "bias")}
        return frozenset(name for name, value in given.items() if value not in (None, False))

    @property
    def words(self) -> str:
        """Such as `a window of 16 and 0, sinks`; empty without any."""
        parts = []
        if self.window is not None:
            parts.append(f"a window of {self.window[0]} and {self.window[1]}")
        if self.soft_cap is not None:
            parts.append(f"a soft cap of {self.soft_cap:g}")
        parts += ["sinks"] if self.sinks else []
        parts += ["a bias"] if self.bias else []
        return ", ".join(parts)

    def applied(self, problem: Problem, seed: int) -> Problem:
        """The problem with all of it; where the scale is another, q makes up for it."""
        if self.scale is not None:
            factor = problem.scale / self.scale
            q = (problem.q.astype(np.float32) * factor).astype(problem.q.dtype)
            problem = problem.replace(scale=self.scale, q=q)
        if self.soft_cap is not None:
            problem = problems.capped(problem, self.soft_cap)
        if self.bias:
            problem = problems.biased(problem, seed)
        if self.window is not None:
            problem = problems.windowed(problem, self.window)
        return problems.with_sinks(problem, seed) if self.sinks else problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An attention function, and the calls that it serves.

    Attributes:
      name: as the user gave it.
      call: takes a problem; raises whatever the library raises where it cannot serve.
      can: of `ABILITIES`, and `lse` where it returns lse if a problem has a gradient of it.
      setting: what every problem has.
      lse_gradient, alignment: see `Options`.
      script: lines of Python that form `found` from arrays `a`, without this package; takes the
        problem.
      notes: what was concluded about it, in sentences.
      tokens, head_size: of the core problems.
    """

    name: str
    call: Callable[[Problem], Found]
    can: frozenset[str]
    setting: Setting = Setting()
    lse_gradient: bool = True
    alignment: Alignment | None = "start"
    script: Callable[[Problem], list[str]]
    notes: tuple[str, ...] = ()
    tokens: int = TOKENS
    head_size: int = HEAD_SIZE

    @property
    def causal(self) -> bool:
        """Whether the core problems are causal, as they are where it can be."""
        return "causal" in self.can


def aligned(problem: Problem, alignment: Alignment) -> Problem:
    """The problem with causal diagonal and window at the first row and key, or at the last."""
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    has_positions = problem.masking.is_causal or problem.masking.window is not None
    offset = keys - rows if alignment == "end" and has_positions else 0
    moved = problem.masked(query_offset=offset)
    return problems.seeing(moved) if problem.masking.window is not None else moved
