"""A script that makes a call without this package: lines of Python that form `found`."""

from collections.abc import Sequence

from lowprec_attn.check.calls import DIFFERENTIATED
from lowprec_attn.check.problems import Problem


def names(problem: Problem) -> tuple[str, ...]:
    """The results in the order of `found`."""
    beside = [f"d{n}" for n in inputs(problem)[3:]]
    return ("o", "dq", "dk", "dv", *beside, *([] if problem.dlse is None else ["lse"]))


def inputs(problem: Problem) -> list[str]:
    """The arrays that a function of this problem is differentiated by."""
    masking = problem.masking
    there = {"q", "k", "v"} | {n for n in ("bias", "sinks") if getattr(masking, n) is not None}
    return [n for n in DIFFERENTIATED if n in there]


def jax_script(head: Sequence[str], call: str, problem: Problem, layout: str) -> list[str]:
    """Lines that form `found` of arrays `a`; `head` imports, `call` is O, or O and lse."""
    turned = "" if layout == "BTNH" else ".swapaxes(1, 2)"
    dtype = problem.q.dtype.name
    of = ", ".join(inputs(problem))
    beside = inputs(problem)[3:]
    lines = [
        "import jax, jax.numpy as jnp",
        *head,
        *(["mask = jnp.asarray(a['mask'])"] if problem.masking.mask is not None else []),
        f"q, k, v, do = (jnp.asarray(a[n], jnp.{dtype}){turned} for n in ('q', 'k', 'v', 'do'))",
        *(f"{name} = jnp.asarray(a[{name!r}], jnp.{dtype})" for name in beside),
        f"def attend({of}):",
        f"    result = {call}",
    ]
    if problem.dlse is None:
        lines += [
            "    return result[0] if isinstance(result, tuple) else result",
            f"o, pullback = jax.vjp(attend, {of})",
            "grads = pullback(do.astype(o.dtype))",
        ]
    else:
        lines += [
            "    o, lse = result[:2]",
            "    return o, lse if lse.shape == a['dlse'].shape else lse.swapaxes(1, 2)",
            f"(o, lse), pullback = jax.vjp(attend, {of})",
            "grads = pullback((do.astype(o.dtype), jnp.asarray(a['dlse'], lse.dtype)))",
        ]
    return [*lines, f"found = [jnp.float32(x){turned} for x in (o, *grads[:3])]", *_rest(problem)]


def _rest(problem: Problem) -> list[str]:
    """Lines that add what is in no layout to `found`."""
    rest = "grads[3:]" if problem.dlse is None else "(*grads[3:], lse)"
    return [] if len(names(problem)) == 4 else [f"found += {rest}"]


def torch_script(
    head: Sequence[str], call: str, problem: Problem, layout: str, within: str = ""
) -> list[str]:
    """As `jax_script`; `within` begins the line of the call."""
    turned = "" if layout == "BTNH" else ".transpose(1, 2)"
    dtype = problem.q.dtype.name
    of = ", ".join(inputs(problem))
    beside = inputs(problem)[3:]
    has_mask = problem.masking.mask is not None
    lines = [
        "import torch",
        *head,
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        *(["mask = torch.from_numpy(a['mask']).to(device)"] if has_mask else []),
        f"q, k, v, do = (torch.from_numpy(a[n]).to(device, torch.{dtype}){turned}.requires_grad_()",
        "               for n in ('q', 'k', 'v', 'do'))",
        *(
            f"{name} = torch.from_numpy(a[{name!r}]).to(device, torch.{dtype}).requires_grad_()"
            for name in beside
        ),
        f"{within}result = {call}",
    ]
    if problem.dlse is None:
        lines += [
            "o = result[0] if isinstance(result, tuple) else result",
            f"grads = torch.autograd.grad(o, ({of}), do.to(o.dtype))",
        ]
    else:
        lines += [
            "o, lse = result[:2]",
            "lse = lse if lse.shape == a['dlse'].shape else lse.transpose(1, 2)",
            "dlse = torch.from_numpy(a['dlse']).to(device, lse.dtype)",
            f"grads = torch.autograd.grad((o, lse), ({of}), (do.to(o.dtype), dlse))",
        ]
    return [
        *lines,
        f"found = [x{turned} for x in (o, *grads[:3])]",
        *_rest(problem),
        "found = [x.detach().float().cpu().numpy() for x in found]",
    ]
