"""Measures the cost of `attention_signals` on this machine; prints one JSON line.

python -m benchmarks.diagnostics --length 1024
"""

import argparse
import functools
import json
import os
import platform
import time

import jax
import jax.numpy as jnp

from lowprec_attn.diagnostics.signals import attention_signals
from lowprec_attn.numerics import get_preset


def measure(*, length: int, heads: int, head_size: int, numerics: str, repeats: int) -> dict:
    """Seconds (the fastest repeat) and temporary memory of every signal of one layer.

    Batch 1, bfloat16, causal, with dO, x, W_Q and W_K of width heads · head_size.
    """
    keys = jax.random.split(jax.random.key(0), 7)
    rows, width = (1, length, heads, head_size), heads * head_size
    q, k, v, do = (jax.random.normal(key, rows, jnp.bfloat16) for key in keys[:4])
    inputs = {
        "x": jax.random.normal(keys[4], (1, length, width), jnp.bfloat16),
        "w_q": jax.random.normal(keys[5], (width, heads, head_size)),
        "w_k": jax.random.normal(keys[6], (width, heads, head_size)),
    }
    signals = jax.jit(
        functools.partial(attention_signals, numerics=get_preset(numerics), is_causal=True)
    )
    compiled = signals.lower(q, k, v, do, **inputs).compile()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(q, k, v, do, **inputs))
        seconds.append(time.perf_counter() - start)
    device, memory = jax.devices()[0], compiled.memory_analysis()
    return {
        "what": "attention_signals",
        "shape": rows,
        "numerics": numerics,
        "seconds": round(min(seconds), 4),
        "temporary_mib": None if memory is None else round(memory.temp_size_in_bytes / 2**20, 1),
        "device": device.device_kind,
        "cpu_cores": os.cpu_count() if device.platform == "cpu" else None,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Prints the cost of the shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--numerics", default="published")
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
