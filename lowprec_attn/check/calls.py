"""Calls a function forward and backward, in JAX or PyTorch, and writes a script that does so.

The script runs without this package.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn.check.measure import RESULTS, Found, as_given, as_rows, exact
from lowprec_attn.check.problems import Problem
from lowprec_attn.errors import UserError

WITH_HEADS = ("q", "k", "v", "do")


class TargetError(UserError):
    """A target is not installed or cannot be called; the message says what to do."""


class ResultError(TargetError):
    """A function has run, and its results cannot be judged; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
    """An attention function, and how it is called.

    Attributes:
      function: takes q, k, v and keywords. Returns O, or a tuple or list that begins with O and
        lse; lse has the shape [B, T, N] or [B, N, T].
      name: the function's name in a script.
      head: lines of Python that define this name in a script.
      framework: `jax` or `torch`.
      layout: the axes of q, k, v and O: `BTNH` or `BNTH`.
      keywords: the function's own names for those of `causal`, `scale`, `mask` (boolean
        [#B, 1, T, S]), `window`, `soft_cap`, `bias` ([1, N, T, S]) and `sinks` ([N]) that it takes.
      options: further keywords that every call passes, and their values.
      backward: whether it has a backward pass; without one only O and lse are computed.
      notes: sentences about what it returned, which its calls add.
    """

    function: Callable[..., Any]
    name: str
    head: tuple[str, ...]
    framework: str = "jax"
    layout: str = "BTNH"
    keywords: Mapping[str, str]
    options: Mapping[str, Any]
    backward: bool = True
    notes: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.layout not in ("BTNH", "BNTH"):
            raise TargetError(f"--layout must be BTNH or BNTH, got {self.layout!r}")

    def caller(self) -> Callable[[Problem], Found]:
        """Returns a function that takes a problem and returns the results of this function."""

        @functools.cache  # problems that differ only in the values of their arrays share a program
        def compiled(values: tuple[tuple[str, Any], ...], *expected: Any) -> Callable[..., Any]:
            attend = functools.partial(self._attend, dict(values), *expected)
            if self.framework == "torch":
                run = torch_gradients if self.backward else torch_results
                return functools.partial(run, attend)
            run = jax_gradients if self.backward else forward_results
            return jax.jit(functools.partial(run, attend))

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
                no_refusal = set(without) & {"q", "k", "v"}  # a kernel may lack sinks' gradient
                raise (ResultError if no_refusal else TargetError)(
                    f"no gradient of {self.name} reaches {', '.join(without)}; the function must "
                    "be differentiable, or take --no-backward"
                )
            there = {n: np.asarray(x) for n, x in found.items() if x is not None}
            return as_rows({n: self._turned(n, x.astype(np.float64)) for n, x in there.items()})

        return call

    def script(self, problem: Problem, data: str) -> tuple[dict[str, Any], list[str]]:
        """Returns the arrays of a file named `data`, and the lines of a script beside it.

        The script calls the function and prints the largest difference of every result from
        float64. It needs NumPy, the framework and the function. The arrays are those of a call, in
        the function's layout, and the float64 results, as `NAME_float64`.
        """
        float64 = as_given(exact(problem).found)
        if problem.dlse is None:
            del float64["lse"]
        if not self.backward:
            float64 = {n: x for n, x in float64.items() if n in ("o", "lse")}
        saved: dict[str, Any] = {n: self._turned(n, x) for n, x in arrays(problem).items()}
        saved |= {f"{n}_float64": self._turned(n, x) for n, x in float64.items()}
        beside = [n for n in arrays(problem) if n in self.keywords]
        trained = ["q", "k", "v", *(n for n in beside if n != "mask")]
        given = {self.keywords[n]: n for n in beside}
        given |= {name: repr(value) for name, value in self._values(problem).items()}
        call = ", ".join(["q, k, v", *(f"{name}={value}" for name, value in given.items())])
        run = _torch_script if self.framework == "torch" else _jax_script
        return saved, [
            "import pathlib",
            "import numpy as np",
            f"import {self.framework}",
            *self.head,
            f"# {problem.name}: {problem.about}",
            f"a = np.load(pathlib.Path(__file__).with_name({_quoted(data)}))",
            *run(trained, "mask" in beside, problem, f"{self.name}({call})", self.backward),
            "for name, x in found.items():",
            '    error = np.abs(np.asarray(x, np.float64) - a[name + "_float64"])',
            "    place = np.unravel_index(error.argmax(), error.shape)",
            '    print(name, "largest error", error.max(), "at", *place)',
        ]

    def _attend(
        self, values: Mapping[str, Any], rows: tuple[int, ...], asks_lse: bool, q: Any, k: Any,
        v: Any, **beside: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns O and lse [B, T, N], or None for lse if the function returns none."""
        given = {self.keywords[name]: x for name, x in beside.items() if name in self.keywords}
        result = self.function(q, k, v, **given, **values)
        o, lse = (*result, None, None)[:2] if isinstance(result, tuple | list) else (result, None)
        self._require_o(o, (*q.shape[:3], v.shape[3]))
        if o.dtype != q.dtype:
            one, other = (str(x.dtype).removeprefix("torch.") for x in (o, q))
            note = f"O is {one}, and q, k and v are {other}: what follows computes in {one}"
            self.notes.extend({note} - {*self.notes})
        shape, (b, t, n) = tuple(getattr(lse, "shape", ())), rows
        if shape != rows:
            lse = lse.swapaxes(1, 2) if shape == (b, n, t) else None
        if asks_lse and lse is None:
            raise TargetError("it returned no lse of shape [B, T, N] or [B, N, T] beside O")
        if asks_lse and not getattr(lse, "requires_grad", True):
            raise TargetError("its lse has no gradient, so a loss of lse would train nothing")
        return o, lse

    def _require_o(self, o: Any, shape: tuple[int, ...]) -> None:
        """Raises ResultError if what the function returned as O is no array of this shape."""
        if not hasattr(o, "shape"):
            raise ResultError(
                f"{self.name} returned {type(o).__name__}; it must return O, or a tuple or list "
                "that begins with O"
            )
        if tuple(o.shape) != shape:
            raise ResultError(
                f"O of {self.name} has the shape {tuple(o.shape)}, not {shape} ({self.layout}); is "
                "it another layout (--layout)?"
            )

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

    def _turned(self, name: str, x: np.ndarray) -> np.ndarray:
        """Converts an array between the axes of problems and those of the function."""
        is_turned = self.layout == "BNTH" and name in (*WITH_HEADS, *RESULTS)
        return x.swapaxes(1, 2) if is_turned else x

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


def _quoted(*names: str) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _jax_script(
    trained: list[str], has_mask: bool, problem: Problem, call: str, backward: bool
) -> list[str]:
    """Returns lines that compute `found`, results by name, from the arrays `a`."""
    has_lse = problem.dlse is not None
    beside, results = trained[3:], _quoted("o", *(f"d{n}" for n in trained))
    dtype, parameters = _quoted(problem.q.dtype.name), ", ".join(trained)
    lines = [
        f"q, k, v, do = (jax.numpy.asarray(a[n], {dtype}) for n in ({_quoted(*WITH_HEADS)}))",
        *(f"{n} = jax.numpy.asarray(a[{_quoted(n)}], {dtype})" for n in beside),
        *(['mask = jax.numpy.asarray(a["mask"])'] if has_mask else []),
        "",
        "",
        f"def returned({parameters}):",
        f"    result = {call}",
    ]
    if not has_lse:
        lines += ["    return result[0] if isinstance(result, (tuple, list)) else result", "", ""]
        if not backward:
            return [*lines, f'found = {{"o": returned({parameters})}}']
        return [
            *lines,
            f"o, pullback = jax.vjp(returned, {parameters})",
            f"found = dict(zip(({results}), (o, *pullback(do.astype(o.dtype)))))",
        ]
    lines += [
        "    o, lse = result[:2]",
        '    return o, lse if lse.shape == a["dlse"].shape else lse.swapaxes(1, 2)',
        "",
        "",
    ]
    if not backward:
        return [*lines, f'found = dict(zip(("o", "lse"), returned({parameters})))']
    return [
        *lines,
        f"(o, lse), pullback = jax.vjp(returned, {parameters})",
        'gradients = pullback((do.astype(o.dtype), jax.numpy.asarray(a["dlse"], lse.dtype)))',
        f'found = dict(zip(({results}, "lse"), (o, *gradients, lse)))',
    ]


def _torch_script(
    trained: list[str], has_mask: bool, problem: Problem, call: str, backward: bool
) -> list[str]:
    """Returns lines that compute `found`, results by name, from the arrays `a`."""
    has_lse = problem.dlse is not None
    beside, results = trained[3:], _quoted("o", *(f"d{n}" for n in trained))
    to = f"device=device, dtype=torch.{problem.q.dtype.name}"
    lines = [
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f"q, k, v, do = (torch.tensor(a[n], {to}) for n in ({_quoted(*WITH_HEADS)}))",
        *(f"{n} = torch.tensor(a[{_quoted(n)}], {to})" for n in beside),
        *(['mask = torch.tensor(a["mask"], device=device)'] if has_mask else []),
    ]
    if backward:
        lines += [
            f"given = [x.requires_grad_() for x in ({', '.join(trained)})]",
            f"result = {call}",
        ]
    else:
        lines += ["with torch.no_grad():", f"    result = {call}"]
    if has_lse:
        lines += [
            "o, lse = result[:2]",
            'lse = lse if lse.shape == a["dlse"].shape else lse.swapaxes(1, 2)',
        ]
    else:
        lines += ["o = result[0] if isinstance(result, (tuple, list)) else result"]
    if not backward:
        lines += ['found = {"o": o, "lse": lse}' if has_lse else 'found = {"o": o}']
    elif has_lse:
        lines += [
            'd_lse = torch.tensor(a["dlse"], device=device).to(lse.dtype)',
            "gradients = torch.autograd.grad([o, lse], given, [do.to(o.dtype), d_lse])",
            f'found = dict(zip(({results}, "lse"), (o, *gradients, lse)))',
        ]
    else:
        lines += [
            "gradients = torch.autograd.grad(o, given, do.to(o.dtype))",
            f"found = dict(zip(({results}), (o, *gradients)))",
        ]
    return [*lines, "found = {n: x.detach().double().cpu() for n, x in found.items()}"]


def jax_array(x: Any, dtype: Any) -> Any:
    """Converts a NumPy array to a JAX array."""
    # `jnp.asarray` would compile a cast or a copy for every shape.
    return jax.device_put(x if dtype is None else np.asarray(x, jnp.dtype(dtype)))


_DIFFERENTIATED = ("q", "k", "v", "bias", "sinks")


def forward_results(attend: Any, x: Any) -> Any:
    """Returns O and lse alone, by name; see `jax_gradients`."""
    o, lse = attend(**{name: x[name] for name in (*_DIFFERENTIATED, "mask") if name in x})
    return {"o": o, "lse": lse}


def torch_results(attend: Any, x: Any) -> Any:
    """As `forward_results`, as float32 on the host."""
    import torch

    with torch.no_grad():
        return _on_the_host(forward_results(attend, x))


def jax_gradients(attend: Any, x: Any) -> Any:
    """Returns O, lse and the gradients of q, k, v, bias and sinks, by name.

    `attend` returns O and an lse of dlse's shape, which may be None where there is no dlse.
    """
    given = {name: x[name] for name in _DIFFERENTIATED if name in x}
    mask = {name: x[name] for name in ("mask",) if name in x}

    def loss(given: Any) -> Any:
        o, lse = attend(**given, **mask)
        total = (o.astype(jnp.float32) * x["do"].astype(jnp.float32)).sum()
        if "dlse" in x:
            total = total + (lse.astype(jnp.float32) * x["dlse"]).sum()
        return total, (o, lse)

    gradients, (o, lse) = jax.grad(loss, has_aux=True)(given)
    return {"o": o, "lse": lse} | {f"d{name}": dx for name, dx in gradients.items()}


def torch_array(x: Any, dtype: Any) -> Any:
    """Converts a NumPy array to a PyTorch tensor, on the GPU if there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(np.array(x, order="C")).to(device, dtype and getattr(torch, dtype))


def torch_gradients(attend: Any, x: Any) -> Any:
    """Returns O, lse and the gradients of q, k, v, bias and sinks, by name, as float32 on the host.

    As `jax_gradients`; a gradient is None if none reaches the array.
    """
    import torch

    given = {n: x[n].requires_grad_() for n in _DIFFERENTIATED if n in x}
    mask = {name: x[name] for name in ("mask",) if name in x}
    o, lse = attend(**given, **mask)
    total = (o.float() * x["do"].float()).sum()
    if "dlse" in x:
        total = total + (lse.float() * x["dlse"]).sum()
    gradients = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    found = {"o": o, "lse": lse, **{f"d{n}": dx for n, dx in zip(given, gradients, strict=True)}}
    return _on_the_host(found)


def _on_the_host(found: Mapping[str, Any]) -> dict[str, Any]:
    return {n: x if x is None else x.detach().float().cpu().numpy() for n, x in found.items()}
