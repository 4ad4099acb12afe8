"""With a JAX without Pallas' Triton lowering, others serve attention and training goes on."""

import json
import os
import subprocess
import sys

import pytest
from command import ROOT

from pallas_kernels.gpu.hopper.attention import is_available

# Runs in a fresh interpreter, in which neither the public module nor the lowering can be imported.
WITHOUT_TRITON = """
import json, sys

sys.modules["jax.experimental.pallas.triton"] = None
sys.modules["jax._src.pallas.triton"] = None

import jax
import jax.numpy as jnp
from gpu.targets import mesh_of
from tiny import tiny_settings

from lowprec_attn import attention
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.step import make_steps, root_key

settings = tiny_settings(
    model__layers=1, model__width=128, model__context=128, attention__numerics="flash"
)
steps = make_steps(settings, Attend(attention.dot_product_attention, True))
ids = jax.ShapeDtypeStruct((1, 2, 128), jnp.int32)
root = root_key(settings)
arguments = jax.eval_shape(steps.init, root), ids, ids, root
kernels = {}
for kind in ("NVIDIA H200", "NVIDIA B200"):
    with jax.sharding.use_abstract_mesh(mesh_of(kind)):
        traced = jax.jit(steps.train).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text
    kernels[kind] = [name for name in ("triton", "mosaic_gpu") if name in text]

q = jnp.ones((1, 16, 2, 64), jnp.bfloat16)
try:
    attention.dot_product_attention(q, q, q, implementation="gpu")
except attention.UnsupportedError as error:
    print(json.dumps([str(error), kernels]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[str, dict[str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    message, kernels = json.loads(done.stdout)
    return message, kernels


def test_the_general_kernels_are_declined_in_one_line(found: tuple[str, dict[str, list[str]]]):
    message, _ = found
    assert message.startswith("implementation 'gpu' does not support JAX ")
    assert message.endswith(" (it needs one with Pallas' Triton lowering); use tiled or dense")


def test_a_training_step_takes_what_is_left(found: tuple[str, dict[str, list[str]]]):
    """The Hopper kernels compute attention where they serve; XLA computes everything else."""
    _, kernels = found
    hopper = ["mosaic_gpu"] if is_available() else []
    assert kernels == {"NVIDIA H200": hopper, "NVIDIA B200": []}
