"""One attention layer as `diagnose` takes it, whatever it was read from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lowprec_attn.arithmetic.heads import HeadGroup
from lowprec_attn.diagnostics import Returned


class Layer(NamedTuple):
    """The arrays of one layer, q, k and v in one float dtype, and how it attends.

    Attributes:
      source: the file or run that it was read from.
      name: within the source; empty where that holds one layer without a name.
      q, k, v: [B, T, N, H] and twice [B, S, K, H].
      do: gradient of the loss by the attention output.
      x: input of W_Q.
      w_q: W_Q.
      o: the attention output, of any shape.
      lse: of any shape.
      is_causal: None where the source does not say.
      scale: of the scores; None for 1/√H.
      window: (left, right); row t sees the keys t − left to t + right; None for all.
      own: the arithmetic of its heads, where the source says.
      returned: what `own` gave when it ran, where it did.
      notes: what was assumed or converted, one line each.
    """

    source: str
    name: str
    q: Float[np.ndarray, "B T N H"]
    k: Float[np.ndarray, "B S K H"]
    v: Float[np.ndarray, "B S K H"]
    do: Float[np.ndarray, "B T N H"] | None = None
    x: Float[np.ndarray, "B T D"] | None = None
    w_q: Float[np.ndarray, "D N H"] | None = None
    o: np.ndarray | None = None
    lse: np.ndarray | None = None
    is_causal: bool | None = None
    scale: float | None = None
    window: tuple[int, int] | None = None
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
