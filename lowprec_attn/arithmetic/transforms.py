"""What JAX's transformations may do with an implementation of attention.

Second derivatives: JAX differentiates the hand-written passes of a `custom_vjp` themselves. A pass
that cannot be differentiated says so (`first_order_only`), or names a twin that can
(`differentiated_as`). `jax.shard_map` with `check_vma=True`, its default: every array has in its
type the mesh axes over which it varies, and those of one call must agree (`vary_alike`).
`jax.checkpoint`: its policies may keep what a forward kernel writes (`named`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# What a forward kernel writes, for policies of `jax.checkpoint`.
CHECKPOINT_NAME = "lowprec_attention"

_Arrays = TypeVar("_Arrays")


def differentiated_as(function: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the derivative of `twin`, which computes the same values."""
    result = jax.custom_jvp(function)
    result.defjvp(partial(jax.jvp, twin))
    return result


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def first_order_only(arrays: _Arrays, implementation: str) -> _Arrays:
    """The arrays as they are; the passes of `implementation` that read them have no derivative.

    Raises:
      NotImplementedError: when differentiated.
    """
    return arrays


@first_order_only.defjvp
def _refuse(implementation: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"second derivatives of implementation {implementation!r} are not supported; "
        "use implementation='tiled' or 'dense'"
    )


def named(written: _Arrays) -> _Arrays:
    """All that a forward kernel writes, O and row statistics, under `CHECKPOINT_NAME`.

    A policy of `jax.checkpoint` that keeps the name need not run the kernel a second time. Inputs
    have no name: projections give them again. What stands twice in `written` has one name, or it
    would be kept twice.
    """
    names = {id(x): checkpoint_name(x, CHECKPOINT_NAME) for x in jax.tree.leaves(written)}
    return jax.tree.map(lambda x: names[id(x)], written)


def vary_alike(arrays: _Arrays) -> _Arrays:
    """The arrays, each varying over all mesh axes over which any of them does.

    The derivative of that is the sum over the axes which an array did not vary over. Outside a
    `jax.shard_map` that checks, no array varies.
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
    # An index along mesh axes varies over them; its type says so only where types are checked. The
    # result of `eval_shape` has no mesh: `jax.typeof` refuses it where other axes stay automatic.
    (index,) = jax.make_jaxpr(partial(lax.axis_index, axes))().out_avals
    return bool(index.manual_axis_type.varying)


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
