"""Type names for what kernels are written with; Pallas has no types for most of it."""

from typing import Any, TypeAlias

from jax.experimental.mosaic.gpu import fragmented_array, launch_context

Ref: TypeAlias = Any
"""A reference, inside a kernel, to global or shared memory, to a part of it, or to barriers."""

Scratch: TypeAlias = Any
"""A description of shared memory, registers or barriers of a kernel, for `plgpu.kernel`."""

Accumulator: TypeAlias = Any
"""A reference to registers that products are added to."""

Layout: TypeAlias = Any
"""How the registers of a warpgroup hold an array."""

MlirValue: TypeAlias = Any
"""A value of the compiler's IR, where instructions are written one by one."""

Registers: TypeAlias = fragmented_array.FragmentedArray
"""An array in the registers of a warpgroup, where instructions are written one by one."""

Context: TypeAlias = launch_context.LaunchContext
"""The first argument that Mosaic GPU gives to code that writes instructions one by one."""
