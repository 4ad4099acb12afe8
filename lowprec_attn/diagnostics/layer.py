"""One attention layer as `diagnose` examines it, whatever source it was read from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.diagnostics.comparison import Returned
from lowprec_attn.diagnostics.weights import Projection

WITH_HEADS = ("q", "k", "v", "do")


class Layer(NamedTuple):
    """The arrays of one layer and how it attends; q, k and v share one float dtype.

    Attributes:
      source: the file or run that the layer was read from.
      name: its name within the source; empty where the source holds one unnamed layer.
      q, k, v: [B, T, N, H], [B, S, K, H] and [B, S, K, V].
      do: gradient of the loss by the attention output.
      x: input of W_Q.
      w_q: W_Q.
      projection: how q follows from X W_Q; None where q is X W_Q.
      o: the attention output, of any shape.
      lse: lse of the rows, of any shape.
      is_causal: whether the causal mask applies; None where the source does not say.
      scale: factor of q kᵀ in the scores; None for 1/√H.
      window: (left, right): row t sees the keys t − left to t + right; None for all keys.
      soft_cap: c in scores c · tanh(scale · q kᵀ / c); None for no cap.
      sinks: per head, the score of one more column without a key and with v = 0; None for none.
      own: the arithmetic of its heads, where the source says.
      returned: what the implementation of `own` returned, where it ran.
      notes: what was assumed or converted, one line each.
    """

    source: str
    name: str
    q: Float[np.ndarray, "B T N H"]
    k: Float[np.ndarray, "B S K H"]
    v: Float[np.ndarray, "B S K V"]
    do: Float[np.ndarray, "B T N V"] | None = None
    x: Float[np.ndarray, "B T D"] | None = None
    w_q: Float[np.ndarray, "D N H"] | None = None
    projection: Projection | None = None
    o: np.ndarray | None = None
    lse: np.ndarray | None = None
    is_causal: bool | None = None
    scale: float | None = None
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    sinks: Float[np.ndarray, "N"] | None = None
    own: tuple[HeadGroup, ...] | None = None
    returned: Returned | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rows, n = B·T."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def factor(self) -> float:
        """The factor of q·k in a score: `scale`, or 1/√H."""
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale
