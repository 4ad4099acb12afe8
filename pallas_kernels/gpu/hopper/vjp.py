"""The forward and the backward pass on Hopper GPUs, under one `custom_vjp`."""

from functools import partial
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic.request import BackwardSums, Extras, Spec
from lowprec_attn.arithmetic.transforms import first_order_only, named
from pallas_kernels.gpu.hopper.backward import dq_accumulator
from pallas_kernels.gpu.hopper.backward.key_gradients import key_gradients
from pallas_kernels.gpu.hopper.backward.key_operands import KeyInputs
from pallas_kernels.gpu.hopper.backward.query_gradients import query_gradients
from pallas_kernels.gpu.hopper.backward.query_operands import QueryInputs
from pallas_kernels.gpu.hopper.block_sizes import block_sizes
from pallas_kernels.gpu.hopper.ends import Ends
from pallas_kernels.gpu.hopper.forward.kernel import forward
from pallas_kernels.gpu.hopper.problem import Problem
from pallas_kernels.gpu.hopper.segments import Segments
from pallas_kernels.gpu.hopper.sinks import gradient, start_of_rows, without_beyond

# q, k and v, or the one packed array.
Arrays = tuple[Array, ...]


class _Residuals(NamedTuple):
    arrays: Arrays
    extras: Extras
    o_saved: Array
    o_low: Array | None
    offset: Array
    inverse_l: Array | None
    more: Array | None
    ends: Ends | None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def attend(arrays: Arrays, extras: Extras, spec: Spec) -> tuple[Array, ...]:
    """Returns O, lse and, with `spec.max_logit`, the largest scores [B, T, N]."""
    return _forward(arrays, extras, spec)[0]


# Both passes are under `jit`: layers with equal calls share one trace and one lowering of the
# kernels, which take seconds.
@partial(jax.jit, static_argnums=2)
def _forward(arrays: Arrays, extras: Extras, spec: Spec) -> tuple[tuple[Array, ...], _Residuals]:
    arrays = first_order_only(arrays, "hopper")
    q, k, v = arrays * 3 if len(arrays) == 1 else arrays
    segments = Segments.of(extras, q.shape[1], k.shape[1])
    problem = _problem(q, k, v, spec, extras, segments)
    start, ends = None, Ends.of(arrays, extras, spec)
    if extras.sinks is not None:
        sinks = first_order_only(extras.sinks, "hopper")
        start, extras = start_of_rows(sinks, problem), extras._replace(sinks=sinks)
    out = named(forward(q, k, v, problem, segments, start, ends))
    saved, low = out.o if out.saved is None else out.saved, None
    if problem.saves_halves:
        saved, low = out.o, out.saved
    lse, *max_logit = (
        x[..., : q.shape[1]].transpose(0, 2, 1) for x in (out.lse, out.max_logit) if x is not None
    )
    result = (out.o, without_beyond(lse, extras), *max_logit)
    vectors = out.offset, out.inverse_l, out.more
    return result, _Residuals(arrays, extras, saved, low, *vectors, ends)


@partial(jax.jit, static_argnums=0)
def _backward(spec: Spec, res: _Residuals, cotangents: tuple[Array, ...]) -> tuple[Arrays, Extras]:
    do, dlse = first_order_only(cotangents[:2], "hopper")
    arrays, extras, o_saved, o_low, offset, inverse_l, more, ends = res
    q, k, v = arrays * 3 if len(arrays) == 1 else arrays
    segments = Segments.of(extras, q.shape[1], k.shape[1])
    problem = _problem(q, k, v, spec, extras, segments)
    if problem.sums_queries:
        return _unordered_backward(res, do, dlse, problem), Extras()
    dlse = dlse.transpose(0, 2, 1)
    ends = None if ends is None else ends.backward(do)
    inputs = QueryInputs(q, k, v, do, o_saved, offset, dlse, o_low, inverse_l, more, segments, ends)
    asked = extras.backward_sums is not None
    dq, dp_offset, correction, row_sums = query_gradients(inputs, problem, reports=asked)
    of_extras = Extras()
    if row_sums is not None:
        of_queries = (x[..., : q.shape[1]].transpose(0, 2, 1) for x in row_sums)
        of_extras = Extras(backward_sums=BackwardSums(*of_queries))
    if extras.sinks is not None:
        dsinks = gradient(extras, offset, inverse_l, dp_offset, problem)
        of_extras = of_extras._replace(sinks=dsinks)
    keys = KeyInputs(q, k, v, do, offset, dp_offset, inverse_l, more, correction, segments, ends)
    if not problem.packed:
        return (dq, *key_gradients(keys, problem)), of_extras
    # A mutable array, because the second kernel writes planes 1 and 2 beside the first one's dQ.
    gradients = jax.new_ref(dq)
    key_gradients(keys, problem, gradients=gradients)
    return (gradients[...],), of_extras


def _unordered_backward(res: _Residuals, do: Array, dlse: Array, problem: Problem) -> Arrays:
    """Computes all three gradients in one kernel, see `dq_accumulator`."""
    arrays, o_saved, offset = res.arrays, res.o_saved, res.offset
    q, k, v = arrays * 3 if len(arrays) == 1 else arrays
    sums = dq_accumulator.sums(problem)
    dp_offset = dq_accumulator.offset_of_dp(o_saved, do, dlse, problem)
    keys = KeyInputs(q, k, v, do, offset, dp_offset)
    if not problem.packed:
        dk, dv = key_gradients(keys, problem, dq=sums)
        return dq_accumulator.rounded(sums, problem), dk, dv
    gradients = jax.new_ref(lax.empty(q.shape, q.dtype))
    key_gradients(keys, problem, gradients=gradients, dq=sums)
    return (gradients[...].at[:, :, 0].set(dq_accumulator.rounded(sums, problem)),)


attend.defvjp(_forward, _backward)


def _problem(
    q: Array, k: Array, v: Array, spec: Spec, extras: Extras, segments: Segments | None
) -> Problem:
    given, values = {"has_segments": segments is not None}, v.shape[-1]
    has_sinks = extras.sinks is not None
    sizes = block_sizes(q.shape, spec, value_size=values, has_sinks=has_sinks, **given)
    return Problem.of(q, k, spec, sizes, value_size=values, **given)
