"""Cross-entropy of rows of bfloat16 logits and its gradient; each logit is read once.

A program is one warpgroup. A row lies in its shared memory, where three passes take its maximum,
sum its exponentials, and write softmax − onehot in place. Pieces of a row leave while later pieces
are computed, and pieces of the program's next row take their place. Two programs fit on a
multiprocessor if a row has at most some 56,000 logits.

The lower bound on one H200, at 16,384 rows of 50,304 logits, is 0.77 ms: 3.3 GB at 4.3 TB/s. The
kernel takes 0.90 to 1.00 ms. `pallas_kernels.gpu.cross_entropy` takes 1.13 to 1.15 ms in the same
runs (results/training_speed/trainer_kernels_h200.jsonl).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.gpu.hopper.machine.layouts import extended, load
from pallas_kernels.gpu.hopper.machine.types import Layout, Ref
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter
from pallas_kernels.gpu.problem import LOG2E

# Partial maxima or sums of a row, in the shape of a step and in the shape of the rest.
State = tuple[Array, Array]
Combine = Callable[[Array, Array], Array]

LANES = 128  # columns of the matrix that a row of logits is viewed as
_STEP = 16  # rows of that matrix that a pass works on at once
_MOST = 256  # the most rows of that matrix in a copy
# Two on a multiprocessor: the copies of one run beside the arithmetic of the other. With one, the
# kernel takes 1.44 ms.
_PROGRAMS = 2 * 132
_MEMORY = 227 * 1024 - 2048
_BARRIERS = 32  # one for each piece; Mosaic GPU has no more in all


def unsupported(width: int) -> str | None:
    """Names why the kernel cannot serve rows of `width` logits, or returns None."""
    if width % LANES:
        return f"{width} columns (multiples of {LANES})"
    if 2 * width > _MEMORY:
        return f"{width} columns (at most {_MEMORY // 2})"
    _, pieces, rest = _split(width)
    if pieces + (rest > 0) > _BARRIERS:
        return f"{width} columns (they do not divide into {_BARRIERS} pieces)"
    return None


def cross_entropy_rows(
    logits: BFloat16[Array, "n V"],
    targets: Int[Array, "n"],
    *,
    z_loss: float = 0.0,
    programs: int = _PROGRAMS,
    interpret: bool = False,
) -> tuple[Float32[Array, "n"], BFloat16[Array, "n V"]]:
    """`pallas_kernels.gpu.cross_entropy.cross_entropy_rows` for bfloat16 logits.

    Args:
      logits: the rows.
      targets: the columns of the targets, below V.
      z_loss: c ≥ 0.
      programs: how many programs run at once.
      interpret: whether to run in the interpreter.

    Raises:
      ValueError: `unsupported` names something.
    """
    n, width = logits.shape
    if reason := unsupported(width):
        raise ValueError(f"cross_entropy_rows does not support {reason}")
    down = width // LANES
    cut = _split(width)
    kernel = plgpu.kernel(
        partial(_kernel, cut=cut, z_loss=z_loss),
        out_type=[
            jax.ShapeDtypeStruct((n,), jnp.float32),
            jax.ShapeDtypeStruct((n, down, LANES), logits.dtype),
        ],
        scratch_types=[
            plgpu.SMEM((down, LANES), logits.dtype),
            plgpu.Barrier(num_barriers=cut.pieces + (cut.rest > 0)),
        ],
        grid=(min(programs, n),),
        grid_names=("program",),
        compiler_params=COMPILER,
        kernel_name="cross_entropy_rows",
        **interpreter(on=interpret),
    )
    losses, gradient = kernel(logits.reshape(n, down, LANES), targets.astype(jnp.int32))
    return losses, gradient.reshape(n, width)


class _Cut(NamedTuple):
    """How a row of logits is cut: `pieces` of `together` steps, and `rest` rows of the matrix."""

    together: int
    pieces: int
    rest: int

    @property
    def rows(self) -> int:
        """Rows of the matrix in a piece."""
        return self.together * _STEP

    @property
    def last(self) -> slice | pl.Slice:
        """The rows of the matrix beyond the last piece."""
        return pl.ds(self.pieces * self.rows, self.rest)

    def piece(self, piece: Array | int) -> slice | pl.Slice:
        """The rows of a piece."""
        return pl.ds(piece * self.rows, self.rows)

    def step(self, piece: Array | int, step: Array | int) -> slice | pl.Slice:
        """The rows of a step of a piece."""
        return pl.ds(piece * self.rows + step * _STEP, _STEP)


def _split(width: int) -> _Cut:
    """Cuts a row into pieces of equal length: at least six, if it has that many steps."""
    steps, rest = divmod(width // LANES, _STEP)
    counts = [k for k in range(1, _MOST // _STEP + 1) if steps % k == 0 and 6 * k <= steps]
    together = max(counts, default=1)
    return _Cut(together, steps // together, rest)


class _Memory(NamedTuple):
    """A program's row in shared memory, and the arrays that it comes from and goes to.

    Attributes:
      logits, gradient: in global memory, [n, rows, LANES].
      row: [rows, LANES]: logits, then their gradient.
      there: a barrier for each piece: the piece has come.
      cut: how the row is cut.
    """

    logits: Ref
    gradient: Ref
    row: Ref
    there: Ref
    cut: _Cut

    def fetch(self, i: Array, piece: Array | int) -> None:
        """Starts the copy of a piece of the i-th row."""
        part = self.cut.piece(piece)
        plgpu.copy_gmem_to_smem(self.logits.at[i, part], self.row.at[part], self.there.at[piece])

    def fetch_rest(self, i: Array) -> None:
        """Starts the copy of what lies beyond the last piece of the i-th row."""
        last, pieces = self.cut.last, self.cut.pieces
        if self.cut.rest:
            plgpu.copy_gmem_to_smem(
                self.logits.at[i, last], self.row.at[last], self.there.at[pieces]
            )


def _kernel(
    logits: Ref,
    targets: Ref,
    losses: Ref,
    gradient: Ref,
    row: Ref,
    there: Ref,
    *,
    cut: _Cut,
    z_loss: float,
) -> None:
    n, program, programs = logits.shape[0], lax.axis_index("program"), lax.axis_size("program")
    memory = _Memory(logits, gradient, row, there, cut)

    def do_row(u: Array, _: None) -> None:
        i = program + u * programs
        _do_row(i, i + programs, targets, losses, memory, z_loss)

    if cut.pieces:
        lax.fori_loop(0, cut.pieces, lambda piece, _: memory.fetch(program, piece), None)
    memory.fetch_rest(program)
    lax.fori_loop(0, lax.div(n - program + (programs - 1), jnp.int32(programs)), do_row, None)
    plgpu.wait_smem_to_gmem(0)


def _do_row(
    i: Array, after: Array, targets: Ref, losses: Ref, memory: _Memory, z_loss: float
) -> None:
    """Computes the i-th row, and fetches the program's next row, `after`."""
    logits, row, cut = memory.logits, memory.row, memory.cut
    # In bfloat16, because a maximum rounds nothing and then takes half the registers.
    maxima = _over(jnp.maximum, _states(-math.inf, logits.dtype, cut), memory, wait=True)
    m = jnp.maximum(*(jnp.max(x).astype(jnp.float32) for x in maxima))
    target = targets[i]
    down, across = lax.div(target, jnp.int32(LANES)), lax.rem(target, jnp.int32(LANES))
    # Read before the sums below, which wait for all warps. After them a warp writes softmax there.
    of_target = row[down, across].astype(jnp.float32)

    def add(total: Array, x: Array) -> Array:
        return total + jnp.exp2((extended(x) - m) * jnp.float32(LOG2E))

    sums = _over(add, _states(0, jnp.float32, cut), memory)
    lse = m + jnp.log(sum(jnp.sum(x) for x in sums))
    losses[i] = lse - of_target
    factor = 1 + jnp.float32(2 * z_loss) * lse

    def softmax(x: Array) -> Array:
        p = jnp.exp2((x - lse) * jnp.float32(LOG2E))
        return p * factor if z_loss else p

    def leave(first: Array | int, count: int, window: slice | pl.Slice) -> None:
        """Stores a part of the row whose softmax is written."""
        plgpu.commit_smem()

        def subtract() -> None:
            row[down, across] = (softmax(of_target) - 1).astype(row.dtype)
            plgpu.commit_smem()

        # − onehot, in the one piece that has the target, before it leaves.
        pl.when((down >= first) & (down < first + count))(subtract)
        plgpu.copy_smem_to_gmem(row.at[window], memory.gradient.at[i, window])

    _write(softmax, leave, after, memory)


