"""Pallas' Triton backend, `plt`, through which the kernels here are lowered; None without it.

JAX has deprecated it since 0.11. A JAX that has dropped it still imports everything here:
`device.without_triton` says so, and nothing that needs it is called.
"""

try:
    from jax.experimental.pallas import triton as plt
except ImportError:
    plt = None  # type: ignore[assignment]

__all__ = ["plt"]
