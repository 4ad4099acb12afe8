"""The records in which `check` reports what it found."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from lowprec_attn.check.candidates import Match
from lowprec_attn.check.target import Setting
from lowprec_attn.check.training import Effect

State = Literal["right", "risk", "bug"]


@dataclasses.dataclass(frozen=True)
class Bug:
    """An error that no rounding explains.

    Attributes:
      name: what the bug is, in words.
      results: the results that it spoils, for example `dk`.
      problem: the name of the problem whose errors are reported. It is the first of the problems
        in which the bug spoils most results.
      where: the rows, keys and heads that err, in words.
      others: the names of further problems that show the bug.
      times: the largest ratio of an error to the largest error that rounding explains.
      smallest: the shape of the smallest case that shows the bug, in words; empty if no case was
        written.
      files: the paths of this case and of a script that shows the bug.
    """

    name: str
    results: tuple[str, ...]
    problem: str
    where: str
    others: tuple[str, ...]
    times: float
    smallest: str
    files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that explains the results.

    Attributes:
      name: a preset, and the changes of it.
      distance: how far each of the kernel's results lies from it.
      alike: the names of other arithmetics that the results cannot tell from it.
      next: the nearest preset that they can, and how many times farther it lies in the result that
        differs most; None if there is none.
      explains: whether its distance is less than half of float64's distance from the kernel.
      match: its numerics and results.
    """

    name: str
    distance: Mapping[str, float]
    alike: tuple[str, ...]
    next: tuple[str, float] | None
    explains: bool
    match: Match


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
      target, dtype: what was checked.
      setting: the scale, window, soft cap, sinks and bias that every problem had.
      backward: whether the backward pass was checked as well.
      state: `right`, `risk` or `bug`.
      arithmetic: the arithmetic that explains the results, or None if bugs spoilt all of them.
      bugs: errors that no rounding explains.
      risks: sentences about risks.
      notes: sentences about further observations.
      effects: the errors of dQ and of W_Q's gradient and the row sum of dS, by name of the
        clustered problem.
      cures: the largest effects that remain with each cure, by its preset; empty if no cure is
        needed.
      allowed: the largest row sum of dS that is no risk.
      errors: ‖x − x64‖ / ‖x64‖ of every problem and result.
      refused: the problems that the kernel refused, each with the reason.
      not_tried: the names of problems that need what the kernel cannot do.
    """

    target: str
    dtype: str
    setting: Setting
    backward: bool
    state: State
    arithmetic: Arithmetic | None
    bugs: tuple[Bug, ...]
    risks: tuple[str, ...]
    notes: tuple[str, ...]
    effects: Mapping[str, Effect]
    cures: Mapping[str, Effect]
    allowed: float
    errors: Mapping[str, Mapping[str, float]]
    refused: Mapping[str, str]
    not_tried: tuple[str, ...]
