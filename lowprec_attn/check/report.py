"""What `check` says of a target, as data."""

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
      name: what it is, in words.
      results: that it spoils, such as `dk`.
      problem: the simplest that shows it.
      where: rows, keys and heads.
      others: names of further problems that show it.
      times: the largest error over the largest that rounding explains.
      smallest: shape of the smallest case that shows it, in words; empty where none was asked for.
      files: that case and a script that shows it.
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
      name: a preset, and what of it is changed.
      distance: to it, of each result, and over all.
      alike: others that the results do not tell from it.
      next: the nearest preset that they do, and how many times farther it is in the result that
        tells most.
      explains: whether it lies nearer to the kernel than float64 does, by a factor of 2.
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
      setting: what every problem had.
      state: `right`, `risk` or `bug`.
      arithmetic: None where a bug leaves nothing to tell it by.
      bugs: what no rounding explains.
      risks: sentences.
      notes: what else was seen, in sentences.
      effects: on clustered problems, by name.
      cures: what is left under each cure; empty where none is needed.
      allowed: the largest row sum of dS that its cast explains.
      errors: ‖x − x64‖ / ‖x64‖ of every problem and result.
      refused: problems that the kernel refused, and why.
      not_tried: problems that need what the kernel cannot do.
    """

    target: str
    dtype: str
    setting: Setting
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
