"""One call of a function, forward and backward, in JAX or PyTorch; and a script that makes it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn.check.measure import RESULTS, Found
from lowprec_attn.check.problems import Problem
from lowprec_attn.errors import UserError


class TargetError(UserError):
    """A target cannot be had or called; the message says what to do."""


def jax_call(attend: Callable[..., Any], layout: str = "BTNH") -> Callable[[Problem], Found]:
    """attend(problem, q, k, v, mask) -> O, or (O, lse)."""
    axes = _axes(layout)

    @functools.partial(jax.jit, static_argnums=0)
    def both(settings: _Settings, q: Any, k: Any, v: Any, do: Any, mask: Any) -> Any:
        def of(q: Any, k: Any, v: Any) -> Any:
            result = attend(settings.problem, q, k, v, mask)
            return result[:2] if isinstance(result, tuple) else (result, None)

        o, pullback, lse = jax.vjp(of, q, k, v, has_aux=True)
        return *(o, *pullback(do.astype(o.dtype))), lse

    def call(problem: Problem) -> Found:
        mask = None if problem.masking.mask is None else jnp.asarray(problem.masking.mask)
        arrays = (jnp.asarray(x.transpose(axes)) for x in problem.arrays)
        *values, lse = both(_Settings(problem), *arrays, mask)
        found = {n: _float64(x).transpose(axes) for n, x in zip(RESULTS, values, strict=True)}
        return _with_lse(found, None if lse is None else _float64(lse))

    return call


class _Settings:
    """A problem without its arrays, as a static argument: equal ones share a program."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._key = problem.masking.is_causal, problem.scale

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


def _with_lse(found: Found, lse: np.ndarray | None) -> Found:
    """With an lse of shape [B, T, N] or [B, N, T], where there is one."""
    shape = found["o"].shape[:3]
    if lse is None:
        return found
    if lse.shape == (shape[0], shape[2], shape[1]) and lse.shape != shape:
        lse = lse.transpose(0, 2, 1)
    return found | {"lse": lse} if lse.shape == shape else found


def jax_script(head: list[str], call: str, problem: Problem, layout: str) -> list[str]:
    """Lines that form `found`, O and its gradients, of arrays `a`; `head` imports, `call` is O."""
    turned = "" if layout == "BTNH" else ".transpose(0, 2, 1, 3)"
    dtype = problem.q.dtype.name
    return [
        "import jax, jax.numpy as jnp",
        *head,
        *(["mask = jnp.asarray(a['mask'])"] if problem.masking.mask is not None else []),
        f"q, k, v, do = (jnp.asarray(a[n], jnp.{dtype}){turned} for n in ('q', 'k', 'v', 'do'))",
        f"o, pullback = jax.vjp(lambda q, k, v: {call}, q, k, v)",
        f"found = [jnp.float32(x){turned} for x in (o, *pullback(do.astype(o.dtype)))]",
    ]


def torch_call(attend: Callable[..., Any], layout: str = "BTNH") -> Callable[[Problem], Found]:
    """attend(problem, q, k, v, mask) -> O, or (O, lse)."""
    axes = _axes(layout)

    def call(problem: Problem) -> Found:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, problem.q.dtype.name)

        def tensor(x: np.ndarray) -> Any:
            wide = np.ascontiguousarray(x.astype(np.float32).transpose(axes))
            return torch.from_numpy(wide).to(device, dtype)

        q, k, v = (tensor(x).requires_grad_() for x in problem.arrays[:3])
        seen = problem.masking.mask
        mask = None if seen is None else torch.from_numpy(np.array(seen)).to(device)
        result = attend(problem, q, k, v, mask)
        o, lse = result[:2] if isinstance(result, tuple) else (result, None)
        o.backward(tensor(problem.do).to(o.dtype))
        values = (o, q.grad, k.grad, v.grad)
        if any(x is None for x in values):
            raise TargetError("no gradient reaches q, k or v; the function must be differentiable")
        found = {
            n: x.detach().double().cpu().numpy().transpose(axes)
            for n, x in zip(RESULTS, values, strict=True)
        }
        return _with_lse(found, None if lse is None else lse.detach().double().cpu().numpy())

    return call


def torch_script(
    head: list[str], call: str, problem: Problem, layout: str, within: str = ""
) -> list[str]:
    """As `jax_script`; `within` begins the line of the call."""
    turned = "" if layout == "BTNH" else ".transpose(1, 2)"
    dtype = problem.q.dtype.name
    return [
        "import torch",
        *head,
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        *(
            ["mask = torch.from_numpy(a['mask']).to(device)"]
            if problem.masking.mask is not None
            else []
        ),
        f"q, k, v, do = (torch.from_numpy(a[n]).to(device, torch.{dtype}){turned}.requires_grad_()",
        "               for n in ('q', 'k', 'v', 'do'))",
        f"{within}o = {call}",
        "grads = torch.autograd.grad(o, (q, k, v), do)",
        f"found = [x.detach(){turned}.float().cpu().numpy() for x in (o, *grads)]",
    ]
