"""Supports JAX's transformations of an implementation of attention.

Second derivatives: JAX differentiates the hand-written passes of a `custom_vjp`. A pass that cannot
be differentiated says so (`first_order_only`), or names a twin that can (`differentiated_as`).

`jax.shard_map` with `check_vma=True`, its default: the type of an array lists the mesh axes over
which it varies, and the arrays of one call must agree in them (`vary_alike`).

`jax.checkpoint`: its policies may keep what a forward kernel writes (`named`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# The name, for policies of `jax.checkpoint`, of all that a forward kernel writes.
CHECKPOINT_NAME = "lowprec_attention"

_Arrays = TypeVar("_Arrays")


def differentiated_as(function: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with the derivative of `twin`, which computes the same values."""
    result = jax.custom_jvp(function)
    result.defjvp(partial(jax.jvp, twin))
    return result


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order_only(arrays: _Arrays, implementation: str) -> _Arrays:
    """Returns the arrays unchanged, but raises an error if the result is differentiated.

    The passes of `implementation` that read these arrays have no derivative.

    Raises:
      NotImplementedError: the result is differentiated.
    """
    return arrays


@first_order_only.defjvp
def _refuse(implementation: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"second derivatives of implementation {implementation!r} are not supported; "
        "use implementation='tiled' or 'dense'"
    )


def named(written: _Arrays) -> _Arrays:
    """Gives the name `CHECKPOINT_NAME` to all that a forward kernel writes: O and row statistics.

    Under a policy of `jax.checkpoint` that saves this name, the kernel does not run a second time.
    Inputs are not named, because projections recompute them. An array that occurs twice in
    `written` is named only once; otherwise it would be saved twice.
    """
    names = {id(x): checkpoint_name(x, CHECKPOINT_NAME) for x in jax.tree.leaves(written)}
    return jax.tree.map(lambda x: names[id(x)], written)


def vary_alike(arrays: _Arrays) -> _Arrays:
    """Casts each array to vary over all mesh axes over which any of the arrays varies.

    The derivative of the cast sums over the axes over which the array did not vary before. Outside
    of a `jax.shard_map` with `check_vma=True` no array varies, and nothing is cast.
    """
    axes = frozenset[str]().union(*(_varying(x) for x in jax.tree.leaves(arrays)))

    def cast(x: jax.Array) -> jax.Array:
        return lax.pcast(x, tuple(sorted(axes - _varying(x))), to="varying")

    return jax.tree.map(cast, arrays) if axes else arrays


def checks_varying_types() -> bool:
    """Whether this code is traced under a `jax.shard_map` with `check_vma=True`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return False
    # An index along mesh axes varies over them, but its type says so only if types are checked. The
    # result of `eval_shape` would have no mesh, and `jax.typeof` refuses it if other axes are
    # automatic.
    (index,) = jax.make_jaxpr(partial(lax.axis_index, axes))().out_avals
    return bool(index.manual_axis_type.varying)


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
