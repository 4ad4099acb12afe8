"""Maxima of a step's scores that tell whether one of them may be repeated.

`dynamic_max` asks for every row of a step whether its maximum occurs twice. To count how often it
occurs takes 1.5 instructions per score and a second pass over the scores. But if it occurs twice,
the tree of maxima has a node whose two inputs are equal. So one test per node, where the numbers
are at hand anyway, shows in nearly all steps that there is nothing to count.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.utils import arith, ir, llvm, nvvm, shfl_bfly, vector
from jax.experimental.mosaic.gpu.utils import c as literal
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from lowprec_attn.numerics import MASKED
from pallas_kernels.gpu.hopper.machine.layouts import LANES, PER_ROW, TILE
from pallas_kernels.gpu.hopper.machine.types import Context, MlirValue, Registers

# The bits of MASKED in float32. The more is added to them, the farther the number is from 0.
_MASKED_BITS = np.float32(MASKED).view(np.int32)

_CHAINS = 4  # independent chains of maxima for each row of a thread: they do not wait on each other


def masks(shape: tuple[int, ...], *, interpret: bool) -> Array:
    """MASKED or a little less: a different number for every entry that a thread has of a row.

    So `maxima` finds no two equal masked scores, except between threads that see no key at all.
    """
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        bits = _MASKED_BITS + column // LANES * 2 + column % 2
        return lax.bitcast_convert_type(bits, jnp.float32)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE))
    def emit(_: Context) -> Registers:
        # They are constants of the instruction stream, which take no registers.
        word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()
        layout = TILE.to_mgpu()
        found = np.empty(layout.registers_shape(shape), dtype=object)
        for i in range(found.shape[1]):
            pair = llvm.mlir_undef(ir.VectorType.get((2,), number))
            for place in range(2):
                mask = float((_MASKED_BITS + np.int32(2 * i + place)).view(np.float32))
                pair = llvm.insertelement(pair, literal(mask, number), literal(place, word))
            found[:, i] = pair
        return fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)

    return emit()


def maxima(x: Array, *, interpret: bool) -> tuple[Array, Array]:
    """Returns the row maxima, and a flag: if it is 0, no row of the warp repeats its maximum.

    The flag is 1 if any two equal numbers meet in the tree, even if they are not the maximum. It
    may differ from warp to warp.
    """
    if interpret:
        equal = jnp.bool_(False)
        while (width := x.shape[1]) > 1:
            a, b = x[:, : width // 2], x[:, width // 2 :]
            equal |= (a == b).any()
            x = jnp.maximum(a, b)
        return x[:, 0], equal.astype(jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=(
            plgpu.ShapeDtypeStruct(x.shape[:1], x.dtype, layout=PER_ROW),
            plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
        ),
    )
    def emit(_: Context, x: Registers) -> tuple[Registers, Registers]:
        word, layout = ir.IntegerType.get_signless(32), PER_ROW.to_mgpu()
        nodes = _Nodes()
        # A thread has two rows. A register of Mosaic GPU holds two neighbours of one row.
        rows = [
            [llvm.extractelement(pair, literal(i, word)) for pair in row for i in (0, 1)]
            for row in x.registers.reshape(-1, 2).T
        ]
        found = [row[:_CHAINS] for row in rows]
        for i in range(_CHAINS, len(rows[0])):
            for chains, row in zip(found, rows, strict=True):
                chains[i % _CHAINS] = nodes.larger(chains[i % _CHAINS], row[i])
        while (half := len(found[0]) // 2) > 0:
            found = [[nodes.larger(r[i], r[half + i]) for i in range(half)] for r in found]
        # The four threads of a row are neighbours: two exchanges by butterfly.
        for lanes in (1, 2):
            found = [[nodes.larger(x, shfl_bfly(x, lanes))] for (x,) in found]
        # One vote a step, because the warp takes the branch together.
        equal = nvvm.vote_sync(literal(-1, word), nodes.equal, nvvm.VoteSyncKind.any)
        of_rows = np.empty(layout.registers_shape(x.shape[:1]), dtype=object)
        for place, (maximum,) in zip(np.ndindex(of_rows.shape), found, strict=True):
            of_rows[place] = vector.broadcast(ir.VectorType.get((1,), maximum.type), maximum)
        return (
            fragmented_array.FragmentedArray(_registers=of_rows, _layout=layout, _is_signed=None),
            fragmented_array.FragmentedArray.splat(arith.extui(word, equal), (), is_signed=True),
        )

    return emit(x)


class _Nodes:
    """Nodes of a tree of maxima.

    `equal`: a bit that says whether the two inputs of any node were equal.
    """

    equal: MlirValue = None

    def larger(self, a: MlirValue, b: MlirValue) -> MlirValue:
        """Returns the larger of two numbers, and tests whether they are equal."""
        # One comparison a node, on the unit that takes maxima, needs 6 to 7 % less time than
        # counting ties, at 8,192 tokens. Differences at every second node, on the faster unit of
        # multiply-adds, gained half of that (results/hopper/ties_14_h200.jsonl).
        equal = arith.cmpf(arith.CmpFPredicate.OEQ, a, b)
        self.equal = equal if self.equal is None else arith.ori(self.equal, equal)
        return arith.maximumf(a, b)
