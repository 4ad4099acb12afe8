"""The forward kernel: O, lse, and the O that δ sees where it is another.

A warpgroup owns 64 query rows and walks over the key steps that they see (FlashAttention-2, arXiv
2307.08691, Algorithm 1). The arithmetic is that of `lowprec_attn.arithmetic.softmax` with P̄ and O
rounded: Ō, m and l stay in float32 registers. Two pipelines of FlashAttention-3 (arXiv 2407.08608)
hide the softmax: warpgroups ping-pong (section 3.1), and S of step t is multiplied before
P̄V of step t − 1, which then runs during the softmax of step t (Algorithm 2). From its kernel's code
are three more: S adds to nothing, P̄V may be waited for among the exponentials
(`ForwardTile.early_wait`), and the longest tiles may come first (`longest_first`). Repeated maxima,
which `dynamic_max` looks for, are counted in every step or where a test says that there may be some
(`tests_ties`).

O′ takes P̄ unrounded (`saved_output='auxiliary'`): three bfloat16 terms whose sum it is exactly. The
first is P̄ rounded, so that Ō′ is Ō and a second sum, of the products of the other two.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.numerics import MASKED, DynamicMax, RowMax, StandardMax
from pallas_kernels.gpu.hopper import long_steps, producer
from pallas_kernels.gpu.hopper.block_sizes import ROWS, ForwardTile
from pallas_kernels.gpu.hopper.machine.instruction_order import (
    after,
    finish_before_waiting,
    mixed,
    unknown_zero,
)
from pallas_kernels.gpu.hopper.machine.instructions import ONE, at_least
from pallas_kernels.gpu.hopper.machine.layouts import (
    LANES,
    PER_ROW,
    TILE,
    along_rows,
    by_lane,
    constant,
    extended,
    tiles_of,
    vectors_of,
)
from pallas_kernels.gpu.hopper.machine.maxima import masks, maxima
from pallas_kernels.gpu.hopper.machine.ping_pong import PingPong
from pallas_kernels.gpu.hopper.machine.pipeline import Pipeline
from pallas_kernels.gpu.hopper.machine.warpgroups import COMPILER, interpreter, set_registers
from pallas_kernels.gpu.hopper.machine.wgmma import add_product, as_operand, begin_product
from pallas_kernels.gpu.hopper.problem import Problem

# Keys of a step whose exponentials come before P̄V is waited for, if it is `soon`.
_EARLY_KEYS = 16


class Outputs(NamedTuple):
    """O [B, T, N, H]; lse and −lse·log2(e) [B, N, T]; the O that δ sees, where it is another."""

    o: Any
    lse: Any
    offset: Any
    saved: Any = None


class _Shared(NamedTuple):
    """Shared memory: pipelines of q, k, v; lse and offset; P̄; O for δ; O, else in q's place."""

    q: Any
    k: Any
    v: Any
    statistics: Any
    probs: Any
    saved: Any
    o: Any


class _Rows(NamedTuple):
    """Running m [64] and l [64, LANES], in parts; the step's P̄ [64, keys] and α [64].

    P̄ is rounded, but see `_Walk._rounds_later`.
    """

    m: Array
    l: Array
    probs: Array
    alpha: Array


class _Due(NamedTuple):
    """A tile without its last P̄V, which is due, as O is then; `ForwardTile.overlap_tiles`."""

    acc: Array
    rows: _Rows
    row: Array
    batch: Array
    head: Array


