"""Compiles attention for a TPU on a host without one, and reads the resulting schedules.

libtpu (`pip install libtpu`, the extra `tpu-compile`) contains the compiler of every generation. It
reads its options from the environment when it is loaded, so a separate process compiles:

    schedules = aot.compile_calls([aot.Call(generation="v5e")])
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from benchmarks.tpu import peers
from benchmarks.tpu.schedules import PASSES, Schedule, read_schedules
from lowprec_attn.arithmetic.request import Extras, RandomStream, Request, Spec
from lowprec_attn.commands.compile import COMPILER_HOST
from lowprec_attn.numerics import get_preset, get_row_max
from pallas_kernels.tpu import attention
from pallas_kernels.tpu.block_sizes import BlockSizes, Tile

# The smallest slice of each generation that the compiler knows.
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}

# Only some passes are dumped: writing all of them takes four times the compiler's own time.
_DUMP = f"--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={'|'.join(PASSES)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One attention call, forward and backward, on one chip.

    Attributes:
      generation: one of TOPOLOGIES.
      kernel: `ours`, or a peer in JAX, `splash` or `flash_attention`. Peers take no numerics.
      preset, points, row_max: the arithmetic; `points` are changes to the preset.
      batch, length, keys, heads, kv_heads, head_size: B, T, S (None: T), N, K, H.
      dtype: the dtype of q, k and v.
      has_lengths: whether there are query and key lengths.
      window: (left, right), the keys that a row sees around its own position; None for all.
      has_segments: whether there are segment ids.
      has_mask: whether there is a mask.
      tile: query rows and keys of every kernel's tile; None for the default.
    """

    generation: str
    kernel: str = "ours"
    preset: str = "flash"
    points: tuple[tuple[str, Any], ...] = ()
    row_max: str = "standard"
    batch: int = 1
    length: int = 1024
    keys: int | None = None
    heads: int = 2
    kv_heads: int = 2
    head_size: int = 64
    dtype: str = "bfloat16"
    has_lengths: bool = False
    window: tuple[int, int] | None = None
    has_segments: bool = False
    has_mask: bool = False
    tile: tuple[int, int] | None = None

    @property
    def spec(self) -> Spec:
        """The static part of a causal call."""
        sizes = None
        if self.tile is not None:
            tile = Tile(query=self.tile[0], kv=self.tile[1])
            sizes = BlockSizes(forward=tile, key_gradients=tile, query_gradients=tile)
        return Spec(
            numerics=get_preset(self.preset).replace(**dict(self.points)),
            row_max=get_row_max(self.row_max),
            scale=self.head_size**-0.5,
            is_causal=True,
            window=None if self.window is None else (self.window[0], self.window[1]),
            block_sizes=sizes,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a call: the schedule of each kernel, or the error of the compiler."""

    schedules: dict[str, Schedule]
    error: str | None
    seconds: float


def compile_calls(calls: Sequence[Call], *, timeout: float = 600.0) -> list[Result]:
    """Compiles the calls, forward and backward, in one separate process.

    Args:
      calls: the calls to compile.
      timeout: the seconds for all of them together.

    Raises:
      RuntimeError: the process failed as a whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} {_DUMP}"}
        child = subprocess.run(
            [sys.executable, "-m", __name__, folder],
            input=json.dumps([dataclasses.asdict(call) for call in calls]),
            env=os.environ | COMPILER_HOST | dump,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if child.returncode:
        raise RuntimeError(f"compilation for TPU failed: {child.stderr[-2000:]}")
    return [_result(json.loads(line)) for line in child.stdout.splitlines()]


def _result(record: dict[str, Any]) -> Result:
    schedules = {name: Schedule.of(fields) for name, fields in record["schedules"].items()}
    return Result(schedules, record["error"], record["seconds"])


def _compile(call: Call) -> None:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[call.generation]
    )
    shape = functools.partial(
        jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(topology.devices[0])
    )
    b, t, s = call.batch, call.length, call.keys or call.length
    q = shape((b, t, call.heads, call.head_size), jnp.dtype(call.dtype))
    kv = shape((b, s, call.kv_heads, call.head_size), jnp.dtype(call.dtype))
    lengths: Any = shape((b,), jnp.int32) if call.has_lengths else None
    words: list[Any] = [shape((2,), jnp.uint32), *(shape((n,), jnp.int32) for n in (b, call.heads))]
    extras = Extras(query_lengths=lengths, key_lengths=lengths, stream=RandomStream(*words))
    if call.has_segments:
        segments: list[Any] = [shape((b, size), jnp.int32) for size in (t, s)]
        extras = extras._replace(query_segments=segments[0], key_segments=segments[1])
    if call.has_mask:
        mask: Any = shape((b, 1, t, s), jnp.bool_)
        extras = extras._replace(mask=mask)
    attend = _ours(call) if call.kernel == "ours" else _peer(call)

    def step(q: Array, k: Array, v: Array, do: Array, extras: Extras) -> Any:
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv, extras), q, k, v)
        return out, pullback(do.astype(out.dtype))

    jax.jit(step).lower(q, kv, kv, q, extras).compile()


def _ours(call: Call) -> Callable[..., Array]:
    spec = call.spec

    def attend(q: Array, k: Array, v: Array, extras: Extras) -> Array:
        request = dataclasses.replace(Request.of(q, k, extras, spec), platform="tpu")
        if reason := attention.unsupported(request):
            raise NotImplementedError(reason)
        return attention.attention(q, k, v, extras, spec)[0]

    return attend


def _peer(call: Call) -> Callable[..., Array]:
    tile = call.tile or (512, 512)
    if call.kernel == "splash":
        attend = peers.splash(call.length, call.heads, call.spec.scale, tile)
    elif call.kernel == "flash_attention":
        attend = peers.flash(call.spec.scale, tile)
    else:
        raise ValueError(f"unknown kernel {call.kernel!r}; there are ours, splash, flash_attention")
    return lambda q, k, v, extras: attend(q, k, v)


def _compiled(calls: list[Call], folder: Path) -> Iterator[dict[str, Any]]:
    """Compiles the calls in this process, where libtpu dumps to `folder`; yields JSON records."""
    for call in calls:
        start, error, schedules = time.perf_counter(), None, {}
        try:
            _compile(call)
            schedules = {name: x.record for name, x in read_schedules(folder).items()}
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        seconds = time.perf_counter() - start
        for path in folder.iterdir():
            path.unlink()
        yield {"schedules": schedules, "error": error, "seconds": seconds}


def _call(fields: dict[str, Any]) -> Call:
    points = tuple((name, value) for name, value in fields["points"])
    tile = None if fields["tile"] is None else tuple(fields["tile"])
    return Call(**fields | {"points": points, "tile": tile})


if __name__ == "__main__":
    for record in _compiled([_call(fields) for fields in json.load(sys.stdin)], Path(sys.argv[1])):
        print(json.dumps(record), flush=True)
