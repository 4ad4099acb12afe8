"""Names for what Pallas and Mosaic GPU give no type of its own."""

from typing import Any, TypeAlias

Ref: TypeAlias = Any
"""A reference to global or shared memory, or to a part of it, inside of a kernel."""

Scratch: TypeAlias = Any
"""What describes the shared memory, registers and barriers of a kernel to `plgpu.kernel`."""

Accumulator: TypeAlias = Any
"""A reference to registers that products are added to."""

Layout: TypeAlias = Any
"""How the registers of a warpgroup hold an array."""

MlirValue: TypeAlias = Any
"""A value of the compiler's IR, where instructions are written one by one."""
