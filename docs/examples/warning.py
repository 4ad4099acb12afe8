"""Writes warning.npz: q, k, v, dO of which one head makes `lowprec-attn diagnose` warn.

python docs/examples/warning.py && lowprec-attn diagnose warning.npz

No run made these arrays. Head 0 is healthy. Head 1 has large scores, keys that nearly repeat, and
values with a common part, so the error that the rounding of O leaves in δ is most of dQ.
"""

import ml_dtypes
import numpy as np

LENGTH, HEAD_SIZE, DIRECTIONS = 256, 32, 6

r = np.random.default_rng(0)
normal = r.standard_normal
arrays = {name: normal((1, LENGTH, 2, HEAD_SIZE)) for name in ("q", "k", "v", "do")}  # [B, T, N, H]
directions = normal((DIRECTIONS, HEAD_SIZE))  # q and k of head 1 lie near these
for name in ("q", "k"):
    nearest = directions[r.integers(DIRECTIONS, size=LENGTH)]
    arrays[name][0, :, 1] = 16 * (nearest + 0.03 * normal((LENGTH, HEAD_SIZE)))
arrays["v"][0, :, 1] = 2 + 0.3 * arrays["v"][0, :, 1]

np.savez("warning.npz", **{name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()})
