"""One attention layer as `diagnose` takes it, whatever it was read from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.diagnostics.comparison import Returned
from lowprec_attn.diagnostics.weights import Projection

WITH_HEADS = ("q", "k", "v", "do")


class Layer(NamedTuple):
    """The arrays of one layer, q, k and v in one float dtype, and how it attends.

    Attributes:
      source: the file or run that it was read from.
      name: within the source; empty where that holds one layer without a name.
      q, k, v: [B, T, N, H], [B, S, K, H] and [B, S, K, V].
      do: gradient of the loss by the attention output.
      x: input of W_Q.
      w_q: W_Q.
      projection: how q follows from X W_Q, None where it is X W_Q.
      o: the attention output, of any shape.
      lse: of any shape.
      is_causal: None where the source does not say.
      scale: of the scores; None for 1/√H.
      window: (left, right); row t sees the keys t − left to t + right; None for all.
      soft_cap: c of scores c · tanh(scale · q kᵀ / c); None for no cap.
      sinks: scores of one more column of every row, without a key and with v = 0; None for none.
      own: the arithmetic of its heads, where the source says.
      returned: what `own` gave when it ran, where it did.
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
        """n = B·T."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def factor(self) -> float:
        """Of q·k in a score."""
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale
