"""Ping-pong: consumer warpgroups take turns at the tensor cores."""

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

    Each warpgroup has a named barrier of the machine: `wait` waits for the warpgroup's turn, and
    `arrive` gives the turn to the next (FlashAttention-3, arXiv 2407.08608, section 3.1).

    A turn usually has the products that begin a step. If turns are `held`, a turn has the products
    that end a step and those that begin the next, with no other warpgroup's products in between:
    `enter` a mainloop, `wait_to_end` a step, `arrive` within the next step, `leave` the mainloop.
    """

    # There are 16 named barriers. Mosaic GPU takes its own from 0 upwards.
    _FIRST = 8

    def __init__(self, consumers: int, me: Array, *, on: bool, held: bool = False) -> None:
        self._consumers, self._me, self._on = consumers, me, on and consumers > 1
        self._held = held

    def start(self) -> None:
        """Gives the first turn to warpgroup 0; comes before the first `wait`."""
        # The last consumer acts as the one before the first, like FlashAttention-3's mma_init.
        if self._on:
            pl.when(self._me == self._consumers - 1)(lambda: self._named("arrive", jnp.int32(0)))

    def wait(self) -> None:
        """Waits until it is this warpgroup's turn."""
        if self._on:
            self._named("sync", self._me)

    def arrive(self) -> None:
        """Gives the turn to the next warpgroup."""
        if self._on:
            self._named("arrive", lax.rem(self._me + 1, jnp.int32(self._consumers)))

    def enter(self) -> None:
        """Waits for the turn before a mainloop's first step, if turns are held."""
        if self._held:
            self.wait()

    def wait_to_begin(self) -> None:
        """Waits for the turn before the products that begin a step, unless turns are held."""
        if not self._held:
            self.wait()

    def wait_to_end(self) -> None:
        """Waits for the turn before the products that end a step, if turns are held."""
        if self._held:
            self.wait()

    def leave(self) -> None:
        """Gives the turn away after a mainloop's last step, if turns are held."""
        if self._held:
            self.arrive()

    def end(self) -> None:
        """Ends the ping-pong after the last `arrive`, when nobody waits for a turn any more."""
        # Nobody else waits for the last arrival, which would leave a barrier half used.
        if self._on:
            pl.when(self._me == 0)(lambda: self._named("sync", jnp.int32(0)))

    def _named(self, operation: str, index: Array) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
        def emit(_: Context, barrier: Registers) -> None:
            void = ir.Type.parse("!llvm.void")
            # A barrier of two warpgroups: the one that arrives goes on, the other waits. JAX's own
            # kernel has one mbarrier on which both arrive and wait, which keeps them in lockstep.
            text = f"bar.{operation} $0, {2 * THREADS};"
            number: MlirValue = barrier.registers[()]
            llvm.inline_asm(void, [number], text, "r", has_side_effects=True)

        emit(index + self._FIRST)
