"""A pipeline of buffers in shared memory, from a producer to its consumers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


class Ring:
    """Buffers in shared memory that one warpgroup fills and others read, over and over.

    The n-th filling goes to buffer n modulo their number; it waits until every reader has released
    what was there.

    The programs of a cluster may have rings in step, and fill all of them together: `cluster` is
    the name of its axis.
    """

    def __init__(self, refs: Any, size: int, *, cluster: str | None = None) -> None:
        self._buffers, self._filled, self._free = refs
        self._size, self._cluster = size, cluster

    @staticmethod
    def types(
        size: int, buffers: Sequence[Any], *, copies: int, readers: int, cluster: str | None = None
    ) -> Any:
        """The scratch types of a ring: buffers [size, ...], filled by `copies` at a time.

        readers: of one program; in a cluster those of all programs release a buffer.
        """
        free: Any = plgpu.Barrier(num_arrivals=readers, num_barriers=size)
        if cluster is not None:
            free = plgpu.ClusterBarrier(
                collective_axes=(cluster,), num_arrivals=readers, num_barriers=size
            )
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=size)
        return tuple(buffers), filled, free

    def _slot(self, n: Array | int) -> Array:
        return lax.rem(jnp.int32(n), jnp.int32(self._size))

    def fill(
        self,
        n: Array,
        *copies: tuple[Any, int, tuple[int, ...]],
        to_all: Sequence[tuple[Any, int, tuple[int, ...]]] = (),
    ) -> None:
        """The n-th filling, from copies (source, which buffer, where in it).

        to_all: those that all programs of the cluster name, of which each makes its part for all.
        """
        slot = self._slot(n)
        pl.when(n >= self._size)(partial(plgpu.barrier_wait, self._free.at[slot]))
        for axes, some in ((None, copies), (self._cluster, to_all)):
            for source, buffer, place in some:
                target = self._buffers[buffer].at[(slot, *place)]
                plgpu.copy_gmem_to_smem(source, target, self._filled.at[slot], collective_axes=axes)

    def drain(self, n: Array) -> None:
        """After n fillings, the last: until every reader has released them all."""
        for back in range(1, self._size + 1):
            slot = self._slot(n - back)
            pl.when(n >= back)(partial(plgpu.barrier_wait, self._free.at[slot]))

    def wait(self, n: Array | int) -> None:
        """Until the n-th filling is there."""
        plgpu.barrier_wait(self._filled.at[self._slot(n)])

    def release(self, n: Array | int) -> None:
        """This reader needs the n-th filling no more."""
        plgpu.barrier_arrive(self._free.at[self._slot(n)])

    def get(self, n: Array | int, *place: Any, buffer: int = 0) -> Any:
        """A reference to the n-th filling."""
        return self._buffers[buffer].at[(self._slot(n), *place)]
