"""Attention functions of JAX's libraries, and of this one, as targets."""

from typing import Any

import jax
import jax.numpy as jnp

from lowprec_attn import attention
from lowprec_attn.check.calls import Attend, Inputs, TargetError, jax_call
from lowprec_attn.check.libraries import imported
from lowprec_attn.check.problems import Problem
from lowprec_attn.check.scripts import jax_script
from lowprec_attn.check.target import ABILITIES, Options, Target
from lowprec_attn.numerics import get_preset


def jax_nn(choice: Any, _: Options) -> Target:
    """`jax.nn.dot_product_attention`."""
    if choice not in ("", "xla", "cudnn"):
        raise TargetError(f"unknown target 'jax.nn:{choice}'; say jax.nn:xla or jax.nn:cudnn")

    def attend(problem: Problem, x: Inputs) -> Any:
        return jax.nn.dot_product_attention(
            *x[:3],
            bias=x.bias,
            mask=x.mask,
            scale=problem.scale,
            is_causal=problem.masking.is_causal,
            local_window_size=problem.masking.window,
            implementation=choice or None,
        )

    words = f", implementation={choice!r}" if choice else ""
    # Its lse has no gradient: jax.nn stops it.
    can = {*ABILITIES} - {"soft_cap", "sinks"}
    return _like_jax_nn("jax.nn.dot_product_attention", "import jax.nn", attend, words, can)


def own(choice: str, options: Options) -> Target:
    """This library's implementations."""
    try:
        numerics = get_preset(options.numerics)
    except ValueError as error:
        raise TargetError(f"--numerics: {error}") from error
    if choice and choice not in attention.IMPLEMENTATIONS:
        raise TargetError(
            f"unknown target 'lowprec_attn:{choice}'; implementations are "
            f"{', '.join(attention.IMPLEMENTATIONS)}"
        )

    def attend(problem: Problem, x: Inputs) -> Any:
        low = numerics.with_format("float16") if x.q.dtype == jnp.float16 else numerics
        return attention.dot_product_attention(
            *x[:3],
            **_arguments(problem, x),
            sinks=x.sinks,
            numerics=low,
            implementation=choice or None,
            return_residual=True,
        )

    words = f", numerics={options.numerics!r}" + (f", implementation={choice!r}" if choice else "")
    name = "attention.dot_product_attention"
    can = {*ABILITIES, "lse"}
    return _like_jax_nn(name, "from lowprec_attn import attention", attend, words, can)


def tokamax(choice: str, _: Options) -> Target:
    """`tokamax.dot_product_attention`."""
    package = imported("tokamax", "pip install tokamax")
    # Its first call reads flags of absl from the command line, where it knows none of ours.
    flags = imported("absl.flags", "pip install tokamax").FLAGS
    if not flags.is_parsed():
        flags(["lowprec-attn"])

    def attend(problem: Problem, x: Inputs) -> Any:
        return package.dot_product_attention(
            *x[:3], **_arguments(problem, x), implementation=choice or None
        )

    words = f", implementation={choice!r}" if choice else ""
    can = {*ABILITIES} - {"sinks"}
    return _like_jax_nn("tokamax.dot_product_attention", "import tokamax", attend, words, can)


def _arguments(problem: Problem, x: Inputs) -> dict[str, Any]:
    """Of a function like that of `jax.nn`, with a soft cap."""
    return {
        "bias": x.bias,
        "mask": x.mask,
        "scale": problem.scale,
        "is_causal": problem.masking.is_causal,
        "local_window_size": problem.masking.window,
        "logits_soft_cap": problem.soft_cap,
    }


def _like_jax_nn(name: str, line: str, attend: Attend, words: str, can: set[str]) -> Target:
    """A function with the arguments of `jax.nn.dot_product_attention`."""

    def script(problem: Problem) -> list[str]:
        masking = problem.masking
        given = [f", {n}={n}" for n in ("mask", "bias", "sinks") if getattr(masking, n) is not None]
        given += [f", scale={problem.scale!r}, is_causal={masking.is_causal}"]
        given += [f", local_window_size={masking.window}"] * (masking.window is not None)
        given += [f", logits_soft_cap={problem.soft_cap}"] * (problem.soft_cap is not None)
        given += [", return_residual=True"] * (problem.dlse is not None)
        return jax_script([line], f"{name}(q, k, v{''.join(given)}{words})", problem, "BTNH")

    return Target(name=name, call=jax_call(attend), can=frozenset(can), script=script)


def splash(choice: str, _: Options) -> Target:
    """JAX's splash attention: on a TPU; elsewhere Pallas interprets it."""
    if choice:
        raise TargetError(f"unknown target 'splash:{choice}'; say splash")
    from jax.experimental.pallas.ops.tpu import splash_attention

    interpret = jax.default_backend() != "tpu"

    def attend(problem: Problem, x: Inputs) -> Any:
        shape, window = (x.q.shape[1], x.k.shape[1]), problem.masking.window
        is_causal = problem.masking.is_causal
        mask: Any = (splash_attention.CausalMask if is_causal else splash_attention.FullMask)(shape)
        if window is not None:
            mask = mask & splash_attention.LocalMask(shape, window, 0)
        kernel = splash_attention.make_splash_mha_single_device(
            splash_attention.MultiHeadMask([mask] * x.q.shape[2]),
            attn_logits_soft_cap=problem.soft_cap,
            interpret=interpret,
        )
        scaled = (x.q.astype(jnp.float32) * problem.scale).astype(x.q.dtype)  # it takes no scale
        heads_first = (x.swapaxes(1, 2) for x in (scaled, x.k, x.v))
        return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)

    call = "jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q * scale, k, v))).swapaxes(1, 2)"

    def script(problem: Problem) -> list[str]:
        masks = f"splash.MultiHeadMask([{_splash_mask(problem)}] * {problem.q.shape[2]})"
        settings = f"attn_logits_soft_cap={problem.soft_cap}, interpret={interpret}"
        head = [
            "from jax.experimental.pallas.ops.tpu import splash_attention as splash",
            f"kernel = splash.make_splash_mha_single_device({masks}, {settings})",
        ]
        return jax_script(head, call.replace("scale", repr(problem.scale)), problem, "BTNH")

    notes = ["its scale is multiplied into q by the caller"]
    notes += ["interpreted by Pallas: this is no TPU"] if interpret else []
    return Target(
        name="splash",
        call=jax_call(attend),
        can=frozenset({"causal", "full", "lengths", "window", "soft_cap"}),
        script=script,
        notes=tuple(notes),
        tokens=256,
        head_size=128,
    )


def _splash_mask(problem: Problem) -> str:
    shape = (problem.q.shape[1], problem.k.shape[1])
    kind = "CausalMask" if problem.masking.is_causal else "FullMask"
    mask = f"splash.{kind}({shape})"
    if problem.masking.window is not None:
        mask += f" & splash.LocalMask({shape}, {problem.masking.window}, 0)"
    return mask
