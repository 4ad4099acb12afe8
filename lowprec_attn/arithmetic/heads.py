"""Heads of a layer, grouped by their arithmetic."""

import dataclasses
from collections.abc import Iterable

from lowprec_attn.numerics import Numerics, RowMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGroup:
    """Query heads that share their arithmetic.

    Attributes:
      heads: their indices, ascending.
      numerics, row_max: their roundings and their row-max rule.
    """

    heads: tuple[int, ...]
    numerics: Numerics
    row_max: RowMax


def group_heads(arithmetic: Iterable[tuple[Numerics, RowMax]]) -> tuple[HeadGroup, ...]:
    """The groups of heads with equal entries, in the order of their first heads.

    Args:
      arithmetic: numerics and row-max rule of every head.
    """
    heads: dict[tuple[Numerics, RowMax], list[int]] = {}
    for head, shared in enumerate(arithmetic):
        heads.setdefault(shared, []).append(head)
    return tuple(
        HeadGroup(heads=tuple(which), numerics=numerics, row_max=row_max)
        for (numerics, row_max), which in heads.items()
    )