def forward(q: Array, k: Array, v: Array, problem: Problem) -> Outputs:
    """Runs the kernel; q, k and v may be one packed array."""
    tile, n = problem.sizes.forward, problem.spec.numerics
    shape = (problem.batch, problem.rows, problem.heads, problem.head_size)
    consumers, head = tile.warpgroups, problem.head_size
    vectors = (problem.batch, problem.heads, problem.vector_rows)
    statistics = jax.ShapeDtypeStruct(vectors, jnp.float32)
    out: list[Any] = [jax.ShapeDtypeStruct(shape, problem.dtype), statistics, statistics]
    saved = probs = None
    if n.saved_dtype is not None:
        out.append(jax.ShapeDtypeStruct(shape, n.saved_dtype))
        if not problem.is_wide:
            saved = tiles_of((consumers, ROWS, head), n.saved_dtype)
    if problem.sizes.from_memory:
        probs = tiles_of((consumers, ROWS, tile.step), problem.dtype)
    steps = tiles_of((tile.stages, tile.step, head), problem.dtype)
    shared = _Shared(
        Pipeline.types(
            tile.owned_stages,
            [tiles_of((tile.owned_stages, consumers, ROWS, head), problem.dtype)],
            copies=consumers,
            consumers=consumers,
        ),
        Pipeline.types(tile.stages, [steps], copies=1, consumers=consumers),
        Pipeline.types(tile.stages, [steps], copies=1, consumers=consumers),
        vectors_of((2, consumers, ROWS)),
        probs,
        saved,
        tiles_of((consumers, ROWS, head), problem.dtype) if tile.overlap_tiles else None,
    )
    kernel = plgpu.kernel(
        partial(_kernel, problem=problem, tile=tile),
        out_type=out,
        scratch_types=[shared],
        grid=(problem.by_query(tile).grid,),
        grid_names=("program",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="attention_forward",
        **interpreter(on=problem.sizes.interpret),
    )
    return Outputs(*kernel(q, k, v))


def _kernel(
    q: Any, k: Any, v: Any, *out_and_shared: Any, problem: Problem, tile: ForwardTile
) -> None:
    *out, refs = out_and_shared
    shared = refs._replace(
        q=Pipeline(refs.q, tile.owned_stages),
        k=Pipeline(refs.k, tile.stages),
        v=Pipeline(refs.v, tile.stages),
    )
    me, consumers = lax.axis_index("warpgroup"), tile.warpgroups
    pipelines = shared.q, shared.k, shared.v
    load = partial(producer.load, keys_twice=problem.rounds_products)
    pl.when(me == consumers)(lambda: load((q,), k, v, pipelines, problem, tile))
    pl.when(me < consumers)(lambda: _consume(Outputs(*out), shared, problem, tile))


def _consume(out: Outputs, shared: _Shared, problem: Problem, tile: ForwardTile) -> None:
    set_registers(tile.warpgroups, producer=False)
    program, scheduler = lax.axis_index("program"), problem.by_query(tile)
    me = lax.axis_index("warpgroup")
    ping_pong = PingPong(tile.warpgroups, me, on=tile.ping_pong and not problem.sizes.from_memory)
    ping_pong.start()

    joins = tile.overlap_tiles and not problem.sizes.from_memory

    def consume_tile(u: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        tiles, steps, due = carry
        work = scheduler.work_tile(program, u)
        start = work.block * tile.owned
        _, last = problem.key_steps(start, tile.owned, tile.step)
        row = start + me * ROWS
        full, end = problem.key_steps(row, ROWS, tile.step)
        walk = _Walk(problem, tile, shared, ping_pong, me, tiles, steps, row, full, end)

        def attend(due: Any) -> Any:
            if joins:
                rows, acc = walk.join(due, out)
                return _Due(acc, rows, row, work.batch, work.head)
            rows, acc, left = walk.run()
            if not problem.rounds_products:  # there all end together
                producer.skip((shared.k, shared.v), ping_pong, tile, steps, end, last)
            walk.store(out, rows, acc, left, work.batch, work.head)
            return None

        due = lax.cond(work.is_valid, attend, lambda due: due, due)
        tiles = tiles + work.is_valid.astype(jnp.int32)
        steps = steps + jnp.where(work.is_valid, last, 0)
        return tiles, steps, due

    zero = jnp.int32(0)
    due = _nothing_due(problem, tile) if joins else None
    tiles, steps, due = lax.fori_loop(0, scheduler.count(program), consume_tile, (zero, zero, due))
    ping_pong.end()
    if joins:
        last = _Walk(problem, tile, shared, ping_pong, me, tiles, steps, zero, zero, zero)
        last.end_last(due, out)
    plgpu.wait_smem_to_gmem(0)
    if not tile.overlap_tiles:
        shared.q.consumer_release(tiles - 1)


def _nothing_due(problem: Problem, tile: ForwardTile) -> _Due:
    """Before a program's first tile."""
    m, l = _Walk.no_key_yet()
    acc = constant((ROWS, problem.head_size), 0, TILE)
    probs = constant((ROWS, tile.step), 0, TILE).astype(problem.dtype)
    nowhere = jnp.int32(0)
    return _Due(acc, _Rows(m, l, probs, m), nowhere, nowhere, nowhere)


class _Walk(NamedTuple):
    """64 query rows of a warpgroup, which walk over the steps 0 ... end − 1.

    `tiles` and `steps` count what the program has done before; steps before `full` take no mask.
    """

    problem: Problem
    tile: ForwardTile
    shared: _Shared
    ping_pong: PingPong
    me: Array
    tiles: Array
    steps: Array
    row: Array
    full: Array
    end: Array

    def run(self) -> tuple[_Rows, Array, Array | None]:
        """m, l and Ō after the last step; Ō′ − Ō, where it is kept."""
        acc = constant((ROWS, self.problem.head_size), 0, TILE)
        left = acc if self.problem.keeps_auxiliary else None
        in_order = self.problem.rounds_products or self.shared.probs is not None
        if (in_order or self.tile.owned_stages == 1) and not self.tile.overlap_tiles:
            self._free_last_output()  # with one slot, q has no other place to come to
        self.shared.q.consumer_wait(self.tiles)
        if self.problem.rounds_products:
            acc, m, l = long_steps.attend(self)
            return _Rows(m, l, m, m), acc, None
        found = (self._run_in_order if in_order else self._run_ahead)(acc, left)
        if self.tile.overlap_tiles:
            self.shared.q.consumer_release(self.tiles)
        return found

    def join(self, due: _Due, out: Outputs) -> tuple[_Rows, Array]:
        """m, l and Ō of all steps but the last, whose P̄V is due, as that of the tile before is."""

        def end_tile_before(due: _Due) -> _Rows:
            first = self.end * 0  # not a literal, which Mosaic GPU's conditions do not take
            acc, rows = self._advance(first, due.acc, due.rows, *self.no_key_yet())
            self._store_due(due, acc, out)
            return self._rounded(rows)

        def begin(_: _Due) -> _Rows:
            return self._rounded(self._begin())

        self.shared.q.consumer_wait(self.tiles)
        rows = lax.cond(self.tiles == 0, begin, end_tile_before, due)
        acc = constant((ROWS, self.problem.head_size), 0, TILE)
        acc, _, rows = self._walk_on(acc, None, rows)
        self.shared.q.consumer_release(self.tiles)
        return rows, acc

    def _store_due(self, due: _Due, acc: Array, out: Outputs) -> None:
        walk = self._replace(row=pl.multiple_of(due.row, ROWS))
        walk.store(out, due.rows, acc, None, due.batch, due.head)

    def end_last(self, due: _Due, out: Outputs) -> None:
        """After a program's last tile; `steps` are all that it has done."""
        acc = self._end(due.acc, due.rows, self.steps)
        self._store_due(due, acc, out)

    def _run_in_order(self, acc: Array, left: Array | None) -> tuple[_Rows, Array, Array | None]:
        """One product after the other, P̄ from shared memory: for tests."""
        probs, interpret = self.shared.probs.at[self.me], self.problem.sizes.interpret
        no_score = constant((ROWS, self.tile.step), 0, TILE)

        def step(t: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            acc, left, m, l = carry
            n = self.steps + t
            self.shared.k.consumer_wait(n)
            q, k = self.shared.q.get(self.tiles, self.me), self.shared.k.get(n)
            s = add_product(no_score, q, k.T, interpret=interpret)
            self.shared.k.consumer_release(n)
            rows = self._softmax(self.masked(s, t), m, l)
            acc = along_rows(rows.alpha, acc.shape) * acc
            left, rows = self._add_left(left, rows, n)
            self._wait_for_values(n)
            operand = as_operand(rows.probs, probs)
            acc = add_product(acc, operand, self.shared.v.get(n), interpret=interpret)
            self.shared.v.consumer_release(n)
            return acc, left, rows.m, rows.l

        acc, left, m, l = lax.fori_loop(0, self.end, step, (acc, left, *self.no_key_yet()))
        return _Rows(m, l, m, m), acc, left

    def _run_ahead(self, acc: Array, left: Array | None) -> tuple[_Rows, Array, Array | None]:
        rows = self._begin()
        if self.tile.owned_stages > 1:  # not sooner: the wait is hidden here
            self._free_last_output()
        left, rows = self._add_left(left, rows, self.steps)
        acc, left, rows = self._walk_on(acc, left, rows)
        return rows, self._end(acc, rows, self.steps + self.end), left

    def _walk_on(
        self, acc: Array, left: Array | None, rows: _Rows
    ) -> tuple[Array, Array | None, _Rows]:
        """All steps after the first, but for P̄V of the last."""

        def step(t: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            acc, left, rows = carry
            acc, rows = self._advance(t, acc, rows, rows.m, rows.l)
            left, rows = self._add_left(left, rows, self.steps + t)
            return along_rows(rows.alpha, acc.shape) * acc, left, rows

        result: tuple[Array, Array | None, _Rows] = lax.fori_loop(
            1, self.end, step, (acc, left, rows)
        )
        return result

    def _begin(self) -> _Rows:
        """The first step's softmax."""
        first = jnp.int32(0)
        s = self._begin_scores(first)
        self.ping_pong.arrive()
        return self._softmax(self._finish_scores(s, first, later=0), *self.no_key_yet())

    def _advance(
        self, t: Array, acc: Array, rows: _Rows, m: Array, l: Array
    ) -> tuple[Array, _Rows]:
        """Ō with P̄V of the step before step t, and t's softmax beside it, from m and l on."""
        before = self.steps + t - 1

        def products(refs: Any) -> None:
            acc_ref, new = refs
            s = self._begin_scores(t)
            self._wait_for_values(before)
            plgpu.wgmma(acc_ref, rows.probs, self.shared.v.get(before))
            self.ping_pong.arrive()
            s = self._finish_scores(s, t, later=1)
            if self.tile.early_wait:
                result = self._begin_softmax(s, m, l)
            else:
                result = self._softmax(s, m, l)
                finish_before_waiting(result.l)  # for P̄V, which runs meanwhile
            for ref, x in zip(new, result, strict=True):
                ref[...] = x

        no_score = constant((ROWS, self.tile.step), 0, TILE)
        new = rows._replace(probs=no_score) if self._rounds_later else rows
        acc, new = pl.run_state(products)((plgpu.ACC.init(acc), new))
        self.shared.v.consumer_release(before)
        if self.tile.early_wait:
            new = self._end_softmax(new, acc, unknown_zero(self.steps + t))
        return acc, new

    def _end(self, acc: Array, rows: _Rows, steps: Array) -> Array:
        """Ō with P̄V of the step before the program's n-th, the tile's last."""
        self._wait_for_values(steps - 1)
        acc = add_product(acc, rows.probs, self.shared.v.get(steps - 1), interpret=False)
        self.shared.v.consumer_release(steps - 1)
        return acc

    def _wait_for_values(self, n: Array) -> None:
        """Before P̄V of the n-th step of the program, unless `_add_left` has waited.

        A second wait would be for what fills the buffer next.
        """
        if not self.problem.keeps_auxiliary:
            self.shared.v.consumer_wait(n)

    def _add_left(self, left: Array | None, rows: _Rows, n: Array) -> tuple[Array | None, _Rows]:
        """Ō′ − Ō after the n-th step of the program, and its rows with P̄ rounded.

        The products are not ahead, as P̄V is: their operands in registers would be too many.
        """
        if left is None:
            return None, self._rounded(rows)
        rounded, *terms = self._terms(rows.probs)
        left = along_rows(rows.alpha, left.shape) * left
        memory = None if self.shared.probs is None else self.shared.probs.at[self.me]
        self.shared.v.consumer_wait(n)
        v, interpret = self.shared.v.get(n), self.problem.sizes.interpret
        for term in terms[::-1]:  # the smallest first
            left = add_product(left, as_operand(term, memory), v, interpret=interpret)
        return left, rows._replace(probs=rounded)

    def _rounded(self, rows: _Rows) -> _Rows:
        """The same with P̄ rounded."""
        return rows._replace(probs=rows.probs.astype(self.problem.dtype))

    @staticmethod
    def no_key_yet() -> tuple[Array, Array]:
        """m and l of rows that have seen none."""
        return constant((ROWS,), MASKED, PER_ROW), constant((ROWS, LANES), 0, TILE)

    def _begin_scores(self, t: Array) -> Array:
        """Starts q kᵀ of step t, in this warpgroup's turn of the ping-pong."""
        self.shared.k.consumer_wait(self.steps + t)
        self.ping_pong.wait()
        q, k = self.shared.q.get(self.tiles, self.me), self.shared.k.get(self.steps + t)
        return begin_product(q, k, interpret=self.problem.sizes.interpret)

    def _finish_scores(self, s: Array, t: Array, *, later: int) -> Array:
        """Waits for them, while so many products that were started later run; takes the mask."""
        plgpu.wgmma_wait(later)
        self.shared.k.consumer_release(self.steps + t)
        return self.masked(s, t)

    def masked(self, s: Array, t: Array, first: int = 0) -> Array:
        """The scores of step t, from its `first` key on, MASKED where a row does not see."""
        problem, walk = self.problem, self.tile.step
        if not problem.masks_steps(walk):
            return s

        def mask() -> Array:
            apart = self._tests_ties
            masked = masks(s.shape, interpret=problem.sizes.interpret) if apart else MASKED
            return problem.mask_keys(s, self.row, t * walk + first, masked)

        return lax.cond(t >= self.full, mask, lambda: s)

    def _softmax(self, s: Array, m: Array, l: Array) -> _Rows:
        """One step of online softmax. S and m count in units of `scale`."""
        new, alpha = self._maxima(s, m)
        probs = self.exponentials(s, along_rows(self.offset(new), s.shape))
        l = along_rows(alpha, l.shape) * l + by_lane(jnp.add, probs)
        # For O′ it is not rounded yet: terms would be formed from it while a product runs, and the
        # assembler would then let none run beside other instructions (its remark C7513).
        if not self._rounds_later:
            probs = probs.astype(self.problem.dtype)
        return _Rows(new, l, probs, alpha)

    def _begin_softmax(self, s: Array, m: Array, l: Array) -> _Rows:
        """What of it comes before an early wait for P̄V; S for P̄, and l without it.

        These exponentials are of every so-manyth 8 columns: those whose sum l takes anyway.
        """
        new, alpha = self._maxima(s, m)
        l = along_rows(alpha, l.shape) * l
        probs = self.exponentials(s, along_rows(self.offset(new), s.shape))
        sums = by_lane(jnp.add, probs, LANES * self._one_of)
        finish_before_waiting(sums[:, :LANES], l)
        return _Rows(new, l, s, alpha)

    def _end_softmax(self, rows: _Rows, done: Array, zero: Array) -> _Rows:
        """The rest of it, that is not to come before `done`; zero: see `after`."""
        sooner, s = self.offset(rows.m), rows.probs
        later = after(sooner, done, zero)
        offsets = (along_rows(x, s.shape) for x in (sooner, later))
        probs = self.exponentials(s, mixed(*offsets, every=self._one_of))
        return rows._replace(l=rows.l + by_lane(jnp.add, probs), probs=probs)

    @property
    def _one_of(self) -> int:
        """One of so many exponentials comes before the wait for P̄V."""
        return self.tile.step // _EARLY_KEYS

    @property
    def _rounds_later(self) -> bool:
        """Whether P̄ is rounded when P̄V of the step before has been waited for.

        If instructions write what the next product reads, the assembler lets none run beside other
        instructions (its remark C7513), unless there is a branch before, such as that for masks.
        """
        return self.problem.keeps_auxiliary or self.tile.early_wait

    def _maxima(self, s: Array, m: Array) -> tuple[Array, Array]:
        """The new m [64], and α."""
        problem, interpret = self.problem, self.problem.sizes.interpret
        rule, unit = problem.spec.row_max, problem.spec.scale

        def is_repeated(s: Array, tolerance: float) -> Array:
            least = along_rows(r_m, s.shape) - np.float32(tolerance)
            near = at_least(s, least, interpret=interpret)
            return by_lane(jnp.add, near).sum(axis=1) != ONE

        def new_by(rule: RowMax) -> Array:
            # The rule looks at S − r_m only to count ties, which S itself shows as well.
            return rule.running_max(r_m, s, m, unit=unit, is_repeated=is_repeated)

        if self._tests_ties:
            # Where no maximum of a warp's rows is repeated, the rule is the standard one.
            r_m, repeats = maxima(s, interpret=interpret)
            new = lax.cond(repeats != 0, partial(new_by, rule), partial(new_by, StandardMax()))
        else:
            r_m = by_lane(jnp.maximum, s).max(axis=1)
            new = new_by(rule)
        return new, jnp.exp2((m - new) * np.float32(problem.log2_unit))

    @property
    def _tests_ties(self) -> bool:
        """Whether repeated maxima are looked for, and counted only where a test says so."""
        rule = self.problem.spec.row_max
        # Scores that are near each other need not meet in the tree of maxima.
        return self.tile.tests_ties and isinstance(rule, DynamicMax) and rule.tolerance == 0

    def offset(self, m: Array) -> Array:
        """What the exponent of P̄ takes away [64]."""
        return m * np.float32(self.problem.log2_unit)

    def exponentials(self, s: Array, offset: Array) -> Array:
        """P̄, not rounded, of the offset of every entry."""
        # One multiply-add per entry. Its error is that of m·log2(e), the same for a whole row: it
        # cancels in Ō / l.
        return jnp.exp2(s * np.float32(self.problem.log2_unit) - offset)

    def _terms(self, probs: Array) -> list[Array]:
        """P̄ as three bfloat16 numbers of 8 bits each, the largest first: exactly, of 24 bits."""
        terms = []
        for _ in range(3):
            terms.append(probs.astype(self.problem.dtype))
            probs = probs - extended(terms[-1])
        return terms

    def _free_last_output(self) -> None:
        """Waits until the O of the tile before has left the memory that the next q takes."""

        def release() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.shared.q.consumer_release(self.tiles - 1)

        pl.when(self.tiles > 0)(release)

    def store(
        self,
        out: Outputs,
        rows: _Rows,
        acc: Array,
        left: Array | None,
        batch: Array,
        head: Array,
    ) -> None:
        """Divides by l and stores; O leaves through the memory of its q.

        A row whose scores are all −inf has O = 0, lse = −inf and, backward, P = 0, as one that sees
        no key.
        """
        empty = rows.m <= np.float32(MASKED)
        infinity = constant((ROWS,), np.inf, PER_ROW)
        l = self.problem.rounded(rows.l.sum(axis=1))
        l = jnp.where(empty, infinity, l)  # O = Ō / ∞ = 0
        o = acc / along_rows(l, acc.shape)
        if self.tile.overlap_tiles:  # the tile before's have long left
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            memory = self.shared.o.at[self.me]
        else:
            memory = self.shared.q.get(self.tiles, self.me)
        saved = self.shared.saved
        memory[...] = o.astype(self.problem.dtype)
        place = (batch, self.row, ROWS, head)
        copies = [(memory, self.problem.part(out.o, *place))]
        if out.saved is not None:
            o = o if left is None else (acc + left) / along_rows(l, acc.shape)
            o, part = o.astype(out.saved.dtype), self.problem.part(out.saved, *place)
            if saved is None:
                self._store_straight(o, part)
            else:
                saved.at[self.me][...] = o
                copies.append((saved.at[self.me], part))
        # In units of `scale`, as m is, so that no sum has two products: of those the compiler may
        # round either, and other code around it would change the bits.
        unit, to_log2 = self.problem.spec.scale, self.problem.log2_unit
        lse = rows.m + lax.log2(l) * np.float32(1 / to_log2)  # type: ignore[attr-defined]  # not in JAX 0.10
        vectors = []
        for i, (ref, factor) in enumerate(((out.lse, unit), (out.offset, -to_log2))):
            vector = self.shared.statistics.at[i, self.me]
            vector[...] = jnp.where(empty, -infinity, lse * np.float32(factor))
            vectors.append((vector, ref.at[batch, head, pl.ds(self.row, ROWS)]))
        plgpu.commit_smem()
        for source, target in copies:
            plgpu.copy_smem_to_gmem(source, target)
        self.problem.store_rows(self.row, vectors)

    def _store_straight(self, o: Array, part: Any) -> None:
        """From registers; rows beyond the end, which no copy would store, are left out."""

        def store() -> None:
            part[...] = o

        pl.when(self.row < self.problem.rows)(store)
