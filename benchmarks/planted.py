"""Attention with planted arithmetics and planted bugs, in NumPy, to try `lowprec-attn check` on.

None of the library's arithmetic is used here. The forward pass is an online softmax over tiles of
keys, in either direction. The backward pass is written out. Values are float32 between roundings. A
bug is a name for which one line of the code asks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from lowprec_attn.check.problems import Problem

Array = np.ndarray

# The name of each bug, and the text (in lower case) that the verdict must contain. If the text is
# empty, any bug in the verdict counts.
BUGS: dict[str, str] = {
    "dQ lacks the scale": "dq lacks the factor scale",
    "dK and dV of the first query head of a group": "the first head alone",
    "dK and dV are means over a group": "their mean",
    "query head n reads key head n mod K": "n mod k",
    "backward pass aligned with the last row": "causal diagonal is aligned",
    "keys of the last partial tile are dropped": "last keys, which do not fill a tile",
    "padding of the last tile is attended to": "zeros that fill the last tile of keys",
    "rows of the last partial tile are not written": "last rows, which do not fill a tile",
    "NaN in rows that see no key": "nan behind a mask",
    "the mask is ignored in the backward pass": "mask is ignored",
    "the maximum is not subtracted": "maximum",
    "δ is left out": "δ = rowsum(do ∘ o) is left out",
    "a row sees one key too many": "one key too many",
    "the scale asked for is ignored": "scale asked for is ignored",
    "a tile of dQ is lost now and then": "two runs",
    "keys of the first sequence for all": "first",
    "l is not rescaled": "",
    "the last keys are counted twice in dV": "",
    "hidden scores are −1e4": "",
    "the maximum is over hidden keys too": "",
    "the window is one key too long": "one key too many before it",
    "the window is one key too short": "one key too few before it",
    "the window is one key too long behind": "one key too many behind it",
    "the window is one key too short behind": "one key too few behind it",
    "the sides of the window are exchanged": "two sides of the window are exchanged",
    "the window is ignored in the backward pass": "backward pass alone, the window is ignored",
    "the window begins at whole tiles": "",
    "the soft cap has no derivative": "derivative of the soft cap is left out",
    "the soft cap is ignored": "soft cap is ignored",
    "the soft cap is ignored in the backward pass": "backward pass alone, the soft cap is ignored",
    "the scale comes after the soft cap": "scale is multiplied in after the soft cap",
    "the slope of the soft cap is 1 − S²": "",
    "the bias is multiplied by the scale": "bias is added before the scale",
    "the bias is added before the soft cap": "bias is added before the soft cap",
    "the bias is ignored in the backward pass": "backward pass alone, the bias is ignored",
    "the bias of the first head for all": "every head has the bias of the first",
    "the gradient of the bias has the scale": "dbias is multiplied by the scale",
    "the gradient of the bias is that of the first sequence": "dbias is that of the first sequence",
    "the sinks are missing from l": "sinks are missing from l",
    "the sinks are missing from l in the backward pass": "alone, the sinks are missing from l",
    "the sinks are multiplied by the scale": "sinks are multiplied by the scale",
    "the sink of the first head for all": "every head has the sink of the first",
    "the gradient of the sinks has the wrong sign": "dsinks has the wrong sign",
    "the gradient of the sinks lacks exp(sink − lse)": "dsinks lacks the factor exp(sink",
    "the gradient of the sinks is that of the first sequence": "dsinks is that of the first seq",
    "the gradient of the sinks lacks that of lse": "",
    "the gradient of lse is ignored": "gradient of lse is ignored",
    "the gradient of lse has the wrong sign": "gradient of lse has the wrong sign",
    "the gradient of lse lacks the scale": "",
    "lse is in base 2": "lse is in base 2",
    "lse lacks the sinks": "lse lacks the sinks",
    "lse lacks the logarithm of l": "lse lacks the logarithm of l",
}
# OF_FULL: bugs that show only in problems that are not causal. OF_CAUSAL: bugs that show only in
# causal ones. NOT_WITH: the feature that hides a bug. ONLY_WITH: the features that a bug needs.
OF_FULL = frozenset(
    {
        "the window is one key too long behind",
        "the window is one key too short behind",
        "the sides of the window are exchanged",
    }
)
OF_CAUSAL = frozenset(
    {
        "a row sees one key too many",
        "backward pass aligned with the last row",
        "hidden scores are −1e4",
        "the maximum is over hidden keys too",
    }
)
NOT_WITH: dict[str, str] = {
    "the maximum is not subtracted": "soft_cap",
    "the maximum is over hidden keys too": "soft_cap",
    "hidden scores are −1e4": "soft_cap",
    "NaN in rows that see no key": "sinks",
}
ONLY_WITH: dict[str, tuple[str, ...]] = {
    "the bias is added before the soft cap": ("soft_cap", "bias"),
}

ARITHMETICS: dict[str, dict[str, Any]] = {
    "exact": {"probs": False, "probs_bwd": False, "ds": False, "delta": "float32"},
    "flash": {},
    "float32_output": {"delta": "float32"},
    "halves_output": {"delta": "halves"},
    "delta_dp_p": {"delta": "dp_p"},
    "normalized_delta": {"delta": "normalized"},
    "corrected_after_cast": {"delta": "after_cast"},
    "jax_nn": {"delta": "dp_p", "ds": False, "dp": True, "normalize": True},
    "probe": {"scores": True, "pv": True, "dp": True},
    "flash with ds=float32": {"ds": False},
    "flash with probs_bwd=float32": {"probs_bwd": False},
    "flash with dp=bfloat16": {"dp": True},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """Attention with a planted arithmetic, a planted loop over the keys, and perhaps a bug.

    The other fields say which values are rounded to the arrays' format, and how δ is formed.

    Attributes:
      tile: the number of keys in a step.
      backwards: whether the loop runs from the last keys to the first.
      bug: a name in `BUGS`, or None.
      rng: the random numbers of a bug that comes and goes.
    """

    tile: int
    backwards: bool = False
    scores: bool = False
    probs: bool = True
    pv: bool = False
    dp: bool = False
    ds: bool = True
    probs_bwd: bool = True
    normalize: bool = False
    delta: str = "output"
    bug: str | None = None
    rng: np.random.Generator = dataclasses.field(default_factory=np.random.default_rng)

    def __call__(self, asked: Problem) -> dict[str, Array]:
        """Returns o and dq [B, T, N, H], dk and dv [B, S, K, H], lse, dsinks and dbias, by name."""
        with np.errstate(all="ignore"):
            return self._both(asked)

    def _both(self, asked: Problem) -> dict[str, Array]:
        dtype, bug, scale = asked.q.dtype, self.bug, asked.scale

        def low(x: Array, when: bool = True) -> Array:
            return x.astype(dtype).astype(np.float32) if when else x

        q, k, v, do = (np.moveaxis(x.astype(np.float32), 2, 1) for x in asked.arrays)
        rows, keys, kv_heads = q.shape[2], k.shape[2], k.shape[1]
        group = q.shape[1] // kv_heads
        of = np.arange(q.shape[1]) // group
        if bug == "query head n reads key head n mod K":
            of = np.arange(q.shape[1]) % kv_heads
        if bug == "the scale asked for is ignored":
            scale = q.shape[-1] ** -0.5
        if bug == "keys of the first sequence for all":
            k, v = (np.repeat(x[:1], x.shape[0], 0) for x in (k, v))
        pad = -keys % self.tile if bug == "padding of the last tile is attended to" else 0
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
        k, v = k[:, of], v[:, of]

        s_all, slope = self._scores(q, k, asked, scale, pad)
        s_all = low(s_all, self.scores)

        def hidden(backward: bool) -> Array:
            seen = self._seen(asked, rows, keys, pad, backward)
            every = s_all
            if backward:
                every, _ = self._scores(q, k, self._in_backward(asked), scale, pad)
                every = low(every, self.scores)
            if bug == "hidden scores are −1e4":
                return np.where(seen, every, every - np.float32(1e4))
            return np.where(seen, every, -np.float32(np.inf))

        sink = self._sink(asked)
        s = hidden(backward=False)
        o, lse = self._forward(s, s_all, v, sink, low)
        returned = self._returned(s, sink, lse)
        if bug == "rows of the last partial tile are not written":
            o[:, :, rows // self.tile * self.tile :] = 0
            do = np.where(np.arange(rows)[:, None] < rows // self.tile * self.tile, do, 0)

        s = hidden(backward=True)
        if bug == "the soft cap is ignored in the backward pass":
            slope = np.ones((), np.float32)
        if bug == "the sinks are missing from l in the backward pass":
            m = np.where(np.isfinite(s.max(-1, keepdims=True)), s.max(-1, keepdims=True), 0)
            lse = m + np.log(np.exp(s - m).sum(-1, keepdims=True))
        p, p_sink = np.exp(s - lse), np.exp(sink - lse)
        if bug != "NaN in rows that see no key":
            p = np.where(np.isfinite(s), p, 0)
            p_sink = np.where(np.isfinite(sink), p_sink, 0)
        dlse = np.zeros((1, 1, 1, 1), np.float32)
        if asked.dlse is not None and bug != "the gradient of lse is ignored":
            dlse = np.moveaxis(asked.dlse, 2, 1)[..., None]
            dlse = -dlse if bug == "the gradient of lse has the wrong sign" else dlse
        dp = low(np.einsum("bnth,bnsh->bnts", do, v), self.dp)
        delta = self._delta(p, dp, do, o, low)
        factor = np.float32(scale) * slope
        of_lse = dlse / factor if bug == "the gradient of lse lacks the scale" else dlse
        d = low(p * (dp - delta + of_lse) * factor, self.ds)
        dq = np.einsum("bnts,bnsh->bnth", d, k)
        dk = np.einsum("bnts,bnth->bnsh", d, q)
        p_low = low(p, self.probs_bwd)
        if self.delta == "normalized":
            total = np.maximum(p.sum(-1, keepdims=True) + p_sink, 1e-30)
            r = ((p * (dp - delta)).sum(-1, keepdims=True) - p_sink * delta) / total
            dq = dq - r * np.einsum("bnts,bnsh->bnth", low(p * factor, self.probs_bwd), k)
            delta = delta + r
            cast = low(p * (dp - delta + of_lse) * factor, self.ds)
            dk = np.einsum("bnts,bnth->bnsh", cast, q)
        if self.delta == "after_cast" and asked.soft_cap is None:
            total = np.maximum(p_low.sum(-1, keepdims=True) + p_sink, 1e-30)
            # Rows of dS over the keys and the sink sum to dlse. The sink's part is subtracted.
            sum_of_ds = dlse * (p.sum(-1, keepdims=True) > 0) - p_sink * (dlse - delta)
            r = (d.sum(-1, keepdims=True) - np.float32(scale) * sum_of_ds) / total
            dq = dq - r * np.einsum("bnts,bnsh->bnth", p_low, k)
            dk = dk - np.einsum("bnts,bnth->bnsh", p_low, low(r * q))
        dv = np.einsum("bnts,bnth->bnsh", p_low, do)
        if bug == "dQ lacks the scale":
            dq = dq / np.float32(scale)
        if bug == "a tile of dQ is lost now and then":
            first = self.rng.integers(keys)
            lost = slice(first, first + self.tile)
            dq = dq - np.einsum("bnts,bnsh->bnth", d[..., lost], k[:, :, lost])
        if bug == "the last keys are counted twice in dV":
            dv[:, :, keys // self.tile * self.tile :] *= 2
        dk, dv = (self._summed(x[:, :, :keys], of, kv_heads, group) for x in (dk, dv))
        found = {
            n: np.moveaxis(low(x), 1, 2)
            for n, x in zip(("o", "dq", "dk", "dv"), (o, dq, dk, dv), strict=True)
        }
        found["lse"] = np.moveaxis(returned[..., 0], 1, 2)
        if asked.masking.sinks is not None:
            found["dsinks"] = low(self._of_sinks(p_sink, delta, dlse, scale).sum(0))
        if asked.masking.bias is not None:
            is_before = bug == "the bias is added before the soft cap"
            ds = p * (dp - delta + dlse) * (slope if is_before else 1)
            found["dbias"] = low(self._of_bias(ds[..., :keys], scale))
        return {n: x.astype(np.float64) for n, x in found.items()}

    def _in_backward(self, asked: Problem) -> Problem:
        """Returns the problem that the backward pass sees when it recomputes the scores."""
        if self.bug == "the soft cap is ignored in the backward pass":
            return asked.replace(soft_cap=None)
        if self.bug == "the bias is ignored in the backward pass":
            return asked.masked(bias=None)
        return asked

    def _sink(self, asked: Problem) -> Array:
        if asked.masking.sinks is None:
            return np.full((1, 1, 1, 1), -np.inf, np.float32)
        sinks = asked.masking.sinks.astype(np.float32)
        if self.bug == "the sinks are multiplied by the scale":
            sinks = sinks * np.float32(asked.scale)
        if self.bug == "the sink of the first head for all":
            sinks = np.repeat(sinks[:1], len(sinks))
        return sinks[None, :, None, None]

    def _returned(self, s: Array, sink: Array, lse: Array) -> Array:
        """Returns the lse that the caller gets; the backward pass has the right one."""
        m = np.where(np.isfinite(s.max(-1, keepdims=True)), s.max(-1, keepdims=True), 0)
        if self.bug == "lse is in base 2":
            return lse * np.float32(np.log2(np.e))
        if self.bug == "lse lacks the sinks":
            return m + np.log(np.exp(s - m).sum(-1, keepdims=True))
        if self.bug == "lse lacks the logarithm of l":
            m = np.maximum(m, sink)
            return m + np.exp(lse - m)
        return lse

    def _of_sinks(self, p_sink: Array, delta: Array, dlse: Array, scale: float) -> Array:
        """Returns the gradient of the sinks for each sequence [B, N]."""
        if self.bug == "the gradient of the sinks lacks that of lse":
            dlse = np.zeros_like(dlse)
        if self.bug == "the gradient of the sinks lacks exp(sink − lse)":
            p_sink = np.ones_like(p_sink)
        of_rows = p_sink * (dlse - delta)
        if self.bug == "the gradient of the sinks has the wrong sign":
            of_rows = -of_rows
        if self.bug == "the sinks are multiplied by the scale":
            of_rows = of_rows * np.float32(scale)
        if self.bug == "the gradient of the sinks is that of the first sequence":
            of_rows = of_rows[:1]
        return of_rows.sum((2, 3))

    def _of_bias(self, ds: Array, scale: float) -> Array:
        """Returns the gradient of the bias, summed over the sequences."""
        if self.bug == "the gradient of the bias is that of the first sequence":
            ds = ds[:1]
        scaled = ("the bias is multiplied by the scale", "the gradient of the bias has the scale")
        return ds.sum(0, keepdims=True) * np.float32(scale if self.bug in scaled else 1)

    def _scores(
        self, q: Array, k: Array, asked: Problem, scale: float, pad: int
    ) -> tuple[Array, Array]:
        """Returns S for all keys, and its derivative by q kᵀ · scale."""
        bug, factor = self.bug, np.float32(scale)
        s, slope = np.einsum("bnth,bnsh->bnts", q, k) * factor, np.ones((), np.float32)
        bias: Array = np.zeros((1, 1, 1, 1), np.float32)
        if asked.masking.bias is not None:
            bias = np.pad(asked.masking.bias.astype(np.float32), ((0, 0),) * 3 + ((0, pad),))
            if bug == "the bias is multiplied by the scale":
                bias = bias * factor
            if bug == "the bias of the first head for all":
                bias = np.repeat(bias[:, :1], bias.shape[1], 1)
        if asked.soft_cap is None or bug == "the soft cap is ignored":
            return s + bias, slope
        cap = np.float32(asked.soft_cap)
        if bug == "the bias is added before the soft cap":
            s, bias = s + bias, np.zeros_like(bias)
        t = np.tanh(s / factor / cap if bug == "the scale comes after the soft cap" else s / cap)
        s = cap * t * (factor if bug == "the scale comes after the soft cap" else 1)
        if bug == "the slope of the soft cap is 1 − S²":
            slope = 1 - (cap * t) ** 2
        elif bug != "the soft cap has no derivative":
            slope = 1 - t**2
        return s + bias, slope

    def _seen(self, asked: Problem, rows: int, keys: int, pad: int, backward: bool) -> Array:
        bug, masking = self.bug, asked.masking
        at = np.arange(rows)[:, None]
        if bug == "backward pass aligned with the last row" and backward:
            at = at + (keys - rows)
        if bug == "a row sees one key too many":
            at = at + 1
        cols = np.arange(keys + pad)[None]
        visible = np.broadcast_to(
            cols <= at if masking.is_causal else cols >= 0, (rows, keys + pad)
        )
        if masking.window is not None:
            left, right = masking.window
            left += bug == "the window is one key too long"
            left -= bug == "the window is one key too short"
            right += bug == "the window is one key too long behind"
            right -= bug == "the window is one key too short behind"
            if bug == "the sides of the window are exchanged":
                left, right = right, left
            first = at - left
            if bug == "the window begins at whole tiles":
                first = first // self.tile * self.tile
            is_ignored = bug == "the window is ignored in the backward pass" and backward
            visible = visible & (((cols >= first) & (cols <= at + right)) | is_ignored)
        if bug == "keys of the last partial tile are dropped":
            visible = visible & (cols < keys // self.tile * self.tile)
        visible = visible[None, None]
        is_ignored = bug == "the mask is ignored in the backward pass" and backward
        if masking.mask is None or is_ignored:
            return visible
        widths = ((0, 0),) * 3 + ((0, pad),)
        return visible & np.pad(masking.mask, widths, constant_values=True)

    def _forward(
        self, s: Array, s_all: Array, v: Array, sink: Array, low: Callable[..., Array]
    ) -> tuple[Array, Array]:
        m = np.broadcast_to(sink, (*s.shape[:3], 1))
        l = np.isfinite(m).astype(np.float32)
        if self.bug == "the sinks are missing from l":
            l = np.zeros_like(l)
        acc = np.zeros((*s.shape[:3], v.shape[-1]), np.float32)
        starts = range(0, s.shape[-1], self.tile)
        if self.normalize:
            m = np.maximum(s.max(-1, keepdims=True), sink)
            base = np.where(np.isfinite(m), m, 0)
            p = np.exp(s - base)
            l = p.sum(-1, keepdims=True) + np.exp(sink - base)
            o = np.einsum("bnts,bnsh->bnth", low(p / np.maximum(l, 1e-30)), v)
            return low(o), m + np.log(l)
        for start in reversed(starts) if self.backwards else starts:
            at = slice(start, start + self.tile)
            part = s[..., at]
            of_max = s_all[..., at] if self.bug == "the maximum is over hidden keys too" else part
            new = np.maximum(m, of_max.max(-1, keepdims=True))
            if self.bug == "the maximum is not subtracted":
                new = np.zeros_like(m)
            base = new
            if self.bug != "NaN in rows that see no key":
                base = np.where(np.isfinite(new), new, 0)
            alpha = np.where(np.isfinite(m), np.exp(m - base), 0)
            p = np.exp(part - base)
            l = (l if self.bug == "l is not rescaled" else alpha * l) + p.sum(-1, keepdims=True)
            pv = np.einsum("bnts,bnsh->bnth", low(p, self.probs), v[:, :, at])
            acc = alpha * acc + low(pv, self.pv)
            m = new
        if self.bug == "NaN in rows that see no key":
            return acc / l, m + np.log(l)
        return acc / np.where(l == 0, 1, l), m + np.log(l)

    def _delta(self, p: Array, dp: Array, do: Array, o: Array, low: Callable[..., Array]) -> Array:
        rounded = low(o)
        saved = {
            "float32": o,
            "halves": rounded + (o - rounded).astype(ml_dtypes.bfloat16).astype(np.float32),
        }.get(self.delta, rounded)
        delta = (do * saved).sum(-1, keepdims=True)
        if self.delta == "dp_p":
            delta = (p * dp).sum(-1, keepdims=True)
        if self.bug == "δ is left out":
            delta = np.zeros_like(delta)
        return delta

    def _summed(self, x: Array, of: Array, kv_heads: int, group: int) -> Array:
        by_head = [x[:, of == i] for i in range(kv_heads)]
        if self.bug == "dK and dV of the first query head of a group":
            return np.stack([part[:, 0] for part in by_head], 1)
        if self.bug == "dK and dV are means over a group":
            return np.stack([part.mean(1) for part in by_head], 1)
        return np.stack([part.sum(1) for part in by_head], 1)
