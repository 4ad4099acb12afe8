"""Attention functions of any library, as one call: a problem in, o, dq, dk, dv (and lse) out."""

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lowprec_attn import attention
from lowprec_attn.attention.reference import Masking
from lowprec_attn.check.calls import (
    TargetError,
    jax_call,
    jax_script,
    torch_call,
    torch_script,
)
from lowprec_attn.check.measure import Found
from lowprec_attn.check.problems import HEAD_SIZE, TOKENS, Problem
from lowprec_attn.errors import printable
from lowprec_attn.numerics import get_preset

Alignment = Literal["start", "end"]
# What a kernel may be able to do; see `Problem.needs`.
ABILITIES = ("causal", "full", "groups", "lengths", "mask", "scale")
_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
}
KNOWN = (
    "jax.nn[:xla|cudnn], torch.sdpa[:flash|cudnn|math|efficient], "
    f"lowprec_attn[:{'|'.join(attention.IMPLEMENTATIONS)}], tokamax[:IMPLEMENTATION], splash, "
    "MODULE:FUNCTION"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a function of your own is called.

    Attributes:
      framework: `jax` or `torch`; None: that which its module imports, if it is one.
      layout: of q, k, v, O: `BTNH` or `BNTH`.
      causal: whether it is causal; None where `keywords` has `causal`.
      keywords: what the function calls `causal`, `scale` and `mask` (boolean [B, 1, T, S], True
        where a key is seen), of those that it takes.
      scale: factor of q kᵀ that it has by itself; None: 1/√H.
      groups: whether it takes fewer key heads than query heads.
      alignment: which row and key the causal diagonal aligns where the lengths differ, the first
        (`start`) or the last (`end`); None: whichever its O shows.
      numerics: of this library's implementations.
      tokens, head_size: of the core problems; None: what suits the target.
    """

    framework: str | None = None
    layout: str = "BTNH"
    causal: bool | None = None
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: float | None = None
    groups: bool = True
    alignment: Alignment | None = None
    numerics: str = "flash"
    tokens: int | None = None
    head_size: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A function, and what it can do.

    Attributes:
      name: as the user gave it.
      call: takes a problem; raises whatever the library raises where it cannot serve.
      can: of `ABILITIES`.
      alignment: see `Options`.
      scale: that it has by itself; None: 1/√H.
      script: lines of Python that form `o, dq, dk, dv` from arrays `a`, without this package; takes
        the problem.
      notes: what was concluded about it, in sentences.
      tokens, head_size: of the core problems.
    """

    name: str
    call: Callable[[Problem], Found]
    can: frozenset[str]
    alignment: Alignment | None = "start"
    scale: float | None = None
    script: Callable[[Problem], list[str]]
    notes: tuple[str, ...] = ()
    tokens: int = TOKENS
    head_size: int = HEAD_SIZE

    @property
    def causal(self) -> bool:
        """Whether the core problems are causal, as they are where it can be."""
        return "causal" in self.can


def find(name: str, options: Options | None = None) -> Target:
    """The target of this name.

    Raises:
      TargetError: there is none, its library is absent, or an option is missing.
    """
    options = options or Options()
    library, _, choice = name.partition(":")
    makers = {
        "jax.nn": _jax_nn,
        "torch.sdpa": _torch_sdpa,
        "lowprec_attn": _own,
        "tokamax": _tokamax,
        "splash": _splash,
    }
    target = makers[library](choice, options) if library in makers else _named(name, options)
    can = set(target.can)
    if options.causal is not None:
        can -= {"full" if options.causal else "causal"}
    if not options.groups:
        can -= {"groups"}
    return dataclasses.replace(
        target,
        name=name,
        can=frozenset(can),
        tokens=options.tokens or target.tokens,
        head_size=options.head_size or target.head_size,
    )


def of_function(function: Callable[..., Any], options: Options) -> Target:
    """A function of q, k and v that returns O, or O and lse; see `Options`.

    Raises:
      TargetError: an option is missing or wrong.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "fn")
    framework, notes = _framework(function, options)
    if options.causal is None and "causal" not in options.keywords:
        raise TargetError(
            f"is {name} causal? say --causal or --no-causal, or --keyword causal=NAME if it takes "
            "that as an argument"
        )
    unknown = set(options.keywords) - {"causal", "scale", "mask"}
    if unknown:
        raise TargetError(
            f"--keyword {min(unknown)}=… is none of causal, scale, mask; leave it out"
        )
    can = {"lengths", "groups"} | ({"causal", "full"} & _causality(options))
    can |= {name for name in ("scale", "mask") if name in options.keywords}

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        values = {"causal": problem.masking.is_causal, "scale": problem.scale, "mask": mask}
        given = {
            k: values[n] for n, k in options.keywords.items() if n != "mask" or mask is not None
        }
        return function(q, k, v, **given)

    def call_line(problem: Problem) -> str:
        values = {
            "causal": str(problem.masking.is_causal),
            "scale": repr(problem.scale),
            "mask": "mask",
        }
        keywords = options.keywords.items()
        has_mask = problem.masking.mask is not None
        words = [f"{k}={values[n]}" for n, k in keywords if n != "mask" or has_mask]
        return f"attention(q, k, v{''.join(f', {word}' for word in words)})"

    runner, script = (jax_call, jax_script) if framework == "jax" else (torch_call, torch_script)
    return Target(
        name=f"{module}:{name}",
        call=runner(attend, options.layout),
        can=frozenset(can),
        alignment=options.alignment,
        scale=None if "scale" in options.keywords else options.scale,
        script=lambda problem: script(
            [f"from {module} import {name.partition('.')[0]}"],
            call_line(problem).replace("attention(", f"{name}(", 1),
            problem,
            options.layout,
        ),
        notes=notes,
    )


def _causality(options: Options) -> set[str]:
    if options.causal is None:
        return {"causal", "full"}
    return {"causal"} if options.causal else {"full"}


def _framework(function: Callable[..., Any], options: Options) -> tuple[str, tuple[str, ...]]:
    if options.framework is not None:
        if options.framework not in ("jax", "torch"):
            raise TargetError(f"--framework must be jax or torch, got {options.framework!r}")
        return options.framework, ()
    unwrapped = getattr(function, "__wrapped__", function)
    names = getattr(unwrapped, "__globals__", None)
    if names is None:
        names = vars(sys.modules.get(getattr(function, "__module__", ""), object))
    roots = {
        (
            getattr(value, "__name__", "")
            if isinstance(value, type(sys))
            else str(getattr(value, "__module__", None))
        ).partition(".")[0]
        for value in list(names.values())
    }
    found = roots & {"jax", "torch"}
    if len(found) != 1:
        which = "both jax and torch" if found else "neither jax nor torch by name"
        raise TargetError(
            f"the module of this function imports {which}; say --framework jax or --framework torch"
        )
    (framework,) = found
    return framework, (f"called with {framework} arrays, since its module imports {framework}",)


def _named(name: str, options: Options) -> Target:
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise TargetError(f"unknown target {name!r}; targets are {KNOWN}")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        place = f" and {os.getcwd()} has no such module" if missing == module_name else ""
        raise TargetError(
            f"cannot import {module_name}: no module named {missing}{place}; install it, or run "
            "where it is"
        ) from error
    except Exception as error:  # whatever the user's module raises
        raise TargetError(f"cannot import {module_name}: {first_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise TargetError(f"{module_name} has no {attribute!r}; say MODULE:FUNCTION") from error
    if not callable(found):
        raise TargetError(f"{name} is no function but {type(found).__name__}; say MODULE:FUNCTION")
    return of_function(found, options)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return printable(f"{type(error).__name__}: {lines[0]}"[:200])


def _jax_nn(choice: Any, _: Options) -> Target:
    if choice not in ("", "xla", "cudnn"):
        raise TargetError(f"unknown target 'jax.nn:{choice}'; say jax.nn:xla or jax.nn:cudnn")

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=problem.scale,
            is_causal=problem.masking.is_causal,
            implementation=choice or None,
        )

    words = f", implementation={choice!r}" if choice else ""
    return _library("jax.nn.dot_product_attention", "import jax.nn", attend, words)


def _own(choice: str, options: Options) -> Target:
    try:
        numerics = get_preset(options.numerics)
    except ValueError as error:
        raise TargetError(f"--numerics: {error}") from error
    if choice and choice not in attention.IMPLEMENTATIONS:
        raise TargetError(
            f"unknown target 'lowprec_attn:{choice}'; implementations are "
            f"{', '.join(attention.IMPLEMENTATIONS)}"
        )

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        own = numerics.with_format("float16") if q.dtype == jnp.float16 else numerics
        return attention.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=problem.scale,
            is_causal=problem.masking.is_causal,
            numerics=own,
            implementation=choice or None,
            return_residual=True,
        )

    words = f", numerics={options.numerics!r}" + (f", implementation={choice!r}" if choice else "")
    name = "attention.dot_product_attention"
    return _library(name, "from lowprec_attn import attention", attend, words)


def _tokamax(choice: str, _: Options) -> Target:
    package = _import("tokamax", "pip install tokamax")

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return package.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=problem.scale,
            is_causal=problem.masking.is_causal,
            implementation=choice or None,
        )

    words = f", implementation={choice!r}" if choice else ""
    return _library("tokamax.dot_product_attention", "import tokamax", attend, words)


def _library(name: str, imported: str, attend: Callable[..., Any], words: str) -> Target:
    """A function with the arguments of `jax.nn.dot_product_attention`."""

    def script(problem: Problem) -> list[str]:
        mask = ", mask=mask" if problem.masking.mask is not None else ""
        rest = f"scale={problem.scale!r}, is_causal={problem.masking.is_causal}"
        return jax_script([imported], f"{name}(q, k, v{mask}, {rest}{words})", problem, "BTNH")

    return Target(name=name, call=jax_call(attend), can=frozenset(ABILITIES), script=script)


def _splash(choice: str, _: Options) -> Target:
    """JAX's splash attention: on a TPU; elsewhere Pallas interprets it."""
    if choice:
        raise TargetError(f"unknown target 'splash:{choice}'; say splash")
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    interpret = jax.default_backend() != "tpu"

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        del mask
        shape = (q.shape[1], k.shape[1])
        kind = splash.CausalMask(shape) if problem.masking.is_causal else splash.FullMask(shape)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([kind] * q.shape[2]), interpret=interpret
        )
        scaled = (q.astype(jnp.float32) * problem.scale).astype(q.dtype)  # it takes no scale
        heads_first = (x.swapaxes(1, 2) for x in (scaled, k, v))
        return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)

    call = "jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (q * scale, k, v))).swapaxes(1, 2)"

    def script(problem: Problem) -> list[str]:
        kind = "CausalMask" if problem.masking.is_causal else "FullMask"
        shape = (problem.q.shape[1], problem.k.shape[1])
        masks = f"splash.MultiHeadMask([splash.{kind}({shape})] * {problem.q.shape[2]})"
        head = [
            "from jax.experimental.pallas.ops.tpu import splash_attention as splash",
            f"kernel = splash.make_splash_mha_single_device({masks}, interpret={interpret})",
        ]
        return jax_script(head, call.replace("scale", repr(problem.scale)), problem, "BTNH")

    notes = ["its scale is multiplied into q by the caller"]
    notes += ["interpreted by Pallas: this is no TPU"] if interpret else []
    return Target(
        name="splash",
        call=jax_call(attend),
        can=frozenset({"causal", "full", "lengths"}),
        script=script,
        notes=tuple(notes),
        tokens=256,
        head_size=128,
    )


