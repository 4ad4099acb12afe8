"""Attention over several devices, under our own `jax.shard_map` or under the caller's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from lowprec_attn.arithmetic.request import Extras, RandomStream, planes
from lowprec_attn.attention.dispatch import Call, compute
from lowprec_attn.attention.entry import Options, prepare, returned
from lowprec_attn.attention.tap import tapped


def sharded(
    mesh: Mesh, *, batch_axis: str | None = None, head_axis: str | None = None
) -> Callable[..., Any]:
    """Wraps `dot_product_attention` in `jax.shard_map`, as XLA cannot partition a Pallas call.

    The result equals that of the unsharded call up to the order of float32 sums. Both draw the same
    random bits.

    Args:
      mesh: the device mesh.
      batch_axis: mesh axis over which the batch is split; None leaves the batch whole.
      head_axis: mesh axis over which heads are split, by whole key heads; None leaves them whole.
        Heads that are split must share their arithmetic.

    Returns:
      A function with the arguments and errors of `dot_product_attention`, in which q, k and v must
      have the batch axis. It raises ValueError if the batch or the key heads do not divide evenly
      over their mesh axis, or if split heads differ in arithmetic.

    Raises:
      ValueError: the mesh has no axis of that name.
    """
    for axis in (batch_axis, head_axis):
        if axis is not None and axis not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {axis!r}; its axes are {mesh.axis_names}")

    def run(call: Call) -> tuple[Array, ...]:
        _check_divides(mesh, batch_axis, head_axis, call)
        heads = PartitionSpec(batch_axis, None, head_axis, None)
        packed = PartitionSpec(batch_axis, None, None, head_axis, None)
        in_specs = (
            (packed,) if len(call.arrays) == 1 else (heads,) * 3,
            _extras_specs(call.extras, batch_axis, head_axis),
        )
        out_specs = [heads, PartitionSpec(batch_axis, None, head_axis)]
        if call.parts[0].spec.max_logit:
            out_specs.append(PartitionSpec(batch_axis, head_axis))
        over_shards = jax.shard_map(
            lambda arrays, extras: compute(Call(arrays, extras, call.parts)),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=tuple(out_specs),
            check_vma=False,  # Pallas calls carry no varying-axes types
        )
        arrays = (call.arrays, call.extras)
        if AxisType.Explicit in mesh.axis_types:  # the default of `jax.make_mesh`
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), in_specs)
            arrays = jax.sharding.reshard(arrays, shardings)
        return over_shards(*arrays)

    return _attention_by(run)


def within_shard(*, batch_axis: str) -> Callable[..., Array | tuple[Array, ...]]:
    """Returns `dot_product_attention` for code that already runs under `jax.shard_map`.

    The kernels need a `jax.shard_map` with `check_vma=False`. Under the default, `check_vma=True`,
    they decline, and `tiled` serves a call that names no implementation. JAX then sums the gradient
    of an array that does not vary over a mesh axis over that axis.

    Args:
      batch_axis: mesh axis over which the surrounding code splits the batch, in equal parts. The
        random bits equal those of a call with the whole batch.

    Returns:
      A function with the arguments and errors of `dot_product_attention`, in which q, k and v must
      have the batch axis.
    """

    def run(call: Call) -> tuple[Array, ...]:
        stream = call.extras.stream
        if stream is not None:
            start = jax.lax.axis_index(batch_axis) * jnp.int32(stream.batch.size)
            stream = stream._replace(batch=stream.batch + start)
            call = call._replace(extras=call.extras._replace(stream=stream))
        return compute(call)

    return _attention_by(run)


def _attention_by(run: Callable[[Call], tuple[Array, ...]]) -> Callable[..., Any]:
    """Returns `dot_product_attention` with `run` as the function that computes a validated call."""

    def attend(
        query: Any,
        key: Any = None,
        value: Any = None,
        bias: Any = None,
        mask: Any = None,
        **options: Any,
    ) -> Array | tuple[Array, ...]:
        return_residual = options.pop("return_residual", False)
        call = _batched(*prepare((query, key, value, bias, mask), Options(**options)))
        out, *others = run(call)
        return returned((tapped(call, out), *others), return_residual=return_residual)

    return attend


def _batched(call: Call, unbatched: bool) -> Call:
    if unbatched:
        packed = "3, " if len(call.arrays) == 1 else ""
        raise ValueError(
            f"query must be [batch, length, {packed}heads, head size], "
            f"got shape {call.arrays[0].shape[1:]}"
        )
    return call


def _check_divides(mesh: Mesh, batch_axis: str | None, head_axis: str | None, call: Call) -> None:
    q, k, _ = jax.eval_shape(planes, *call.arrays)
    if batch_axis is not None and q.shape[0] % mesh.shape[batch_axis]:
        raise ValueError(
            f"batch {q.shape[0]} does not divide over {mesh.shape[batch_axis]} devices "
            f"of mesh axis {batch_axis!r}; take a multiple of {mesh.shape[batch_axis]}"
        )
    if head_axis is None:
        return
    if k.shape[2] % mesh.shape[head_axis]:
        raise ValueError(
            f"{k.shape[2]} key heads do not divide over {mesh.shape[head_axis]} devices "
            f"of mesh axis {head_axis!r}; leave head_axis out, and split the batch instead"
        )
    if len(call.parts) > 1:
        raise ValueError(
            f"heads of different arithmetic cannot be split over mesh axis {head_axis!r}; "
            "split the batch instead"
        )


def _extras_specs(extras: Extras, batch_axis: str | None, head_axis: str | None) -> Extras:
    specs: dict[str, Any] = {
        name: None if x is None else PartitionSpec(batch_axis)
        for name, x in extras._asdict().items()
    }
    for name, x in {"bias": extras.bias, "mask": extras.mask}.items():
        if x is not None:
            axes = (batch_axis if x.shape[0] > 1 else None, head_axis if x.shape[1] > 1 else None)
            specs[name] = PartitionSpec(*axes, None, None)
    if extras.scale is not None:
        specs["scale"] = PartitionSpec()
    if extras.backward_sums is not None:
        specs["backward_sums"] = PartitionSpec(batch_axis, None, head_axis)
    if extras.sinks is not None:
        specs["sinks"] = PartitionSpec(head_axis)
    if extras.stream is not None:
        # Indices in the stream are global, so each shard draws the bits of its own elements.
        stream: dict[str, Any] = {
            "seed": PartitionSpec(),
            "batch": PartitionSpec(batch_axis),
            "head": PartitionSpec(head_axis),
        }
        specs["stream"] = RandomStream(**stream)
    return Extras(**specs)
