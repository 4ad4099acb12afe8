"""The suite runs on 8 simulated CPU devices, with strict promotion of ranks and warnings as errors.

`JAX_PLATFORMS=cuda,cpu pytest -m gpu` runs the tests of a device instead.
"""

import os
from collections.abc import Iterator

import jax
import pytest

if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def strict_promotion() -> Iterator[None]:
    """No implicit dtype promotion; per module, because Optax and NNX layers rely on it."""
    with jax.numpy_dtype_promotion("strict"):
        yield
