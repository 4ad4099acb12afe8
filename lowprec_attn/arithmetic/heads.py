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

    Raises:
      ValueError: `heads` is empty, is no tuple, or does not ascend.
    """

    heads: tuple[int, ...]
    numerics: Numerics
    row_max: RowMax

    def __post_init__(self) -> None:
        # A call selects the key heads of a group in ascending order.
        heads = self.heads
        if not isinstance(heads, tuple) or not heads or sorted(set(heads)) != list(heads):
            raise ValueError(
                f"the heads of a group must be an ascending tuple, got {heads!r}; leave out groups "
                "without heads"
            )


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
