"""A pipeline of buffers in shared memory, from a producer to its consumers."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.hopper.machine.types import Ref, Scratch


class Either(NamedTuple):
    """Two sources of a copy, one of which is chosen when the copy starts."""

    first: Ref
    second: Ref
    takes_first: Array


Source = Ref | Either
# The source of a copy, the buffer of a stage that it goes to, and the place in that buffer.
Copy = tuple[Source, int, tuple[int, ...]]


class Pipeline:
    """Buffers in shared memory that one warpgroup fills and others read, over and over.

    It corresponds to CUTLASS's PipelineTmaAsync. The n-th filling goes to stage n modulo the number
    of stages, after every consumer has released what was there.

    The programs of a cluster may run their pipelines in step and fill all of them together;
    `cluster` is then the name of the cluster's axis.
    """

    def __init__(
        self, refs: tuple[Sequence[Ref], Ref, Ref], stages: int, *, cluster: str | None = None
    ) -> None:
        self._buffers, self._full, self._empty = refs
        self._stages, self._cluster = stages, cluster

    @staticmethod
    def types(
        stages: int,
        buffers: Sequence[Scratch],
        *,
        copies: int,
        consumers: int,
        cluster: str | None = None,
    ) -> Scratch:
        """The scratch types of a pipeline: buffers [stages, ...], filled by `copies` at a time.

        consumers: of one program. In a cluster the consumers of all programs release a buffer.
        """
        # Pallas counts warpgroups. In the machine all of their threads arrive, as all have read.
        empty: Scratch = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
        if cluster is not None:
            # Programs of a cluster fill each other's memory: all of them have to be done with it.
            empty = plgpu.ClusterBarrier(
                collective_axes=(cluster,), num_arrivals=consumers, num_barriers=stages
            )
        # Each copy arrives once and announces its bytes; the barrier waits for the bytes, too.
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        return tuple(buffers), full, empty

    def _stage(self, n: Array | int) -> Array:
        return lax.rem(jnp.int32(n), jnp.int32(self._stages))

    def producer_load(
        self,
        n: Array,
        *copies: Copy,
        to_all: Sequence[Copy] = (),
    ) -> None:
        """Starts the copies of the n-th filling, once its stage is free.

        to_all: copies that all programs of the cluster name. Each program copies a part, to all.
        """
        stage = self._stage(n)
        # The first fillings find empty stages, for which no consumer arrives, so they do not wait.
        # CUTLASS starts its producer with the inverted phase instead.
        pl.when(n >= self._stages)(partial(plgpu.barrier_wait, self._empty.at[stage]))
        for axes, some in ((None, copies), (self._cluster, to_all)):
            for source, buffer, place in some:
                target = self._buffers[buffer].at[(stage, *place)]
                copy = partial(_copy, target, self._full.at[stage], axes)
                if isinstance(source, Either):
                    chosen = (partial(copy, x) for x in (source.first, source.second))
                    lax.cond(source.takes_first, *chosen)
                else:
                    copy(source)

    def producer_tail(self, n: Array) -> None:
        """Waits, after n fillings in all, until every consumer has released all of them."""
        # Otherwise the program might end, and its memory go to another program, while consumers
        # still arrive at its barriers. CUTLASS has the same producer_tail.
        for back in range(1, self._stages + 1):
            stage = self._stage(n - back)
            pl.when(n >= back)(partial(plgpu.barrier_wait, self._empty.at[stage]))

    def consumer_wait(self, n: Array | int) -> None:
        """Waits until the n-th filling is there."""
        plgpu.barrier_wait(self._full.at[self._stage(n)])

    def consumer_release(self, n: Array | int) -> None:
        """Releases the n-th filling, which this consumer no longer needs."""
        plgpu.barrier_arrive(self._empty.at[self._stage(n)])

    def get(self, n: Array | int, *place: Array | int, buffer: int = 0) -> Ref:
        """A reference to a buffer of the n-th filling, or to a place in it."""
        return self._buffers[buffer].at[(self._stage(n), *place)]


def _copy(target: Ref, barrier: Ref, axes: str | None, source: Ref) -> None:
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=axes)
