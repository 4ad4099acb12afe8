"""The devices of a run, the arrays on each of them, and the programs compiled for them."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from grain.sharding import ShardOptions
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from lowprec_attn import attention
from lowprec_attn.attention.dispatch import traced_for
from lowprec_attn.data.batches import Batch
from lowprec_attn.errors import RunError
from lowprec_attn.gpt2 import functions
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.settings import DataSettings, TrainSettings
from lowprec_attn.training.step import Gathered, Steps, TrainState, make_steps, root_key

_AXIS = "data"
_ROWS = 8  # rows of a float32 tile in a TPU's memory
ALIKE = 4  # pairs of settings and devices whose programs a process keeps


# Bytes of gradients that XLA combines at most into one all-reduce on GPUs. Few, late all-reduces
# are best. An all-reduce that overlaps the backward pass takes multiprocessors from kernels that
# place one program on each of them, and these kernels then take twice as long.
_REDUCED_AT_ONCE = 2**28


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """Returns the XLA options with which a run computes the same bits every time.

    Args:
      platform: name of the platform to compile for, for example `gpu`.
    """
    # By default XLA may drop the rounding of a bfloat16 activation between two operations.
    options: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        # By default reductions and scatters need not give the same bits twice.
        options["xla_gpu_deterministic_ops"] = True
        # XLA's own Triton products are slower than cuBLAS here. While XLA considers them, it also
        # splits off sums that cuBLAS would have computed in place.
        options["xla_gpu_enable_triton_gemm"] = False
        # NCCL can sum many arrays in one kernel. By default XLA copies them into one array before
        # the all-reduce, and copies the sums out of it afterwards.
        options["xla_disable_hlo_passes"] = "all-reduce-contiguous"
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = _REDUCED_AT_ONCE
    return options


class Devices(NamedTuple):
    """A one-axis mesh over which parameters are replicated and batches are split.

    Attributes:
      mesh: all devices of the run; the devices of one process are adjacent.
      implementation: name of the attention implementation, None to let the platform decide.
      function: another library's attention in its place; see `gpt2.functions`.
      shard_optimizer: whether the optimizer's state is split over the devices.
    """

    mesh: Mesh
    implementation: str | None
    function: Callable[..., Array] | None
    shard_optimizer: bool

    @property
    def attend(self) -> Attend:
        """Attention for arrays whose batch axis is split over the devices."""
        if self.mesh.devices.size == 1:
            return self.attend_whole
        return self._attend(attention.sharded(self.mesh, batch_axis=_AXIS))

    @property
    def attend_part(self) -> Attend:
        """Attention for a function under `over_devices`, which sees the part of one device."""
        if self.mesh.devices.size == 1:
            return self.attend_whole
        return self._attend(attention.within_shard(batch_axis=_AXIS))

    @property
    def attend_whole(self) -> Attend:
        """Attention for arrays that every device holds whole."""
        return self._attend(attention.dot_product_attention)

    def _attend(self, function: Callable[..., Any]) -> Attend:
        platform = self.mesh.devices.flat[0].platform
        if self.function is None:
            function = functools.partial(function, implementation=self.implementation)
        else:
            function = functions.as_attention(self.function)
        # Only the GPU kernels read q, k and v packed in one array, as one product forms them.
        ours = self.function is None and self.implementation in (None, "gpu", "hopper")
        packed = platform == "gpu" and ours

        def attend(*qkv: Array, **options: Any) -> Any:
            with traced_for(platform):
                return function(*qkv, **options)

        return Attend(attend, packed)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding under which every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def split(self) -> NamedSharding:
        """The sharding of [A, B/A, T] under which every device holds its part of the sequences."""
        return NamedSharding(self.mesh, PartitionSpec(None, _AXIS))

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """The options of the function `compiler_options` for the platform of these devices.

        With another library's attention a run need not compute the same bits every time. In XLA of
        JAX 0.11.2 a program with two of cuDNN's backward calls fails at its start if operations
        must be deterministic (`IndexError: raw_hash_map::at`).
        """
        options = compiler_options(self.mesh.devices.flat[0].platform)
        if self.function is not None:
            options.pop("xla_gpu_deterministic_ops", None)
        return options

    def jit(self, function: Any, **options: Any) -> Any:
        """Applies `jax.jit` with the run's compiler options."""
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def over_devices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Runs function(params, inputs, targets [A, M, T], key) -> Gathered on all devices.

        Each device evaluates the function on its own sequences. At the end, one all-reduce averages
        `mean` over the devices. Another takes the maximum of `largest` if the function gives one.
        """
        if self.mesh.devices.size == 1:
            return function

        def gathered(*args: Any) -> Gathered:
            mean, largest = function(*args)
            return Gathered(lax.pmean(mean, _AXIS), lax.pmax(largest, _AXIS))

        whole, part = PartitionSpec(), PartitionSpec(None, _AXIS)
        # Without `shard_map`, XLA would reduce the gradients of every micro-batch.
        return jax.shard_map(
            gathered,
            mesh=self.mesh,
            in_specs=(whole, part, part, whole),
            out_specs=whole,
            check_vma=False,  # Pallas calls carry no varying-axes types
        )

    def shardings(self, state: TrainState) -> TrainState:
        """The sharding of each array of a training state.

        With `shard_optimizer` the optimizer's state is split (ZeRO stage 1; Rajbhandari et al.,
        arXiv 1910.02054). XLA then splits the update as well, and gathers the new parameters.
        """
        whole = jax.tree.map(lambda _: self.replicated, state)
        if not self.shard_optimizer:
            return whole
        return whole._replace(opt_state=jax.tree.map(self._split, state.opt_state))

    def _split(self, x: Any) -> NamedSharding:
        """Returns a sharding that splits one axis of x into the most equal parts possible.

        Each part is replicated over devices/parts devices. A part consists of whole tiles of rows.
        Smaller parts would save little, and a TPU would pad them and gather them by an all-reduce.
        """
        count = self.mesh.devices.size
        parts = [
            math.gcd(size // _ROWS, count) if size % _ROWS == 0 else 1 for size in x.shape[:-1]
        ]
        if max(parts, default=1) == 1:
            return self.replicated
        axis = parts.index(max(parts))
        mesh = Mesh(self.mesh.devices.reshape(parts[axis], -1), (_AXIS, "copy"))
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, _AXIS))

    @property
    def shard(self) -> ShardOptions:
        """The rows of every micro-batch that this process reads."""
        return ShardOptions(jax.process_index(), jax.process_count())

    def put(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns inputs and targets [A, B/A, T] with the middle axis split over the devices.

        Args:
          batch: the batch, with the rows of this process's `shard`.
        """
        inputs, targets = (
            jax.make_array_from_process_local_data(self.split, x)
            for x in (batch["inputs"], batch["targets"])
        )
        return inputs, targets


