"""The library, called as the public code is, with the presets and rules of the reading."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compiling import optimized

from lowprec_attn import attention, numerics
from lowprec_attn.numerics import Numerics
from public_code.reading import COMPILED, EAGER, Rule
from public_code.record import by_head

PRESETS = {
    "published": (numerics.PUBLISHED, COMPILED),
    "published_eager": (numerics.PUBLISHED_EAGER, EAGER),
}
RULES: dict[Rule, numerics.RowMax] = {
    "standard": numerics.StandardMax(),
    "published": numerics.PublishedMax(beta=2.0, tolerance=1e-3, clamp=1e-10),
    "bounded": numerics.DynamicMax(),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call of the library."""

    implementation: str
    numerics: Numerics
    row_max: numerics.RowMax

    def forward_and_backward(self, arrays: dict[str, Any]) -> dict[str, jax.Array]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention.dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                numerics=self.numerics,
                row_max=self.row_max,
                implementation=self.implementation,
            )

        out, pullback = jax.vjp(attend, *(jnp.asarray(arrays[name]) for name in "qkv"))
        grads = pullback(jnp.asarray(arrays["do"]).astype(out.dtype))
        return {"out": out} | {f"d{name}": x for name, x in zip("qkv", grads, strict=True)}


def forward_and_backward(call: Call, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return call.forward_and_backward(arrays)


# Compiled as a user's program; compiled quickly, for large differences; and so for each call.
WAYS = {
    "optimized": optimized(forward_and_backward, static_argnums=0),
    "quick": jax.jit(forward_and_backward, static_argnums=0),
    "anew": lambda call, arrays: jax.jit(lambda x: call.forward_and_backward(x))(arrays),
}


def library(call: Call, arrays: dict[str, np.ndarray], way: str = "optimized") -> Any:
    """out dq dk dv, float32 [N, T, H]."""
    result = WAYS[way](call, arrays)
    return by_head({name: np.asarray(x).astype(np.float32) for name, x in result.items()})
