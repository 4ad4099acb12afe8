"""Describes an attention function of any library: what it can do, and how a user says so."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lowprec_attn.attention.validation import check_window
from lowprec_attn.check import problems
from lowprec_attn.check.calls import TargetError
from lowprec_attn.check.measure import RESULTS, Found
from lowprec_attn.check.problems import HEAD_SIZE, TOKENS, Problem

Alignment = Literal["start", "end"]
# The abilities that a kernel may have; see `Problem.needs`.
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
      framework: `jax` or `torch`; None: the one of the two that the function's module imports.
      layout: the axes of q, k, v and O, `BTNH` or `BNTH`. None: `BNTH` for a function with the
        parameters of PyTorch's scaled_dot_product_attention, which is then called like it; `BTNH`
        for any other function.
      causal: whether the function is causal; None if `keywords` has `causal`.
      keywords: the function's own names for those of `causal`, `scale`, `mask` (boolean
        [B, 1, T, S], True where a key is seen), `window` (a pair), `soft_cap`, `sinks` ([N]) and
        `bias` ([1, N, T, S]) that it takes; None if it takes none.
      scale: the factor of q kᵀ that the function fixes itself; None: 1/√H.
      window: (left, right), or one number for both: in every problem, row t sees only the keys
        t − left to t + right. The function has this window built in, or takes it by its keyword.
      soft_cap: c of the scores c tanh(q kᵀ · scale / c) in every problem. The function has this cap
        built in, or takes it by its keyword.
      sinks: whether every problem has attention sinks, one more score per head. The function takes
        them by its keyword, which is `sinks` unless `keywords` gives another name.
      bias: whether every problem has a bias, which is added to the scaled and capped scores. The
        function takes it by its keyword, which is `bias` unless `keywords` gives another name.
      groups: whether the function takes fewer key heads than query heads.
      lse_gradient: whether to try the gradient of lse, if the function returns lse beside O.
      backward: whether the function has a backward pass. Without one only O and a returned lse are
        checked.
      alignment: whether the causal diagonal and the window are aligned at the first (`start`) or at
        the last (`end`) row and key, if the lengths differ; None: whichever fits its O better.
      numerics: the preset that this library's implementations compute.
      tokens, head_size: the sizes of the core problems; None: what suits the target.
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
    backward: bool = True
    alignment: Alignment | None = None
    numerics: str = "flash"
    tokens: int | None = None
    head_size: int | None = None


# At least sixteen tokens, since that many keys make ties. At most 4096, since several float64
# arrays hold the scores of all pairs.
_SIZES = {"tokens": (16, 4096), "head_size": (1, 1024)}
_FAR = 2**30


def _in_float32(value: float) -> bool:
    """Whether the number, rounded to float32, is finite and not 0."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(value)
    return bool(np.isfinite(rounded)) and rounded != 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The scale, window, soft cap, sinks and bias that every problem has.

    Attributes:
      scale: the scale that the function fixes itself; None: each problem's own, 1/√H for most.
      window, soft_cap, sinks, bias: see `Options`.
    """

    scale: float | None = None
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    sinks: bool = False
    bias: bool = False

    @classmethod
    def of(cls, options: Options) -> "Setting":
        """Returns the window, soft cap, sinks and bias that the options ask for.

        Raises:
          TargetError: the window, soft cap or another number is out of its range.
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
        if window is not None:  # `_FAR` is larger than every length
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
        """The names in `ABILITIES` of what every problem has, except for the scale."""
        given = {name: getattr(self, name) for name in ("window", "soft_cap", "sinks", "bias")}
        return frozenset(name for name, value in given.items() if value not in (None, False))

    @property
    def words(self) -> str:
        """The setting in words, for example `a window of 16 and 0, sinks`; may be empty."""
        parts = []
        if self.window is not None:
            parts.append(f"a window of {self.window[0]} and {self.window[1]}")
        if self.soft_cap is not None:
            parts.append(f"a soft cap of {self.soft_cap:g}")
        parts += ["sinks"] if self.sinks else []
        parts += ["a bias"] if self.bias else []
        return ", ".join(parts)

    def applied(self, problem: Problem, seed: int) -> Problem:
        """Applies the setting to a problem; another scale is made up for by a factor of q."""
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
      name: the name that the user gave.
      call: takes a problem and returns the results; raises whatever the library raises if it cannot
        serve the problem.
      can: its abilities, from `ABILITIES`, and `lse` if it returns lse for problems that have a
        gradient of lse.
      setting: the settings that all its problems share.
      lse_gradient, backward, alignment: see `Options`.
      script: takes a problem and the name of a file. Returns the arrays of this file and the lines
        of a script that reads it and runs the problem without this package. None: a script cannot
        import the function.
      notes: sentences about what was concluded about the function.
      seen: sentences about what it returned, which its calls add.
      tokens, head_size: the sizes of the core problems.
    """

    name: str
    call: Callable[[Problem], Found]
    can: frozenset[str]
    setting: Setting = Setting()
    lse_gradient: bool = True
    backward: bool = True
    alignment: Alignment | None = "start"
    script: Callable[[Problem, str], tuple[dict[str, Any], list[str]]] | None
    notes: tuple[str, ...] = ()
    seen: Sequence[str] = ()
    tokens: int = TOKENS
    head_size: int = HEAD_SIZE

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results that every call returns."""
        return RESULTS if self.backward else RESULTS[:1]

    @property
    def causal(self) -> bool:
        """Whether the core problems are causal, which they are if the target can be causal."""
        return "causal" in self.can


def aligned(problem: Problem, alignment: Alignment) -> Problem:
    """Aligns the problem's causal diagonal and window at the first or at the last row and key."""
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    has_positions = problem.masking.is_causal or problem.masking.window is not None
    offset = keys - rows if alignment == "end" and has_positions else 0
    moved = problem.masked(query_offset=offset)
    return problems.seeing(moved) if problem.masking.window is not None else moved