def run_devices(settings: TrainSettings) -> Devices:
    """Returns the mesh over `settings.devices` devices, by default over those of all processes.

    Raises:
      RunError: there are fewer devices, a micro-batch does not divide over them, or
        `settings.devices` is set in a run of several processes.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if settings.devices is not None and jax.process_count() > 1:
        raise RunError(
            f"devices={settings.devices} chooses among the devices of a single process; "
            "leave it out if several processes run together"
        )
    return mesh_over(devices, settings)


def mesh_over(devices: Sequence[Any], settings: TrainSettings) -> Devices:
    """Returns the mesh over the first `settings.devices` of the given devices, by default all.

    The devices need not be attached: a program can be compiled for devices of another host.

    Raises:
      RunError: there are fewer devices, or a micro-batch does not divide over them.
    """
    if settings.devices is not None:
        if not 1 <= settings.devices <= len(devices):
            raise RunError(
                f"devices={settings.devices}, but there are {len(devices)}; say 1 to "
                f"{len(devices)}, or leave it out to take all"
            )
        devices = devices[: settings.devices]
    micro_batch = settings.batch_size // settings.accumulation_steps
    if micro_batch % len(devices):
        raise RunError(
            f"a micro-batch of {micro_batch} sequences (batch_size {settings.batch_size} / "
            f"accumulation_steps {settings.accumulation_steps}) does not divide over "
            f"{len(devices)} devices; choose a multiple of {len(devices)}"
        )
    mesh = Mesh(np.array(devices), (_AXIS,))
    name = settings.attention.function
    function = None if name is None else functions.find(name)
    return Devices(mesh, settings.attention.implementation, function, settings.shard_optimizer)


class Program(NamedTuple):
    """The jitted functions of a run, and the shapes of their arguments.

    Attributes:
      steps: the functions before they are jitted.
      init: (root) -> TrainState, jitted.
      train: (state, inputs, targets [A, B/A, T], root) -> (state, StepMetrics), jitted; the state
        is donated.
      evaluate: (params, inputs, targets [A, B/A, T], root) -> mean loss, jitted.
      state: shapes, dtypes and shardings of the state.
      batch: shape, dtype and sharding that inputs and targets share.
      root: shape, dtype and sharding of the root key.
    """

    steps: Steps
    init: Any
    train: Any
    evaluate: Any
    state: TrainState
    batch: jax.ShapeDtypeStruct
    root: jax.ShapeDtypeStruct

    def initial_state(self, root: Key[Array, ""]) -> TrainState:
        """Returns the result of `init`, which compiles within seconds on a GPU too."""
        with random_bits_by_kernel():
            state: TrainState = self.init(root)
            return state


@contextlib.contextmanager
def random_bits_by_kernel() -> Iterator[None]:
    """Lets programs compiled for a GPU use JAX's own Threefry kernel, which gives the same bits.

    Otherwise XLA compiles Threefry anew for each of GPT-2's 74 random arrays, which takes half a
    minute.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def make_program(settings: TrainSettings, devices: Devices) -> Program:
    """Returns the programs of a run without compiling them; the devices need not be attached.

    A run gets programs that are compiled already if it differs from an earlier run of this process
    only in its seed, data or periods, or if it goes back and keeps its arithmetic.
    """
    return _program(_of_programs(settings), devices)


