"""Makes a target of the user's own function, given as an object or as MODULE:FUNCTION."""

import dataclasses
import functools
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lowprec_attn.attention.named import function_named
from lowprec_attn.check.calls import Function, TargetError
from lowprec_attn.check.problems import HEAD_SIZE, TOKENS
from lowprec_attn.check.target import Options, Setting, Target
from lowprec_attn.errors import UserError, first_line, printable

# The settings that a function may take by a keyword.
_TAKEN = ("causal", "scale", "mask", "window", "soft_cap", "sinks", "bias")
# Their names in torch.nn.functional.scaled_dot_product_attention.
_IN_TORCH = {"causal": "is_causal", "mask": "attn_mask", "scale": "scale"}


def of_function(
    function: Callable[..., Any], options: Options, place: tuple[str, str] | None = None
) -> Target:
    """Makes a target of a function of q, k and v that returns O, or O and lse; see `Options`.

    Args:
      function: the function.
      options: how it is called.
      place: the module from which a script imports it, and its name there; None: what the function
        says of itself. The target has no script if the function is not found there, as a partial,
        a method of an object or a closure is not.

    Raises:
      TargetError: an option is missing or wrong.
    """
    whole = _whole(function)
    own = getattr(whole, "__module__", ""), getattr(whole, "__qualname__", type(whole).__name__)
    module, name = place or own
    options, like_torch = _as_in_torch(function, options)
    framework, notes = _framework(function, options)
    notes = (*notes, *like_torch)
    keywords = _keywords(name, options)
    setting = Setting.of(options)
    if "scale" not in keywords:
        setting = dataclasses.replace(setting, scale=options.scale)
    called = Function(
        function=function,
        name=name,
        head=(*_found_again(module), f"from {module} import {name.partition('.')[0]}"),
        framework=framework,
        layout=options.layout or "BTNH",
        keywords=keywords,
        options={"enable_gqa": True} if like_torch and options.groups else {},
        backward=options.backward,
    )
    return Target(
        name=f"{module}:{name}",
        call=called.caller(),
        script=called.script if place or _is_found(function, module, name) else None,
        can=frozenset(
            {"lengths", *({"groups"} if options.groups else ())}
            | _causality(options)
            | set(keywords) - {"causal"}
            | setting.names
        ),
        setting=setting,
        lse_gradient=options.lse_gradient and options.backward,
        backward=options.backward,
        alignment=options.alignment,
        notes=notes,
        seen=called.notes,
        tokens=options.tokens or TOKENS,
        head_size=options.head_size or HEAD_SIZE,
    )


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that a partial holds."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_found(function: Callable[..., Any], module: str, name: str) -> bool:
    """Whether a script finds the function by its name in its module.

    A script cannot import a module that was run as a program.
    """
    if module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is function


def _found_again(module: str) -> tuple[str, ...]:
    """Returns lines with which a script of any folder finds a module that is not installed."""
    root = sys.modules.get(module.partition(".")[0])
    place = next(iter(getattr(root, "__path__", ())), getattr(root, "__file__", None))
    folder = None if place is None else str(Path(place).resolve().parent)
    if folder is None or folder in sysconfig.get_paths().values():
        return ()
    return "import sys", f"sys.path.append({folder!r})"


def _as_in_torch(function: Callable[..., Any], options: Options) -> tuple[Options, tuple[str, ...]]:
    """Fills in the options of a function with scaled_dot_product_attention's parameters.

    Returns the options, and a note that says so; the options unchanged and no note for any other
    function.
    """
    try:
        names = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # builtins have none
        return options, ()
    if not {*_IN_TORCH.values(), "enable_gqa"} <= names or options.framework == "jax":
        return options, ()
    keywords = dict(_IN_TORCH)
    if options.causal is not None:
        del keywords["causal"]
    changed = dataclasses.replace(
        options,
        framework="torch",
        layout=options.layout or "BNTH",
        keywords={**keywords, **(options.keywords or {})},
    )
    return changed, ("called as scaled_dot_product_attention is, whose parameters it has",)


def _keywords(name: str, options: Options) -> dict[str, str]:
    keywords = dict(options.keywords or {})
    for array in ("sinks", "bias"):
        if getattr(options, array):
            keywords.setdefault(array, array)
    if options.causal is None and "causal" not in keywords:
        raise TargetError(
            f"is {name} causal? say --causal or --no-causal, or --keyword causal=NAME if it takes "
            "that as an argument"
        )
    unknown = set(keywords) - set(_TAKEN)
    if unknown:
        raise TargetError(
            f"--keyword {min(unknown)}=… is none of {', '.join(_TAKEN)}; leave it out"
        )
    return keywords


def _causality(options: Options) -> set[str]:
    if options.causal is None:
        return {"causal", "full"}
    return {"causal"} if options.causal else {"full"}


def _framework(function: Callable[..., Any], options: Options) -> tuple[str, tuple[str, ...]]:
    if options.framework is not None:
        if options.framework not in ("jax", "torch"):
            raise TargetError(f"--framework must be jax or torch, got {options.framework!r}")
        return options.framework, ()
    whole = _whole(function)
    unwrapped = getattr(whole, "__wrapped__", whole)
    names = getattr(unwrapped, "__globals__", None)
    if names is None:
        names = vars(sys.modules.get(getattr(whole, "__module__", ""), object))
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


def named(name: str, options: Options) -> Target:
    """Makes a target of the function named MODULE:FUNCTION.

    Raises:
      TargetError: the function cannot be imported, or `of_function` raises it.
    """
    try:
        found = function_named(name)
    except UserError as error:
        raise TargetError(str(error)) from error
    module, _, attribute = name.partition(":")
    return of_function(found, options, (module, attribute))


def refusal_of(error: BaseException, said: Iterable[warnings.WarningMessage]) -> str:
    """Returns why a function refused a problem: its error, then the reasons that PyTorch warns of.

    Args:
      error: the error.
      said: the warnings of the call. PyTorch's attention raises "No available kernel", and says in
        warnings what every kernel lacks.
    """
    if not isinstance(error, RuntimeError) or "No available kernel" not in str(error):
        return first_line(error)
    lines = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in said]
    reasons = [
        line for line in lines if not line.endswith(("not used because:", "runtime disabled."))
    ]
    return " ".join([first_line(error), *map(printable, dict.fromkeys(reasons))])[:400]
