"""Low-precision attention in JAX: every rounding inside flash attention is a named choice.

Nothing is imported eagerly: `from lowprec_attn import attention, numerics` loads what it names.
"""

__version__ = "0.1.0"
