"""What hides keys from rows beside their positions: segment ids."""

from typing import Any, NamedTuple

from lowprec_attn.arithmetic.request import Extras


class Pairs(NamedTuple):
    """Segment ids of rows [B, T] and of keys [B, S], or references to them or to parts of them."""

    query_segments: Any
    key_segments: Any

    @classmethod
    def of(cls, extras: Extras) -> "Pairs | None":
        """Those of a call; None where positions alone decide."""
        if extras.query_segments is None:
            return None
        return cls(extras.query_segments, extras.key_segments)
