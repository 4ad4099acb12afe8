"""Low-precision attention in JAX: every rounding inside flash attention is a named choice.

No submodule is imported eagerly. `from lowprec_attn import attention, numerics` loads these two.
"""

__version__ = "0.1.0"
