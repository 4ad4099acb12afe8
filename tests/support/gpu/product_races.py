"""Races of matrix products, which Mosaic GPU's interpreter does not check.

A product reads its operands from shared memory through the asynchronous proxy, as a copy does.
Before the read, writes by threads must have been committed and waited for.
"""

from typing import Any

import jax
import pytest


def check_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernels that are traced from here on report races of products. Needs JAX 0.11."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks

    multiply = callbacks.wgmma

    def checked(*, thread: Any, source_info: Any = None, **operands: Any) -> Any:
        memory = callbacks._get_shared_memory()
        with memory.lock:
            clocks = memory.clocks[thread]
            clocks.inc(memory.thread_to_vc_position(thread))
            clock = clocks.async_smem_clock.copy()
        for name in "ab":
            array = operands[f"{name}_allocation_key_as_array"]
            key = callbacks.HostAllocationKey.from_array(array)
            transforms = callbacks._remove_noop_transforms(operands[f"{name}_transforms"])
            read = memory.access(key, jax.tree.map(int, transforms))
            callbacks.get_races().check_read(thread, clock, key, read, source_info=source_info)
        return multiply(thread=thread, source_info=source_info, **operands)

    monkeypatch.setattr(callbacks, "wgmma", checked)
