"""One call of a function, forward and backward, in JAX or PyTorch."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn.check.measure import RESULTS, Found, as_rows
from lowprec_attn.check.problems import Problem
from lowprec_attn.errors import UserError


class TargetError(UserError):
    """A target is not installed or cannot be called; the message says what to do."""


class Inputs(NamedTuple):
    """A problem's arrays in the framework and layout of a function; None where it has none.

    Attributes:
      q, k, v: in the layout.
      mask: boolean [#B, 1, T, S].
      bias: [1, N, T, S].
      sinks: [N].
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    sinks: Any = None


# Returns O, or O and lse [B, T, N] or [B, N, T].
Attend = Callable[[Problem, Inputs], Any]
DIFFERENTIATED = ("q", "k", "v", "bias", "sinks")


def jax_call(attend: Attend, layout: str = "BTNH") -> Callable[[Problem], Found]:
    """Of a function of JAX: takes a problem, returns its results."""
    axes = _axes(layout)

    @functools.partial(jax.jit, static_argnums=0)
    def both(settings: _Settings, x: Inputs, do: Any, dlse: Any) -> Any:
        def of(given: dict[str, Any]) -> Any:
            return _split(attend(settings.problem, x._replace(**given)), _rows(settings.problem))

        given = {n: getattr(x, n) for n in DIFFERENTIATED if getattr(x, n) is not None}
        if dlse is None:
            o, pullback, lse = jax.vjp(of, given, has_aux=True)
            (grads,) = pullback(do.astype(o.dtype))
        else:
            (o, lse), pullback = jax.vjp(of, given)
            _require_lse(lse)
            (grads,) = pullback((do.astype(o.dtype), dlse.astype(lse.dtype)))
        return {"o": o, "lse": lse} | {f"d{n}": x for n, x in grads.items()}

    def call(problem: Problem) -> Found:
        masking = problem.masking
        q, k, v, do = (jnp.asarray(x.transpose(axes)) for x in problem.arrays)
        rest = (
            None if x is None else jnp.asarray(x)
            for x in (masking.mask, masking.bias, masking.sinks)
        )
        dlse = None if problem.dlse is None else jnp.asarray(problem.dlse)
        values = both(_Settings(problem), Inputs(q, k, v, *rest), do, dlse)
        return _found({n: _float64(x) for n, x in values.items() if x is not None}, axes)

    return call


class _Settings:
    """A problem without its arrays, as a static argument: equal ones share a program."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._key = (
            problem.masking.is_causal,
            problem.masking.window,
            problem.scale,
            problem.soft_cap,
            _rows(problem),
            problem.dlse is None,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _axes(layout: str) -> tuple[int, ...]:
    """Between BTNH and the layout; the same both ways."""
    if layout not in ("BTNH", "BNTH"):
        raise TargetError(f"--layout must be BTNH or BNTH, got {layout!r}")
    return (0, 1, 2, 3) if layout == "BTNH" else (0, 2, 1, 3)


def _rows(problem: Problem) -> tuple[int, ...]:
    return problem.q.shape[:3]


def _split(result: Any, rows: tuple[int, ...]) -> tuple[Any, Any]:
    """O, and lse [B, T, N] where there is one: of a tuple, if it has a shape of lse."""
    o, lse = result[:2] if isinstance(result, tuple) else (result, None)
    shape = tuple(getattr(lse, "shape", ()))
    if shape == rows:
        return o, lse
    b, t, n = rows
    return o, lse.swapaxes(1, 2) if shape == (b, n, t) else None


def _require_lse(lse: Any) -> None:
    if lse is None:
        raise TargetError("it returned no lse of shape [B, T, N] or [B, N, T] beside O")


def _found(values: Mapping[str, np.ndarray], axes: tuple[int, ...]) -> Found:
    """Results as arrays of rows."""
    return as_rows({n: x.transpose(axes) if n in RESULTS else x for n, x in values.items()})


def torch_call(attend: Attend, layout: str = "BTNH") -> Callable[[Problem], Found]:
    """As `jax_call`, of a function of PyTorch."""
    axes = _axes(layout)

    def call(problem: Problem) -> Found:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, problem.q.dtype.name)

        def tensor(x: np.ndarray) -> Any:
            wide = np.ascontiguousarray(x.astype(np.float32))
            return torch.from_numpy(wide).to(device, dtype)

        q, k, v, do = (tensor(x.transpose(axes)) for x in problem.arrays)
        masking = problem.masking
        mask = None if masking.mask is None else torch.from_numpy(np.array(masking.mask)).to(device)
        rest = (None if x is None else tensor(x) for x in (masking.bias, masking.sinks))
        x = Inputs(q, k, v, mask, *rest)
        given = {n: getattr(x, n) for n in DIFFERENTIATED if getattr(x, n) is not None}
        for leaf in given.values():
            leaf.requires_grad_()
        o, lse = _split(attend(problem, x), _rows(problem))
        outputs, cotangents = [o], [do.to(o.dtype)]
        if problem.dlse is not None:
            _require_lse(lse)
            if not lse.requires_grad:
                raise TargetError("its lse has no gradient, so a loss of lse would train nothing")
            outputs.append(lse)
            cotangents.append(torch.from_numpy(problem.dlse).to(device, lse.dtype))
        grads = torch.autograd.grad(outputs, list(given.values()), cotangents, allow_unused=True)
        without = [n for n, dx in zip(given, grads, strict=True) if dx is None]
        if without:
            raise TargetError(
                f"no gradient reaches {', '.join(without)}; the function must be differentiable"
            )
        values = {"o": o} | {f"d{n}": dx for n, dx in zip(given, grads, strict=True)}
        values |= {} if lse is None else {"lse": lse}
        return _found({n: x.detach().double().cpu().numpy() for n, x in values.items()}, axes)

    return call
