"""Groups the heads of a layer by their arithmetic."""

import dataclasses
from collections.abc import Iterable

from lowprec_attn.numerics import Numerics, RowMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadGroup:
    """Query heads that share their arithmetic.

    Attributes:
      heads: indices of the heads, ascending.
      numerics, row_max: the roundings and the row-max rule that they share.
    """

    heads: tuple[int, ...]
    numerics: Numerics
    row_max: RowMax


def group_heads(arithmetic: Iterable[tuple[Numerics, RowMax]]) -> tuple[HeadGroup, ...]:
    """Groups heads that have equal arithmetic; the groups are ordered by their first heads.

    Args:
      arithmetic: the numerics and the row-max rule of every head.
    """
    heads: dict[tuple[Numerics, RowMax], list[int]] = {}
    for head, shared in enumerate(arithmetic):
        heads.setdefault(shared, []).append(head)
    return tuple(
        HeadGroup(heads=tuple(which), numerics=numerics, row_max=row_max)
        for (numerics, row_max), which in heads.items()
    )
