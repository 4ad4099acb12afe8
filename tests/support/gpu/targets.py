"""GPUs that code is compiled for on a host without a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU that code is compiled for: its name, compute capability and bytes of shared memory.

    The shared memory is that of one multiprocessor; a program may use 1024 bytes less.
    """

    kind: str
    capability: tuple[int, int]
    shared_memory: int

    def __str__(self) -> str:
        """The text of a GpuTargetConfigProto; no kernel depends on the fields left out."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.kind}"
"""


H200 = Target("NVIDIA H200", (9, 0), 228 * 1024)
A100 = Target("NVIDIA A100-SXM4-80GB", (8, 0), 164 * 1024)
L4 = Target("NVIDIA L4", (8, 9), 100 * 1024)
B200 = Target("NVIDIA B200", (10, 0), 228 * 1024)


def mesh_of(kind: str) -> AbstractMesh:
    """A mesh of one GPU for `jax.sharding.use_abstract_mesh`; lowering asks for its kind."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def devices_of(target: Target, count: int = 1) -> list[Any]:
    """`count` GPUs of one host, which need not exist here."""
    return topologies.get_topology_desc(
        platform="cuda", topology_name="x", target_config=str(target), topology=f"1x1x{count}"
    ).devices


def lowered(function: Callable[..., Any], *shapes: Any, target: Target) -> Any:
    """The function lowered for one GPU, with arguments of these shapes."""
    (device,) = devices_of(target)
    there = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), shapes)
    with jax.sharding.use_abstract_mesh(mesh_of(target.kind)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
