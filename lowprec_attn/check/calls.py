"""Calls a function forward and backward, in JAX or PyTorch, and writes a script that does so.

The script contains the source of the helpers below, so it runs without this package.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lowprec_attn.check.measure import RESULTS, Found, as_rows
from lowprec_attn.check.problems import Problem
from lowprec_attn.errors import UserError

WITH_HEADS = ("q", "k", "v", "do")


class TargetError(UserError):
    """A target is not installed or cannot be called; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """An attention function, and how it is called.

    Attributes:
      function: takes q, k, v and keywords. Returns O, or a tuple that begins with O and lse; lse
        has the shape [B, T, N] or [B, N, T].
      name: the function's name in a script.
      head: lines of Python that define this name in a script.
      framework: `jax` or `torch`.
      layout: the axes of q, k, v and O: `BTNH` or `BNTH`.
      keywords: the function's own names for those of `causal`, `scale`, `mask` (boolean
        [#B, 1, T, S]), `window`, `soft_cap`, `bias` ([1, N, T, S]) and `sinks` ([N]) that it takes.
      options: further keywords that every call passes, and their values.
    """

    function: Callable[..., Any]
    name: str
    head: tuple[str, ...]
    framework: str = "jax"
    layout: str = "BTNH"
    keywords: Mapping[str, str]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.layout not in ("BTNH", "BNTH"):
            raise TargetError(f"--layout must be BTNH or BNTH, got {self.layout!r}")

    def caller(self) -> Callable[[Problem], Found]:
        """Returns a function that takes a problem and returns the results of this function."""

        @functools.cache  # problems that differ only in the values of their arrays share a program
        def compiled(values: tuple[tuple[str, Any], ...], *expected: Any) -> Callable[..., Any]:
            attend = functools.partial(self._attend, dict(values), *expected)
            if self.framework == "torch":
                return functools.partial(torch_gradients, attend)
            return jax.jit(functools.partial(jax_gradients, attend))

        def call(problem: Problem) -> Found:
            array = torch_array if self.framework == "torch" else jax_array
            x = {
                name: array(self._turned(name, x), self._dtype(name, problem))
                for name, x in arrays(problem).items()
            }
            expected = problem.q.shape[:3], problem.dlse is not None
            found = compiled(tuple(self._values(problem).items()), *expected)(x)
            without = [n.removeprefix("d") for n, x in found.items() if n != "lse" and x is None]
            if without:
                raise TargetError(
                    f"no gradient reaches {', '.join(without)}; the function must be differentiable"
                )
            there = {n: np.asarray(x) for n, x in found.items() if x is not None}
            return as_rows({n: self._turned(n, x.astype(np.float64)) for n, x in there.items()})

        return call

    def script(self, problem: Problem) -> list[str]:
        """Returns lines that compute `found`, results by name, from `a`, the arrays of a file."""
        array, gradients = {
            "jax": (jax_array, jax_gradients),
            "torch": (torch_array, torch_gradients),
        }[self.framework]
        there = arrays(problem)
        beside = [name for name in there if name in ("mask", "bias", "sinks")]
        given = {self.keywords[name]: name for name in beside if name in self.keywords}
        given |= {name: repr(value) for name, value in self._values(problem).items()}
        call = ", ".join(["q, k, v", *(f"{name}={value}" for name, value in given.items())])
        turn = {n: ".swapaxes(1, 2)" if self._is_turned(n) else "" for n in (*there, *RESULTS)}
        return [
            *self.head,
            f"def attend({', '.join(['q, k, v', *beside])}):",
            f"    return {self.name}({call})",
            *inspect.getsource(array).splitlines(),
            *inspect.getsource(gradients).splitlines(),
            "x = {",
            *(
                f"    {n!r}: {array.__name__}(a[{n!r}]{turn[n]}, {self._dtype(n, problem)!r}),"
                for n in there
            ),
            "}",
            f"found = {gradients.__name__}(attend, x)",
            *(f"found[{n!r}] = found[{n!r}]{turn[n]}" for n in RESULTS if turn[n]),
        ]

    def _attend(
        self, values: Mapping[str, Any], rows: tuple[int, ...], asks_lse: bool, q: Any, k: Any,
        v: Any, **beside: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns O and lse [B, T, N], or None for lse if the function returns none."""
        given = {self.keywords[name]: x for name, x in beside.items() if name in self.keywords}
        result = self.function(q, k, v, **given, **values)
        o, lse = result[:2] if isinstance(result, tuple) else (result, None)
        shape, (b, t, n) = tuple(getattr(lse, "shape", ())), rows
        if shape != rows:
            lse = lse.swapaxes(1, 2) if shape == (b, n, t) else None
        if asks_lse and lse is None:
            raise TargetError("it returned no lse of shape [B, T, N] or [B, N, T] beside O")
        if asks_lse and not getattr(lse, "requires_grad", True):
            raise TargetError("its lse has no gradient, so a loss of lse would train nothing")
        return o, lse

    def _values(self, problem: Problem) -> dict[str, Any]:
        """The keywords that are not arrays; a setting that the problem lacks is left out."""
        values = {
            "causal": problem.masking.is_causal,
            "scale": problem.scale,
            "window": problem.masking.window,
            "soft_cap": problem.soft_cap,
        }
        asked = {n: value for n, value in values.items() if value is not None}
        return {self.keywords[n]: x for n, x in asked.items() if n in self.keywords} | dict(
            self.options
        )

    def _is_turned(self, name: str) -> bool:
        return self.layout == "BNTH" and name in (*WITH_HEADS, *RESULTS)

    def _turned(self, name: str, x: np.ndarray) -> np.ndarray:
        return x.swapaxes(1, 2) if self._is_turned(name) else x

    def _dtype(self, name: str, problem: Problem) -> str | None:
        """The dtype to which an array is cast, or None if it keeps its own."""
        return None if name in ("mask", "dlse") else problem.q.dtype.name


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Returns q, k, v, do and, where the problem has them, mask, bias, sinks and dlse, by name.

    All are float32, except for the mask: boolean [B, 1, T, S].
    """
    masking = problem.masking
    beside = {"bias": masking.bias, "sinks": masking.sinks, "dlse": problem.dlse}
    given = dict(zip(WITH_HEADS, problem.arrays, strict=True)) | beside
    found = {name: x.astype(np.float32) for name, x in given.items() if x is not None}
    if masking.mask is not None:
        shape = (problem.q.shape[0], *masking.mask.shape[1:])
        found["mask"] = np.array(np.broadcast_to(masking.mask, shape))
    return found


def jax_array(x: Any, dtype: Any) -> Any:
    """Converts a NumPy array to a JAX array."""
    import jax
    import numpy as np

    # `jnp.asarray` would compile a cast or a copy for every shape.
    return jax.device_put(x if dtype is None else np.asarray(x, jax.numpy.dtype(dtype)))


def jax_gradients(attend: Any, x: Any) -> Any:
    """Returns O, lse and the gradients of q, k, v, bias and sinks, by name.

    lse is None if `attend` returns none.
    """
    import jax
    import jax.numpy as jnp

    given = {name: x[name] for name in ("q", "k", "v", "bias", "sinks") if name in x}
    mask = {name: x[name] for name in ("mask",) if name in x}

    def loss(given: Any) -> Any:
        result = attend(**given, **mask)
        o, lse = result[:2] if isinstance(result, tuple) else (result, None)
        total = (o.astype(jnp.float32) * x["do"].astype(jnp.float32)).sum()
        if "dlse" in x:
            lse = lse if lse.shape == x["dlse"].shape else lse.swapaxes(1, 2)
            total = total + (lse.astype(jnp.float32) * x["dlse"]).sum()
        return total, (o, lse)

    gradients, (o, lse) = jax.grad(loss, has_aux=True)(given)
    return {"o": o, "lse": lse} | {f"d{name}": dx for name, dx in gradients.items()}


def torch_array(x: Any, dtype: Any) -> Any:
    """Converts a NumPy array to a PyTorch tensor, on the GPU if there is one."""
    import numpy as np
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(np.array(x, order="C")).to(device, dtype and getattr(torch, dtype))


def torch_gradients(attend: Any, x: Any) -> Any:
    """Returns O, lse and the gradients of q, k, v, bias and sinks, by name, as float32 on the host.

    lse is None if `attend` returns none, and a gradient is None if none reaches the array.
    """
    import torch

    given = {n: x[n].requires_grad_() for n in ("q", "k", "v", "bias", "sinks") if n in x}
    mask = {name: x[name] for name in ("mask",) if name in x}
    result = attend(**given, **mask)
    o, lse = result[:2] if isinstance(result, tuple) else (result, None)
    total = (o.float() * x["do"].float()).sum()
    if "dlse" in x:
        lse = lse if lse.shape == x["dlse"].shape else lse.swapaxes(1, 2)
        total = total + (lse.float() * x["dlse"]).sum()
    gradients = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    found = {"o": o, "lse": lse, **{f"d{n}": dx for n, dx in zip(given, gradients, strict=True)}}
    return {n: x if x is None else x.detach().float().cpu().numpy() for n, x in found.items()}
