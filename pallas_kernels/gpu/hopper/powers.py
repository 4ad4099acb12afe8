"""P̄ of both passes against a whole-number maximum: `exponent='whole_max'`.

`lowprec_attn.arithmetic.powers` forms 96 + S₂ − M by one multiply-add and then subtracts 96.
Between 64 and 128, float32 numbers lie 2^-17 apart, so S₂ is rounded to a multiple of 2^-17
whatever M is. Here the multiply-add forms S₂ − M − 65, between −64 and −128, where numbers lie
equally far apart, and nothing is subtracted afterwards. So the unit of P̄, and with it of l and Ō,
is 2^-65 in both passes. It cancels to the bit in Ō / l and in P̄ / l, because a power of two
commutes with rounding.

A P̄ below 2^-61 is 0. Every other P̄ has the same significand whatever M is. S₂ may exceed M by as
much as c r_m was rounded down: half an ulp, up to 1 at scores of 1e7.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from lowprec_attn.arithmetic import powers
from lowprec_attn.arithmetic.recurrence import subtracted_max
from lowprec_attn.numerics import MASKED
from pallas_kernels.gpu.hopper.machine.instructions import multiply_add, round_to_bfloat16
from pallas_kernels.gpu.hopper.problem import Problem

# The log₂ of the unit of P̄, l and Ō.
UNIT = -65.0


def whole_max(r_m: Array, m: Array, problem: Problem) -> tuple[Array, Array]:
    """Returns M [64] after a step whose maximum is r_m, and the exact α = 2^(M_old − M).

    As everywhere in these kernels, MASKED stands for the M of rows that have seen no key.
    """
    whole = jnp.where(r_m <= MASKED, r_m, _rounded_up(r_m * np.float32(problem.log2_unit)))
    new = jnp.maximum(m, whole)
    return new, powers.power_of_two(m - subtracted_max(new))


def _rounded_up(x: Array) -> Array:
    # Pallas has no ceil on Mosaic GPU.
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(nearest < x, nearest + np.float32(1), nearest)


def offset(m: Array) -> Array:
    """Returns what exponents subtract, M + 65 [64], with M = 0 in rows that have seen no key."""
    return subtracted_max(m) - np.float32(UNIT)


def exponentials(s: Array, added: Array, problem: Problem) -> Array:
    """Returns P̄, unrounded, from q·k and what each exponent adds."""
    interpret = problem.sizes.interpret
    return power(multiply_add(s, problem.log2_unit, added, interpret=interpret), problem)


def power(log2_p: Array, problem: Problem) -> Array:
    """Returns 2^x such that 2^(x + 1) is twice 2^x.

    The machine's instruction does so where x is exact to 2^-17.
    """
    return powers.exp2(log2_p) if problem.sizes.interpret else jnp.exp2(log2_p)


def recomputed(log2_p: Array, problem: Problem) -> Array:
    """Returns the backward P or P̄ from its exponent, rounded if `recomputed_probs` says so."""
    probs = power(log2_p, problem) if problem.whole_max else jnp.exp2(log2_p)
    if not problem.rounds_recomputed_probs:
        return probs
    return round_to_bfloat16(probs, interpret=problem.sizes.interpret)


def log2_of(l: Array) -> Array:
    """Returns log₂ l, from l in units of 2^-65."""
    return lax.log2(l) - np.float32(UNIT)  # type: ignore[attr-defined]  # not in JAX 0.10
