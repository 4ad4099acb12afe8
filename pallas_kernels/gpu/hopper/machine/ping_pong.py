"""Ping-pong: consumer warpgroups multiply one after the other."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import ir, llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Registers
from pallas_kernels.gpu.hopper.machine.warpgroups import THREADS


class PingPong:
    """Warpgroups take turns at the tensor cores: one does its softmax while another multiplies.

    Named barriers of the machine, one per warpgroup: `wait` for one's turn, `arrive` gives it to
    the next. FlashAttention-3, arXiv 2407.08608, section 3.1.

    Where they are `held`, a turn has the products that end a step and those that begin the next,
    with nobody's in between: `enter` a mainloop, `wait_to_end` a step, `arrive` within the next
    one, `leave` the mainloop. Otherwise it has those that begin a step.
    """

    # Mosaic GPU takes named barriers from 0 upwards, of the 16 that there are.
    _FIRST = 8

    def __init__(self, consumers: int, me: Array, *, on: bool, held: bool = False) -> None:
        self._consumers, self._me, self._on = consumers, me, on and consumers > 1
        self._held = held

    def start(self) -> None:
        """Before the first `wait`: warpgroup 0 begins."""
        # On behalf of a consumer before the first: FlashAttention-3's mma_init.
        if self._on:
            pl.when(self._me == self._consumers - 1)(lambda: self._named("arrive", jnp.int32(0)))

    def wait(self) -> None:
        """Until it is this warpgroup's turn."""
        if self._on:
            self._named("sync", self._me)

    def arrive(self) -> None:
        """The next warpgroup's turn."""
        if self._on:
            self._named("arrive", lax.rem(self._me + 1, jnp.int32(self._consumers)))

    def enter(self) -> None:
        """Before a mainloop's first step."""
        if self._held:
            self.wait()

    def wait_to_begin(self) -> None:
        """Before the products that begin a step."""
        if not self._held:
            self.wait()

    def wait_to_end(self) -> None:
        """Before the products that end a step."""
        if self._held:
            self.wait()

    def leave(self) -> None:
        """After a mainloop's last step."""
        if self._held:
            self.arrive()

    def end(self) -> None:
        """After the last `arrive`: nobody waits for a turn any more."""
        # The last arrival of all has nobody else to wait for it: no barrier is left half used.
        if self._on:
            pl.when(self._me == 0)(lambda: self._named("sync", jnp.int32(0)))

    def _named(self, operation: str, index: Array) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
        def emit(_: Context, barrier: Registers) -> None:
            void = ir.Type.parse("!llvm.void")
            # Of two warpgroups: the one that arrives goes on, the other waits. JAX's own kernel has
            # one mbarrier on which both arrive and wait, which keeps them in lockstep.
            text = f"bar.{operation} $0, {2 * THREADS};"
            number: MlirValue = barrier.registers[()]
            llvm.inline_asm(void, [number], text, "r", has_side_effects=True)

        emit(index + self._FIRST)
