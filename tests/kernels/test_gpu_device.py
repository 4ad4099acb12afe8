"""The compiled GPU kernels on a device: the table of checks that `record_gpu.py` also records.

export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
pytest -m gpu -n 8 --dist=load tests/kernels/test_gpu_device.py
"""

import jax.numpy as jnp
import pytest
from gpu import checks as gpu_checks

from lowprec_attn import attention, numerics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]


@pytest.mark.parametrize("check", gpu_checks.CHECKS, ids=repr)
def test_check_passes(check: gpu_checks.Check) -> None:
    record = gpu_checks.record_of(check)
    assert record["passed"], record


def test_forcing_the_kernels_names_what_they_decline() -> None:
    q = jnp.ones((1, 16, 2, 32))
    chosen = numerics.EXACT.replace(pv="float8_e4m3fn")
    with pytest.raises(NotImplementedError, match=r"not support pv=float8_e4m3fn; use tiled or"):
        attention.dot_product_attention(q, q, q, numerics=chosen, implementation="gpu")
    bias = jnp.ones((1, 2, 16, 16))
    with pytest.raises(NotImplementedError, match=r"not support a dense bias; use tiled or"):
        attention.dot_product_attention(q, q, q, bias=bias, implementation="gpu")
