r"""`lowprec-attn` with one more implementation of attention: cuDNN's, as `jax.nn` calls it.

    python -m benchmarks.cudnn_attention lab run true_bfloat16 --arms flash \
        --config.attention.implementation=cudnn --workdir=runs/cudnn --config.data.path=DIR

Our trainer, our recipe, attention by others. cuDNN lets nothing of its arithmetic be chosen. So it
serves one alone, that to which its results come closest: `flash`, in which the largest P̄ of a row
is 1 (results/fidelity: O at scores of 1e5 has no error of a fused multiply-add, though dV there has
one: no `exponent` says that pair). Its steps are its own whatever `kv_block` says. The signals of a
run describe our emulation of `flash`. And q, k and v are formed by three products: one product of
all is for our own kernels. On JAX 0.11.2 a training step does not start: XLA ends it with
`IndexError: absl::container_internal::raw_hash_map<>::at`.

Not part of the package: a numerics library cannot vouch for an arithmetic that it cannot see.
"""

import sys

import jax
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.request import Extras, Request, Spec
from lowprec_attn.attention import dispatch, tiled
from lowprec_attn.commands.main import main
from lowprec_attn.lab import runner
from lowprec_attn.numerics import FLASH, StandardMax

NAME = "cudnn"
SERVED = FLASH.replace(exponent="shift_first")
_EMULATED_STEP = 64  # keys, of the signals' emulation where `kv_block` leaves them open


def unsupported(request: Request) -> str | None:
    """What of the request cuDNN cannot serve, or what cannot be known of it; None: nothing."""
    spec = request.spec
    if spec.numerics.replace(kv_block=None) != SERVED:
        return "any arithmetic but `flash` with exponent='shift_first': nothing in it can be chosen"
    if spec.row_max != StandardMax():
        return f"row_max={spec.row_max} (its row maximum is the standard one)"
    if (request.platform or jax.default_backend()) not in ("cuda", "gpu"):
        return "this platform (it needs a CUDA GPU)"
    if request.dtype != "bfloat16":
        return f"{request.dtype} inputs (`flash` in it is of bfloat16)"
    options = (
        request.has_bias or request.has_lengths or request.has_segments or request.has_traced_scale
    )
    if options or request.mask_shape is not None or spec.window or not spec.is_causal:
        return "anything but plain causal attention: no bias, mask, window, lengths or segments"
    return None


def keys_per_step(request: Request) -> int:
    """Of the emulation in the signals; cuDNN's own are not known."""
    return request.spec.numerics.step_of(request.kv_shape[1], _EMULATED_STEP)


def exponent_of(request: Request) -> str:
    """Shift before scale, by its results: the largest P̄ of a row is 1."""
    return "shift_first"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """O by cuDNN, and an lse by `tiled` that no gradient reaches.

    A training step reads no lse, and XLA leaves out what nobody reads. The one sequence of the
    signals is all `tiled`: JAX 0.11.2 fails on cuDNN's calls within them.
    """
    if q.shape[0] == 1:
        return tiled.attention(q, k, v, extras, spec)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=spec.scale, is_causal=True, implementation="cudnn"
    )
    return out, *jax.lax.stop_gradient(tiled.attention(q, k, v, extras, spec)[1:])


def register() -> None:
    """Makes `implementation="cudnn"` known to this process and to the arms that it starts."""
    dispatch.IMPLEMENTATIONS[NAME] = sys.modules[__name__]  # the last: never chosen unasked
    runner.TRAIN = (sys.executable, "-m", "benchmarks.cudnn_attention", "train")


if __name__ == "__main__":
    register()
    sys.exit(main())
