"""Makes targets of library functions: JAX's, PyTorch's, FlashAttention's, tokamax's and ours.

Some functions here adapt a library's function to a problem. Scripts contain their source.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from lowprec_attn import attention
from lowprec_attn.check.calls import Function, TargetError
from lowprec_attn.check.target import Options, Target
from lowprec_attn.numerics import get_preset

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
}
_INSTALL_TORCH = (
    "pip install torch (for CPUs alone, add --index-url https://download.pytorch.org/whl/cpu)"
)
_OF_JAX_NN = {
    "causal": "is_causal",
    "scale": "scale",
    "mask": "mask",
    "bias": "bias",
    "window": "local_window_size",
}
_SAME = {name: name for name in ("scale", "mask", "bias", "window", "soft_cap")}


def jax_nn(choice: str, _: Options) -> Target:
    """Targets `jax.nn.dot_product_attention`, whose lse has no gradient because jax.nn stops it."""
    _require("jax.nn", choice, ("xla", "cudnn"), "jax.nn:xla or jax.nn:cudnn")
    return _target(
        jax.nn.dot_product_attention, "jax.nn", _OF_JAX_NN, implementation=choice or None
    )


def own(choice: str, options: Options) -> Target:
    """Targets this library's implementations."""
    try:
        get_preset(options.numerics)
    except ValueError as error:
        raise TargetError(f"--numerics: {error}") from error
    if choice and choice not in attention.IMPLEMENTATIONS:
        raise TargetError(
            f"unknown target 'lowprec_attn:{choice}'; implementations are "
            f"{', '.join(attention.IMPLEMENTATIONS)}"
        )
    keywords = {**_OF_JAX_NN, "soft_cap": "logits_soft_cap", "sinks": "sinks"}
    return _target(
        lowprec_attention, None, keywords, numerics=options.numerics, implementation=choice or None
    )


def lowprec_attention(q: Any, k: Any, v: Any, *, numerics: Any, **options: Any) -> Any:
    """Returns O and lse, computed with a preset in the format of the arrays."""
    from lowprec_attn import attention
    from lowprec_attn.numerics import get_preset

    chosen = get_preset(numerics)
    chosen = chosen.with_format("float16") if q.dtype == "float16" else chosen
    return attention.dot_product_attention(
        q, k, v, numerics=chosen, return_residual=True, **options
    )


def tokamax(choice: str, options: Options) -> Target:
    """Targets `tokamax.dot_product_attention`.

    tokamax adds the bias before the soft cap, and the reference after it, so no problem has both.
    """
    order = "tokamax adds the bias before the soft cap"
    if options.bias and options.soft_cap is not None:
        raise TargetError(f"{order}, unlike the reference; leave out --bias or --soft-cap")
    package = _imported("tokamax", "pip install tokamax")
    # Its first call would parse absl flags from our command line, whose options absl does not know.
    flags = _imported("absl.flags", "pip install tokamax").FLAGS
    if not flags.is_parsed():
        flags(["lowprec-attn"])
    keywords = {**_OF_JAX_NN, "soft_cap": "logits_soft_cap"}
    absent = "bias" if options.soft_cap is not None else "soft_cap" if options.bias else None
    return _target(
        package.dot_product_attention,
        "tokamax",
        {name: word for name, word in keywords.items() if name != absent},
        notes=[f"{order}, so no problem has both"] if absent else [],
        implementation=choice or None,
    )


def splash(choice: str, _: Options) -> Target:
    """Targets JAX's splash attention, which runs on a TPU; elsewhere Pallas interprets it."""
    _require("splash", choice, (), "splash")
    notes = ["its scale is multiplied into q by the caller"]
    if jax.default_backend() != "tpu":
        notes.append("interpreted by Pallas: this is no TPU")
    keywords = {"causal": "is_causal", "scale": "scale", "window": "window", "soft_cap": "soft_cap"}
    target = _target(splash_attention, None, keywords, notes=notes)
    can = target.can - {"groups", "scale"}
    return dataclasses.replace(target, can=can, tokens=256, head_size=128)


