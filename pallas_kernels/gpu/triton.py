"""`plt`, Pallas' Triton backend, which lowers the kernels here; None if this JAX has dropped it.

JAX has deprecated the backend since 0.11. Without it every module here still imports, because
`device.without_triton` reports the case and no code that needs the backend is called.
"""

try:
    from jax.experimental.pallas import triton as plt
except ImportError:
    plt = None  # type: ignore[assignment]

__all__ = ["plt"]
