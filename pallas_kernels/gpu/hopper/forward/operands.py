"""What the parts of the forward kernel hand to each other."""

from typing import NamedTuple

from jaxtyping import Array

from pallas_kernels.gpu.hopper.block_sizes import ForwardTile
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.types import Ref
from pallas_kernels.gpu.hopper.problem import KeySteps, Problem
from pallas_kernels.gpu.hopper.segments import Segments


class Inputs(NamedTuple):
    """q, k, v (or one packed array each); `segments`, where ids hide keys.

    `start`: m and l of a row before its first key, [2, N, 64], where there are sinks.
    """

    q: Ref
    k: Ref
    v: Ref
    segments: Segments | None = None
    start: Ref = None


class Outputs(NamedTuple):
    """O [B, T, N, H]; lse, and what the exponent of P adds, −lse·log2(e), [B, N, T].

    `saved`: the O that δ sees, where it is another, or the lower half of O. `inverse_l`: 1 / l,
    where it is saved apart; `offset` is then −M, or −m·log2(e), in the units of P̄. `max_logit`: the
    largest score, where it was asked for, [B, N, T].
    """

    o: Ref
    lse: Ref
    offset: Ref
    saved: Ref = None
    inverse_l: Ref = None
    max_logit: Ref = None


class ForwardMemory(NamedTuple):
    """Shared memory.

    Attributes:
      q, k, v: pipelines from the producer to the consumers; k and v have `stages` stages. Ids of
        keys, if there are any, are a second buffer of k's.
      statistics: lse and offset on their way out, a vector of each for every consumer; where there
        are ids, they leave from registers.
      probs: P̄ of every consumer, where products take it from memory (`from_memory`).
      saved: the O that δ sees, or a half of it, on its way out, where it does not leave from
        registers.
      o: O on its way out, if tiles overlap; otherwise O takes the place of its q.
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    statistics: Ref | None
    probs: Ref | None  # in registers otherwise
    saved: Ref | None
    o: Ref | None


class QueryRows(NamedTuple):
    """64 query rows of a consumer warpgroup.

    Attributes:
      problem, tile, shared: of the kernel.
      ping_pong: with the other consumers.
      me: the consumer.
      tiles, steps: what the program has done before, which counts the fillings of its pipelines.
      row: the first row.
      keys: the steps that they visit.
      ids: [64], of the rows, if there are any.
      start: m and l before the first step, where there are sinks.
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
        """How many steps they visit."""
        return self.keys.end


class Running(NamedTuple):
    """What a step leaves of the rows to the next, beside Ō.

    Attributes:
      m: [64].
      l: [64, LANES], in parts: it is summed across threads once, in the epilogue, as
        FlashAttention-3's.
      max_logit: the largest score [64], in the units of m; None where it is m, or not asked for.
    """

    m: Array
    l: Array
    max_logit: Array | None = None


class Softmax(NamedTuple):
    """`Running` m, l and largest score; a step's P̄ [64, keys] and α [64].

    P̄ is rounded, but see `softmax.rounds_later`.
    """

    m: Array
    l: Array
    probs: Array
    alpha: Array
    max_logit: Array | None = None

    @property
    def running(self) -> Running:
        """What the next step starts from."""
        return Running(self.m, self.l, self.max_logit)


class Due(NamedTuple):
    """A tile without its last P̄V, which is due, as its epilogue is; see `overlap_tiles`."""

    acc: Array
    softmax: Softmax
    row: Array
    batch: Array
    head: Array