def _of_programs(settings: TrainSettings) -> TrainSettings:
    """Returns the settings with fixed values in the fields that programs do not depend on."""
    return dataclasses.replace(
        settings,
        name="",
        variant="",
        data=DataSettings(path=None),
        seed=0,
        diagnostics_every=0,
        checkpoint_every=0,
        checkpoints_kept=1,
        eval_every=0,
        eval_batches=1,
        stop_exploded_after=None,
        rollback=None,
        resume_from=None,
        resume_step=None,
    )


# JAX looks up compiled code by function object, so equal settings must give the same functions.
@functools.lru_cache(maxsize=ALIKE)
def _program(settings: TrainSettings, devices: Devices) -> Program:
    steps = make_steps(settings, devices.attend_part, devices.over_devices)
    root = jax.eval_shape(lambda: root_key(settings))
    shapes = jax.eval_shape(steps.init, root)
    placed = devices.shardings(shapes)
    rows = settings.batch_size // settings.accumulation_steps
    return Program(
        steps=steps,
        init=jax.jit(steps.init, out_shardings=placed),
        train=devices.jit(
            steps.train, donate_argnums=0, out_shardings=(placed, devices.replicated)
        ),
        evaluate=devices.jit(steps.evaluate),
        state=jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            placed,
        ),
        batch=jax.ShapeDtypeStruct(
            (settings.accumulation_steps, rows, settings.model.context),
            jnp.int32,
            sharding=devices.split,
        ),
        root=jax.ShapeDtypeStruct(root.shape, root.dtype, sharding=devices.replicated),
    )