def _torch_sdpa(choice: str, _: Options) -> Target:
    torch = _import(
        "torch", "pip install torch (of the CPU: --index-url https://download.pytorch.org/whl/cpu)"
    )
    if choice and choice not in _BACKENDS:
        raise TargetError(
            f"unknown target 'torch.sdpa:{choice}'; say torch.sdpa or one of "
            f"{', '.join(f'torch.sdpa:{name}' for name in _BACKENDS)}"
        )
    backend = _BACKENDS.get(choice)

    @contextlib.contextmanager
    def chosen() -> Iterator[None]:
        if backend is None:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            yield

    def attend(problem: Problem, q: Any, k: Any, v: Any, mask: Any) -> Any:
        if mask is not None and problem.masking.is_causal:  # it takes one of the two
            mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
        with chosen():
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=problem.masking.is_causal and mask is None,
                scale=problem.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    def script(problem: Problem) -> list[str]:
        is_causal = problem.masking.is_causal
        has_mask = problem.masking.mask is not None
        mask = ", attn_mask=mask" + (".tril()" if is_causal else "") if has_mask else ""
        gqa = ", enable_gqa=True" if problem.q.shape[2] != problem.k.shape[2] else ""
        head = ["from torch.nn.attention import SDPBackend, sdpa_kernel"] if backend else []
        within = f"with sdpa_kernel(SDPBackend.{backend}): " if backend else ""
        call = (
            f"torch.nn.functional.scaled_dot_product_attention(q, k, v{mask}, "
            f"is_causal={is_causal and not has_mask}, scale={problem.scale!r}{gqa})"
        )
        return torch_script(head, call, problem, "BNTH", within)

    return Target(
        name="torch.sdpa",
        call=torch_call(attend, "BNTH"),
        can=frozenset(ABILITIES),
        script=script,
    )


def _import(module: str, command: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise TargetError(f"{module} is not installed: {command}") from error


def aligned(problem: Problem, alignment: Alignment) -> Problem:
    """The problem with the causal diagonal at the first row and key, or at the last."""
    rows, keys = problem.q.shape[1], problem.k.shape[1]
    offset = keys - rows if alignment == "end" and problem.masking.is_causal else 0
    masking: Masking = dataclasses.replace(problem.masking, query_offset=offset)
    return problem.replace(masking=masking)