def splash_attention(
    q: Any, k: Any, v: Any, *, is_causal: Any, scale: Any, window: Any = None, soft_cap: Any = None
) -> Any:
    """Returns O; the kernel takes no scale, so q is scaled here, and its mask is built in."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (q.shape[1], k.shape[1])
    mask: Any = (splash.CausalMask if is_causal else splash.FullMask)(shape)
    if window is not None:
        mask = mask & splash.LocalMask(shape, window, 0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * q.shape[2]),
        attn_logits_soft_cap=soft_cap,
        interpret=jax.default_backend() != "tpu",
    )
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (scaled, k, v))).swapaxes(1, 2)


def sdpa(choice: str, _: Options) -> Target:
    """Targets `torch.nn.functional.scaled_dot_product_attention`."""
    _imported("torch", _INSTALL_TORCH)
    names = ", ".join(f"torch.sdpa:{name}" for name in BACKENDS)
    _require("torch.sdpa", choice, BACKENDS, f"torch.sdpa or one of {names}")
    keywords = {"causal": "is_causal", "scale": "scale", "mask": "mask", "bias": "bias"}
    return _target(torch_attention, None, keywords, "torch", backend=BACKENDS.get(choice))


def torch_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: Any,
    scale: Any,
    mask: Any = None,
    bias: Any = None,
    backend: Any = None,
) -> Any:
    """Returns O; causality, mask and bias become one mask, since PyTorch takes only one of them."""
    import contextlib

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if is_causal and (mask is not None or bias is not None):
        like = bias if mask is None else mask
        tri = torch.ones(like.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = tri if mask is None else mask & tri
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    chosen = sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()
    with chosen:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def flex(choice: str, _: Options) -> Target:
    """Targets `torch.nn.attention.flex_attention`; on a CPU its backward pass runs only unfused."""
    torch = _imported("torch", _INSTALL_TORCH)
    _require("torch.flex", choice, (), "torch.flex")
    notes = () if torch.cuda.is_available() else ("unfused: this is no GPU",)
    return _target(flex_attention, None, {"causal": "is_causal", **_SAME}, "torch", notes=notes)


def flex_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    is_causal: Any,
    scale: Any,
    window: Any = None,
    soft_cap: Any = None,
    mask: Any = None,
    bias: Any = None,
) -> Any:
    """Returns O and lse; compiled on a GPU.

    Causality, window and mask become the block mask; soft cap and bias become the `score_mod`.
    """
    import torch
    from torch.nn.attention import flex_attention as module

    def score_mod(s: Any, b: Any, n: Any, t: Any, j: Any) -> Any:
        s = s if soft_cap is None else soft_cap * torch.tanh(s / soft_cap)
        return s if bias is None else s + bias[0, n, t, j]

    def mask_mod(b: Any, n: Any, t: Any, j: Any) -> Any:
        seen = t >= j if is_causal else j >= 0
        if window is not None:
            seen = seen & (t - j <= window[0]) & (j - t <= window[1])
        return seen if mask is None else seen & mask[0, 0, t, j]

    attend = module.flex_attention
    if torch.cuda.is_available():
        # Each problem needs its own program. After eight of them PyTorch would run unfused.
        patch = torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000)
        attend = patch(torch.compile(attend, dynamic=False, fullgraph=True))
    lengths = q.shape[2], k.shape[2]
    # PyTorch 2.9 and later have AuxRequest, and warn that the older `return_lse` will be dropped.
    has_aux = hasattr(module, "AuxRequest")
    o, lse = attend(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=module.create_block_mask(mask_mod, None, None, *lengths, device=q.device.type),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        **({"return_aux": module.AuxRequest(lse=True)} if has_aux else {"return_lse": True}),
    )
    return o, (lse.lse if has_aux else lse)


def flash_attn(_: str, __: Options) -> Target:
    """Targets `flash_attn_func` of FlashAttention-2."""
    return _flash("flash_attn", "pip install flash-attn --no-build-isolation")


def flash_attn_interface(_: str, __: Options) -> Target:
    """Targets `flash_attn_func` of FlashAttention-3."""
    return _flash("flash_attn_interface", "see hopper/ of github.com/Dao-AILab/flash-attention")


def _flash(module: str, command: str) -> Target:
    """Both align causal diagonal and window with the last row and key; lse has no gradient."""
    keywords = {
        "causal": "causal",
        "scale": "softmax_scale",
        "window": "window_size",
        "soft_cap": "softcap",
    }
    function = _imported(module, command).flash_attn_func
    target = _target(function, module, keywords, "torch", layout="BTNH")
    return dataclasses.replace(target, alignment="end")


def _target(
    function: Callable[..., Any],
    module: str | None,
    keywords: Mapping[str, str],
    framework: str = "jax",
    notes: Iterable[str] = (),
    layout: str | None = None,
    **options: Any,
) -> Target:
    """Makes a target of a function of `module`, or of this file if `module` is None.

    A script imports the module, or contains the source of the function of this file. The layout is
    the framework's usual one unless it is given.
    """
    name = function.__name__ if module is None else f"{module}.{function.__name__}"
    head = [f"import {module}"]
    if module is None:
        head = ["from typing import Any", *inspect.getsource(function).splitlines()]
    called = Function(
        function=function,
        name=name,
        head=tuple(head),
        framework=framework,
        layout=layout or ("BTNH" if framework == "jax" else "BNTH"),
        keywords=keywords,
        options={n: value for n, value in options.items() if value is not None},
    )
    return Target(
        name=name,
        call=called.caller(),
        script=called.script,
        can=frozenset({"causal", "full", "groups", "lengths", *keywords}),
        notes=tuple(notes),
    )


def _require(library: str, choice: str, choices: Iterable[str], say: str) -> None:
    if choice and choice not in choices:
        raise TargetError(f"unknown target '{library}:{choice}'; say {say}")


def _imported(module: str, command: str) -> Any:
    """Imports and returns a module, which `command` installs.

    Raises:
      TargetError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise TargetError(f"{module} is not installed: {command}") from error
