"""The records that the parts of the forward kernel hand to each other."""

from typing import NamedTuple

from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ForwardTile
from pallas_kernels.gpu.hopper.ends import Ends
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import Segments


class Inputs(NamedTuple):
    """The inputs of the forward kernel.

    Attributes:
      q, k, v: the three arrays; each of them is the packed array, if there is one.
      segments: the ids, if ids hide keys.
      start: m and l of rows before their first key, [2, N, 64], if there are sinks.
      ends: the ends of what is seen, if lengths alone hide keys.
    """

    q: Ref
    k: Ref
    v: Ref
    segments: Segments | None = None
    start: Ref = None
    ends: Ends | None = None


class Outputs(NamedTuple):
    """The outputs of the forward kernel: O is [B, T, N, V], vectors are [B, N, T].

    Attributes:
      o: O.
      lse: m + log l.
      offset: what the exponent of P adds: −lse·log2(e). If 1 / l is saved, it is −M or −m·log2(e),
        in the units of P̄. If log₂ l is saved, it is −m·log2(e) in rows of large scores.
      saved: the O that δ sees, if it is not O itself, or the lower half of O.
      inverse_l: 1 / l, if it is saved.
      more: what the exponent of P adds besides, if log₂ l is saved: −log₂ l in rows of large
        scores, otherwise 0. Added together, the two numbers would lose log₂ l.
      max_logit: the largest scores, if the call asks for them.
    """

    o: Ref
    lse: Ref
    offset: Ref
    saved: Ref = None
    inverse_l: Ref = None
    more: Ref = None
    max_logit: Ref = None


class ForwardMemory(NamedTuple):
    """Shared memory of the forward kernel.

    Attributes:
      q, k, v: pipelines from the producer to the consumers; k and v have `stages` stages. Ids of
        keys, if there are any, are a second buffer of the pipeline of k.
      statistics: lse and offset on their way out, a vector of each for every consumer. None if
        there are ids: the vectors then leave from registers.
      probs: P̄ of every consumer, if products take it from shared memory (`from_memory`).
      saved: the O that δ sees, or its lower half, on its way out. None if there is none, or if it
        leaves from registers.
      o: O on its way out, if tiles overlap. Otherwise O takes the place of its q.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    statistics: Ref | None
    probs: Ref | None  # None: in registers
    saved: Ref | None
    o: Ref | None


class QueryRows(NamedTuple):
    """64 query rows of a consumer warpgroup.

    Attributes:
      problem, tile, shared: the kernel's problem, tile and shared memory.
      ping_pong: the ping-pong with the other consumers.
      me: the index of the consumer.
      tiles, steps: how many the program has done before. They number the fillings of its pipelines.
      row: the first row.
      keys: the key steps that the rows visit.
      ids: the ids of the rows [64], if there are any.
      start: m and l before the first step, if there are sinks.
    """

    problem: Problem
    tile: ForwardTile
    shared: ForwardMemory
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Array
    row: Array
    keys: KeySteps
    ids: Array | None = None
    start: tuple[Array, Array] | None = None

    @property
    def end(self) -> Array:
        """How many steps the rows visit."""
        return self.keys.end


class Running(NamedTuple):
    """The state that a step hands to the next, beside Ō.

    Attributes:
      m: [64].
      l: [64, LANES], in parts. They are summed across threads once, in the epilogue, as in
        FlashAttention-3.
      max_logit: the largest score [64] in the units of m; None if it is m, or not asked for.
    """

    m: Array
    l: Array
    max_logit: Array | None = None


class Softmax(NamedTuple):
    """The softmax of a step: P̄ [64, keys], α [64], and m, l and the largest score of `Running`.

    P̄ is rounded, except where `softmax.rounds_later` says so.
    """

    m: Array
    l: Array
    probs: Array
    alpha: Array
    max_logit: Array | None = None

    @property
    def running(self) -> Running:
        """The state that the next step starts from."""
        return Running(self.m, self.l, self.max_logit)


class Due(NamedTuple):
    """A tile whose last P̄V and epilogue are still due; see `ForwardTile.overlap_tiles`."""

    acc: Array
    softmax: Softmax
    row: Array
    batch: Array
    head: Array
