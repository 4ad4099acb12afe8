"""The devices of a run, what lies on each of them, and the programs that are compiled for them."""

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
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.training.settings import DataSettings, TrainSettings
from lowprec_attn.training.step import Gathered, Steps, TrainState, make_steps, root_key

_AXIS = "data"
_ROWS = 8  # of a float32 tile in a TPU's memory
ALIKE = 4  # settings and devices whose programs a process keeps


# Bytes of gradients up to which one all-reduce on GPUs takes several. Few and late is best: one
# beside the backward pass takes multiprocessors from kernels that have a program on each, and these
# then take twice as long.
_REDUCED_AT_ONCE = 2**28


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """XLA options of every jitted function of a run, so that its bits are the same every time.

    Args:
      platform: name of the platform that is compiled for, such as `gpu`.
    """
    # By default XLA may drop the rounding of a bfloat16 activation between two operations.
    options: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}
    if platform == "gpu":
        # By default reductions and scatters need not give the same bits twice.
        options["xla_gpu_deterministic_ops"] = True
        # XLA's own products lose to cuBLAS here. But while XLA considers them, it takes apart sums
        # that cuBLAS would have made in place.
        options["xla_gpu_enable_triton_gemm"] = False
        # NCCL sums many arrays in one kernel. By default XLA copies them into one array before, and
        # the sums out of it after.
        options["xla_disable_hlo_passes"] = "all-reduce-contiguous"
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = _REDUCED_AT_ONCE
    return options


class Devices(NamedTuple):
    """A one-axis mesh; parameters are replicated over it, batches split.

    Attributes:
      mesh: of all devices of the run, those of one process next to each other.
      implementation: of attention, None for the one that suits the platform.
      shard_optimizer: whether the optimizer's state is split over the devices.
    """

    mesh: Mesh
    implementation: str | None
    shard_optimizer: bool

    @property
    def attend(self) -> Attend:
        """Attention for arrays that are split over the batch."""
        if self.mesh.devices.size == 1:
            return self.attend_whole
        return self._attend(attention.sharded(self.mesh, batch_axis=_AXIS))

    @property
    def attend_part(self) -> Attend:
        """Attention within a function under `over_devices`, which sees the part of one device."""
        if self.mesh.devices.size == 1:
            return self.attend_whole
        return self._attend(attention.within_shard(batch_axis=_AXIS))

    @property
    def attend_whole(self) -> Attend:
        """Attention for arrays that every device holds whole."""
        return self._attend(attention.dot_product_attention)

    def _attend(self, function: Callable[..., Any]) -> Attend:
        platform = self.mesh.devices.flat[0].platform
        # The GPU kernels alone read q, k and v as one product gives them.
        packed = platform == "gpu" and self.implementation in (None, "gpu", "hopper")

        def attend(*qkv: Array, **options: Any) -> Any:
            with traced_for(platform):
                return function(*qkv, implementation=self.implementation, **options)

        return Attend(attend, packed)

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def split(self) -> NamedSharding:
        """Every device holds its part of the sequences of [A, B/A, T]."""
        return NamedSharding(self.mesh, PartitionSpec(None, _AXIS))

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """See the function of this name."""
        return compiler_options(self.mesh.devices.flat[0].platform)

    def jit(self, function: Any, **options: Any) -> Any:
        """`jax.jit` with the run's compiler options."""
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def over_devices(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(params, inputs, targets [A, M, T], key) -> Gathered, over all devices.

        Each device computes it for its own sequences; one all-reduce at the end takes the mean, and
        one the largest where there is such a thing.
        """
        if self.mesh.devices.size == 1:
            return function

        def gathered(*args: Any) -> Gathered:
            mean, largest = function(*args)
            return Gathered(lax.pmean(mean, _AXIS), lax.pmax(largest, _AXIS))

        whole, part = PartitionSpec(), PartitionSpec(None, _AXIS)
        # Left to itself, XLA reduces the gradients of every micro-batch.
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
        """Splits one axis of x into as many equal parts as the devices allow.

        Each part lies on devices/parts devices. Parts are whole tiles of rows: smaller ones save
        little, and a TPU would pad them and gather them by an all-reduce.
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
        """Inputs and targets [A, B/A, T], the middle axis split over the devices.

        Args:
          batch: its rows are those of this process's `shard`.
        """
        inputs, targets = (
            jax.make_array_from_process_local_data(self.split, x)
            for x in (batch["inputs"], batch["targets"])
        )
        return inputs, targets


def run_devices(settings: TrainSettings) -> Devices:
    """The mesh over `settings.devices` devices, by default over those of all processes.

    Raises:
      RunError: there are fewer, or a micro-batch does not divide over them.
    """
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if settings.devices is not None and jax.process_count() > 1:
        raise RunError(
            f"devices={settings.devices} chooses among the devices of a single process; "
            "leave it out if several processes run together"
        )
    return mesh_over(devices, settings)


def mesh_over(devices: Sequence[Any], settings: TrainSettings) -> Devices:
    """The mesh over the first `settings.devices` of the given devices, by default over all.

    The devices may be absent: a program can be compiled for other devices than this host's.

    Raises:
      RunError: there are fewer, or a micro-batch does not divide over them.
    """
    if settings.devices is not None:
        if not 1 <= settings.devices <= len(devices):
            raise RunError(f"devices={settings.devices}, but there are {len(devices)}")
        devices = devices[: settings.devices]
    micro_batch = settings.batch_size // settings.accumulation_steps
    if micro_batch % len(devices):
        raise RunError(
            f"a micro-batch of {micro_batch} sequences (batch_size {settings.batch_size} / "
            f"accumulation_steps {settings.accumulation_steps}) does not divide over "
            f"{len(devices)} devices; choose a multiple of {len(devices)}"
        )
    mesh = Mesh(np.array(devices), (_AXIS,))
    return Devices(mesh, settings.attention.implementation, settings.shard_optimizer)


class Program(NamedTuple):
    """The training step of a run, and the shapes of its arguments.

    Attributes:
      steps: the functions that the programs are made of.
      init: (root) -> TrainState, jitted.
      train: (state, inputs, targets [A, B/A, T], root) -> (state, StepMetrics), jitted; the state
        is donated.
      evaluate: (params, inputs, targets [A, B/A, T], root) -> mean loss, jitted.
      state: shapes, dtypes and shardings of the state.
      batch: the same of the inputs, and of the targets.
      root: the same of the root key.
    """

    steps: Steps
    init: Any
    train: Any
    evaluate: Any
    state: TrainState
    batch: jax.ShapeDtypeStruct
    root: jax.ShapeDtypeStruct

    def initial_state(self, root: Key[Array, ""]) -> TrainState:
        """What `init` gives, compiled in seconds on a GPU as well."""
        with random_bits_by_kernel():
            state: TrainState = self.init(root)
            return state


@contextlib.contextmanager
def random_bits_by_kernel() -> Iterator[None]:
    """Threefry by JAX's own kernel wherever a program is compiled for a GPU; the same bits.

    XLA would compile it anew for each of GPT-2's 74 random arrays, which takes half a minute.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


def make_program(settings: TrainSettings, devices: Devices) -> Program:
    """The programs of a run; nothing is compiled yet, and the devices need not be there.

    A run that goes back, and one that differs in its seed, data or periods alone, get the same
    programs, compiled as they are.
    """
    return _program(_of_programs(settings), devices)


def _of_programs(settings: TrainSettings) -> TrainSettings:
    """The settings with one value for all that programs do not depend on."""
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


# JAX finds what it has compiled by the function that it was given.
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
