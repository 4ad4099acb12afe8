"""Writes paper_like.npz: q, k, v, dO in which one head shows the mechanism of arXiv 2510.04212.

python docs/examples/paper_like.py && lowprec-attn diagnose paper_like.npz
"""

import math

import ml_dtypes
import numpy as np

LENGTH, HEAD_SIZE = 256, 32


def healthy_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Standard normal q, k, v, dO [1, T, 2, H], float32."""
    r = np.random.default_rng(seed)
    names = ("q", "k", "v", "do")
    return {name: r.standard_normal((1, LENGTH, 2, HEAD_SIZE)).astype(np.float32) for name in names}


def paper_like_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Head 0 is healthy. In head 1 the keys 0 and 1 are equal and win every row.

    Their values are bfloat16 numbers of one sign per channel in [2, 4), where a sum of two is
    representable or a tie, and the other values bring a residue of the same sign that breaks
    it. Key 2 has hardly a value but varies l, so that O = Ō / l rounds at random.
    """
    r = np.random.default_rng(seed)
    arrays = healthy_arrays(seed)
    sign = r.choice([-1.0, 1.0], HEAD_SIZE)
    q, k = np.zeros((2, LENGTH, HEAD_SIZE))
    q[:, 0] = r.uniform(6, 8, LENGTH)
    q[:, 1] = q[:, 0] - r.uniform(0.7, 3, LENGTH)
    k[0, 0] = k[1, 0] = k[2, 1] = math.sqrt(HEAD_SIZE)
    v = np.abs(r.standard_normal((LENGTH, HEAD_SIZE))) * 0.01
    v[:2] = r.uniform(2, 4, (2, HEAD_SIZE))
    v[2] = 1e-3
    do = np.abs(r.standard_normal((LENGTH, HEAD_SIZE)))
    for name, value in {"q": q, "k": k, "v": v * sign, "do": do * sign}.items():
        arrays[name][0, :, 1] = value
    return arrays


if __name__ == "__main__":
    bfloat16 = {name: x.astype(ml_dtypes.bfloat16) for name, x in paper_like_arrays().items()}
    np.savez("paper_like.npz", **bfloat16)
