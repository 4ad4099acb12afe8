"""The entry point of attention on Hopper GPUs, and what it serves.

It takes bfloat16 arrays and serves:

- the roundings of FlashAttention-2 and -3: P̄, O, and P and dS as operands of matrix products;
- δ from a rounded or an unrounded O, from the halves of O or from O′, and a normalised δ;
- a correction after the cast of dS, and the choices of `matched`;
- the standard and the dynamic maximum;
- local windows, segments, lengths, soft caps and sinks;
- values of another head size than queries and keys, as in `OTHER_VALUES`;
- the further products that `published` rounds, at head size 64 (`long_steps`).

`unsupported` names what it declines; the general GPU kernels serve that.

The lower bounds on time in `pallas_kernels.gpu.attention` hold here too, because both passes take
the same products. O′ is the exception: it takes two more products here and three more there.
`matched` takes no further product. The correction after the cast adds two products to the nine of
both passes (docs/developers/hopper.md).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lowprec_attn.arithmetic.backward import SUMS_ROWS
from lowprec_attn.arithmetic.request import (
    Extras,
    Request,
    Spec,
    unsupported_by_kernels,
    unsupported_in_tiles,
    unsupported_symbolic_batch,
)
from lowprec_attn.numerics import (
    FLASH,
    POINTS,
    PUBLISHED,
    DynamicMax,
    Numerics,
    StandardMax,
    get_rounding,
)
from pallas_kernels.gpu.block_sizes import is_hopper
from pallas_kernels.gpu.device import device_kind
from pallas_kernels.gpu.hopper.block_sizes import (
    OTHER_VALUES,
    ROWS,
    BlockSizes,
    block_sizes,
    is_wide,
    rounds_products,
)

HEAD_SIZES = (64, 128, 256)
KEYS_PER_STEP = (64, 128)
# Keys of a step whose products are rounded (512 in `published`), and the head size that it takes.
_LONG_STEPS, _LONG_STEPS_OF = (128, 256, 384, 512), 64
_ROUNDED = ("probs", "output", "probs_bwd", "ds", "grads")
# The points that `published` rounds besides.
_PRODUCTS = tuple(point for point in POINTS if getattr(PUBLISHED, point) != getattr(FLASH, point))
_EXPONENTS = ("scale_first", "whole_max")
# tanh has a relative error of 2^-21, so a score near the cap has an error of 2^-21 times the cap.
_LARGEST_CAP = 1024
_BFLOAT16, _FLOAT32 = get_rounding("bfloat16"), get_rounding("float32")
_FEW_ROWS = 4096


def unsupported(request: Request) -> str | None:
    """Names what the kernels cannot serve of a request, or returns None."""
    spec = request.spec
    if reason := unsupported_in_tiles(request, BlockSizes):
        return reason
    if reason := _unsupported_machine(request):
        return reason
    if reason := unsupported_by_kernels(request) or unsupported_symbolic_batch(request):
        return reason
    if reason := _unsupported_sizes(request):
        return reason
    if request.dtype != jnp.bfloat16:
        return f"{request.dtype} (it takes bfloat16)"
    for name, length in (("queries", request.q_shape[1]), ("keys", request.kv_shape[1])):
        if length % ROWS:
            return f"{length} {name} (it takes multiples of {ROWS})"
    if request.mask_shape is not None:
        return "a dense mask"
    if request.has_backward_sums and (reason := _unsupported_backward_sums(request)):
        return reason
    if not spec.scale > 0:  # the row maximum is taken of q kᵀ before it is scaled
        return f"scale={spec.scale} (it takes numbers above 0)"
    if not isinstance(spec.row_max, StandardMax | DynamicMax):
        return f"row_max={type(spec.row_max).__name__} (it takes StandardMax and DynamicMax)"
    if _is_unordered(spec) and (reason := _unsupported_unordered(spec.numerics)):
        return reason
    if reason := _unsupported_together(request):
        return reason
    head_size = request.q_shape[-1]
    if is_wide(head_size) and (reason := _unsupported_if_wide(request)):
        return f"{reason} at head size {head_size}"
    if reason := _unsupported_numerics(spec.numerics):
        return reason
    if reason := _unsupported_cap_or_sinks(request):
        return reason
    return _unsupported_in_long_steps(request) if rounds_products(spec.numerics) else None


def faster_elsewhere(request: Request) -> tuple[str, str] | None:
    """Returns `gpu` and the reason for calls with lengths and few rows, otherwise None.

    For such calls both passes take 1.16 times the time of `gpu` at gpt2, 1,024 rows, and 0.84 to
    0.87 times at 8,192 rows (results/hopper/lengths_h200.txt). No number of rows in between was
    timed. With a window or with sinks, `gpu` receives copies with zeros beyond the lengths
    (`lowprec_attn.arithmetic.hidden`).
    """
    rows = request.q_shape[1], request.kv_shape[1]
    if not request.has_lengths or request.has_segments or request.has_sinks:
        return None
    if request.spec.window is not None:
        return None
    # Without lengths, `gpu` takes 6 to 9 times as long there, beside other work
    # (results/hopper/values_h200.jsonl).
    if request.q_shape[-1] == 192:
        return None
    # A symbolic size of `jax.export` cannot be compared.
    if not all(isinstance(n, int) and n < _FEW_ROWS for n in rows):
        return None
    return "gpu", f"lengths below {_FEW_ROWS} rows"


def _has_other_values(request: Request) -> bool:
    return request.value_size not in (None, request.q_shape[-1])


def _values(request: Request) -> str:
    return f"values of head size {request.value_size} with queries of {request.q_shape[-1]}"


def _unsupported_sizes(request: Request) -> str | None:
    head_size = request.q_shape[-1]
    if not _has_other_values(request):
        taken = head_size in HEAD_SIZES
        return None if taken else f"head size {head_size} (it takes {_listed(HEAD_SIZES)})"
    given = _values(request)
    if request.value_size != OTHER_VALUES.get(head_size):
        pairs = tuple(f"{v} with {h}" for h, v in OTHER_VALUES.items())
        return f"{given} (it takes equal sizes, or {_listed(pairs)})"
    # −λ q is larger than dO, through whose memory it would leave.
    if request.spec.numerics.delta == "after_cast":
        return f"delta=after_cast for {given}"
    # dQ is summed in blocks that equal sizes share out evenly.
    return f"unordered=True for {given}" if _is_unordered(request.spec) else None


def _unsupported_backward_sums(request: Request) -> str | None:
    """Names what the row sums of the backward pass are not served with, or returns None."""
    spec, head_size = request.spec, request.q_shape[-1]
    asked = {
        "lengths": request.has_lengths,
        "unordered=True": _is_unordered(spec),
        "tile_grads=bfloat16": rounds_products(spec.numerics),
        # A factor of P is the derivative of the cap, and only the product is at hand.
        f"logits_soft_cap={spec.soft_cap}": spec.soft_cap is not None,
        f"head size {head_size}": is_wide(head_size),
        "cooperative=True": isinstance(spec.block_sizes, BlockSizes)
        and spec.block_sizes.query_gradients.cooperative,
    }
    given = [name for name, is_given in asked.items() if is_given]
    return f"backward_sums with {', '.join(given)}" if given else None


def _unsupported_unordered(n: Numerics) -> str | None:
    """Names what is unsupported where the dK and dV kernel also sums dQ, or returns None."""
    for name, taken in (("delta", "do_o"), ("statistics", "lse")):
        if (found := getattr(n, name)) != taken:
            return f"{name}={found} with unordered=True (which takes {taken})"
    if n.saved_output == "halves":
        return "saved_output=halves with unordered=True (which takes same, float32 or auxiliary)"
    return None


def _masks_and_scores(request: Request) -> list[str]:
    """The names of what a call asks for beyond plain or causal attention."""
    spec = request.spec
    asked = {
        "a local window": spec.window is not None,
        "segments": request.has_segments,
        "lengths": request.has_lengths,
        f"logits_soft_cap={spec.soft_cap}": spec.soft_cap is not None,
        "sinks": request.has_sinks,
    }
    return [name for name, is_given in asked.items() if is_given]


def _unsupported_together(request: Request) -> str | None:
    """Names what a mainloop for plain or causal attention alone cannot serve, or returns None.

    Unordered dQ and rounded products have such mainloops.
    """
    spec = request.spec
    which = "unordered=True" if _is_unordered(spec) else "tile_grads=bfloat16"
    if not _is_unordered(spec) and not rounds_products(spec.numerics):
        return None
    given = _masks_and_scores(request)
    return f"{', '.join(given)} with {which}" if given else None


def _unsupported_cap_or_sinks(request: Request) -> str | None:
    spec, sizes = request.spec, request.spec.block_sizes
    named = {f"logits_soft_cap={spec.soft_cap}": spec.soft_cap is not None}
    named["sinks"] = request.has_sinks
    given = [name for name, is_given in named.items() if is_given]
    if not given:
        return None
    # The row sums would have to include the sink's column, and P k the derivative of the cap.
    if (delta := spec.numerics.delta) != "do_o":
        return f"{', '.join(given)} with delta={delta} (it takes do_o)"
    if spec.soft_cap is None:
        return None
    if spec.soft_cap > _LARGEST_CAP:
        return f"logits_soft_cap={spec.soft_cap} (it takes up to {_LARGEST_CAP})"
    if is_wide(request.q_shape[-1]):  # there one consumer hands P to another
        return f"logits_soft_cap={spec.soft_cap} at head size {request.q_shape[-1]}"
    if isinstance(sizes, BlockSizes) and sizes.key_gradients.cooperative:
        return f"logits_soft_cap={spec.soft_cap} with cooperative=True"
    return None


def _unsupported_if_wide(request: Request) -> str | None:
    spec, n = request.spec, request.spec.numerics
    if _is_unordered(spec):
        return "unordered=True"
    if n.saved_dtype is not None and n.saved_output == "auxiliary":
        return "saved_output=auxiliary"
    if n.kv_block == 128 and is_wide(request.value_size or request.q_shape[-1]):
        return "kv_block=128 (it takes 64 or None)"
    # The lower half of O is stored straight from registers, 16 bytes of a row at a time. Mosaic GPU
    # of JAX 0.12 stores only whole sectors of 32 bytes.
    if n.saved_output == "halves" and jax.__version_info__ >= (0, 12) and not _interprets(spec):
        return f"saved_output=halves on JAX {jax.__version__} (it takes JAX 0.11)"
    return None


def _unsupported_in_long_steps(request: Request) -> str | None:
    """Names what is unsupported where products are rounded as by `published`, or returns None."""
    spec, head_size, which = request.spec, request.q_shape[-1], "with tile_grads=bfloat16"
    if head_size != _LONG_STEPS_OF:
        return f"head size {head_size} {which} (it takes {_LONG_STEPS_OF})"
    if not spec.scale_is_power_of_two:  # S is rounded before its scale
        return f"scale={spec.scale} {which} (it takes powers of two)"
    if isinstance(spec.row_max, DynamicMax) and spec.row_max.tolerance != 0:
        return f"row_max.tolerance={spec.row_max.tolerance} {which} (it takes 0)"
    if _is_unordered(spec):
        return f"unordered=True {which}"
    n = spec.numerics
    if n.delta != "do_o" or n.saved_dtype is not None:
        return f"delta={n.delta}, saved_output={n.saved_output} {which} (it takes do_o, same)"
    if n.statistics != "lse" or n.row_sum != "unrounded":
        return f"statistics={n.statistics}, row_sum={n.row_sum} {which} (it takes lse, unrounded)"
    if n.kv_block not in _LONG_STEPS:
        return f"kv_block={n.kv_block} {which} (it takes {_listed(_LONG_STEPS)})"
    return None


def _is_unordered(spec: Spec) -> bool:
    return isinstance(spec.block_sizes, BlockSizes) and spec.block_sizes.unordered


def _interprets(spec: Spec) -> bool:
    return isinstance(spec.block_sizes, BlockSizes) and spec.block_sizes.interpret


def is_available() -> bool:
    """Whether this JAX has the Mosaic GPU features that the kernels need."""
    return hasattr(lax, "log2")  # from JAX 0.11.2 on


def _unsupported_machine(request: Request) -> str | None:
    if not is_available():
        return f"JAX {jax.__version__} (it needs 0.11.2)"
    # The interpreter needs no GPU.
    if _interprets(request.spec):
        return None
    if (request.platform or jax.default_backend()) not in ("cuda", "gpu"):
        return "this platform (it needs a Hopper GPU, or BlockSizes(interpret=True))"
    if not is_hopper(kind := device_kind()):
        return f"{kind or 'an unknown GPU'} (it needs a Hopper GPU)"
    return None


def _unsupported_numerics(n: Numerics) -> str | None:
    in_long_steps = rounds_products(n)
    rounded = _ROUNDED + (_PRODUCTS if in_long_steps else ())
    for point in POINTS:
        wanted = _BFLOAT16 if point in rounded else _FLOAT32
        if (found := n.rounding_at(point, jnp.dtype(jnp.bfloat16))) != wanted:
            return f"{point}={found} (it takes {wanted})"
    if n.delta not in (taken := ("do_o", *SUMS_ROWS)):
        return f"delta={n.delta} (it takes {_listed(taken)})"
    if n.divisor != "rounded":
        return f"divisor={n.divisor} (it takes rounded)"
    if n.mean_key != "kept":
        return f"mean_key={n.mean_key} (it takes kept)"
    if n.exponent not in (None, *_EXPONENTS):
        return f"exponent={n.exponent} (it takes {_listed(_EXPONENTS)})"
    if n.divided_in_dv != "probs":
        return f"divided_in_dv={n.divided_in_dv} (it takes probs)"
    if not in_long_steps and n.kv_block not in (None, *KEYS_PER_STEP):
        return f"kv_block={n.kv_block} (it takes {_listed(KEYS_PER_STEP)} or None)"
    return None


def _listed(choices: tuple[object, ...]) -> str:
    return " or ".join(map(str, choices))


def keys_per_step(request: Request) -> int:
    """Keys of one online-softmax step: `kv_block`, or the forward tile's `step` if it is None."""
    given = {
        "has_segments": request.has_segments or request.has_lengths,
        "has_sinks": request.has_sinks,
    }
    values = request.value_size
    step = block_sizes(request.q_shape, request.spec, value_size=values, **given).forward.step
    kv_block = request.spec.numerics.kv_block
    return kv_block if isinstance(kv_block, int) else step