def _over(combine: Combine, state: State, memory: _Memory, *, wait: bool = False) -> State:
    """Combines all of the row, into the shape of a step and the shape of the rest."""
    row, there, cut = memory.row, memory.there, memory.cut

    def add(piece: Array, state: State) -> State:
        if wait:
            plgpu.barrier_wait(there.at[piece])

        def step(s: Array, x: Array) -> Array:
            return combine(x, _load(row.at[cut.step(piece, s)], _STEP))

        return lax.fori_loop(0, cut.together, step, state[0]), state[1]

    main_state, rest_state = lax.fori_loop(0, cut.pieces, add, state) if cut.pieces else state
    if cut.rest:
        if wait:
            plgpu.barrier_wait(there.at[cut.pieces])
        rest_state = combine(rest_state, _load(row.at[cut.last], cut.rest))
    return main_state, rest_state


def _states(value: float, dtype: DTypeLike, cut: _Cut) -> State:
    of_step, of_rest = (
        plgpu.layout_cast(jnp.full((size, LANES), value, dtype), _layout(size))
        for size in (_STEP, max(cut.rest, 1))
    )
    return of_step, of_rest


def _write(
    softmax: Callable[[Array], Array],
    leave: Callable[[Array | int, int, slice | pl.Slice], None],
    after: Array,
    memory: _Memory,
) -> None:
    """Writes softmax in place piece by piece. Pieces leave, and the row `after` takes their place.

    Args:
      softmax: computes the softmax of some logits.
      leave: stores a part of the row: its first row of the matrix, how many, and their slice.
      after: the program's next row.
      memory: the memory of the row.
    """
    row, cut, n = memory.row, memory.cut, memory.logits.shape[0]

    def write(piece: Array, _: None) -> None:
        def step(s: Array, _: None) -> None:
            where = row.at[cut.step(piece, s)]
            where[...] = softmax(extended(_load(where, _STEP))).astype(row.dtype)

        lax.fori_loop(0, cut.together, step, None)
        leave(piece * cut.rows, cut.rows, cut.piece(piece))
        # All pieces but this one have left, so a piece of the next row replaces the one before.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when((piece > 0) & (after < n))(lambda: memory.fetch(after, piece - 1))

    if cut.pieces:
        lax.fori_loop(0, cut.pieces, write, None)
    if cut.rest:
        where = row.at[cut.last]
        where[...] = softmax(extended(_load(where, cut.rest))).astype(row.dtype)
        leave(cut.pieces * cut.rows, cut.rest, cut.last)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch_what_is_left() -> None:
        if cut.pieces:
            memory.fetch(after, cut.pieces - 1)
        memory.fetch_rest(after)

    pl.when(after < n)(fetch_what_is_left)


def _layout(rows: int) -> Layout:
    """The layout in which a thread has as many neighbouring columns as are loaded at once."""
    return plgpu.Layout.WG_STRIDED((rows, LANES), vec_size=math.gcd(rows, 8))


def _load(ref: Ref, rows: int) -> Array:
    return load(ref, _layout(rows))