def exponent_of(request: Request) -> str:
    """How exponents are formed: `scale_first`, one multiply-add, unless the call names another."""
    return request.spec.numerics.exponent or "scale_first"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    extras: Extras,
    spec: Spec,
) -> tuple[Array, ...]:
    """Returns O = softmax(q kᵀ · scale) v [B, T, N, V] and a float32 lse [B, T, N].

    `spec.numerics` names the roundings. With `spec.max_logit` the result also has the largest
    scores [B, T, N].
    """
    return _attend((q, k, v), extras, spec)


def packed_attention(
    qkv: Float[Array, "B T 3 N H"], extras: Extras, spec: Spec
) -> tuple[Array, ...]:
    """`attention` of q, k and v in one array. It is read, and its gradient written, in place."""
    return _attend((qkv,), extras, spec)


def _attend(arrays: tuple[Array, ...], extras: Extras, spec: Spec) -> tuple[Array, ...]:
    # Importing Mosaic GPU takes a quarter of a second, so only callers of these kernels pay for it.
    from pallas_kernels.gpu.hopper.vjp import attend

    hides = ("query_lengths", "key_lengths", "query_segments", "key_segments")
    read = (*hides, "sinks", "backward_sums")
    return attend(arrays, Extras(**{name: getattr(extras, name) for name in read}), spec)
