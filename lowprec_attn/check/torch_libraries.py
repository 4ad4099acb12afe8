"""PyTorch's attention functions as targets."""

import contextlib
from collections.abc import Iterator
from typing import Any

from lowprec_attn.check.calls import Inputs, TargetError, torch_call
from lowprec_attn.check.libraries import imported
from lowprec_attn.check.problems import Problem
from lowprec_attn.check.scripts import torch_script
from lowprec_attn.check.target import ABILITIES, Options, Target

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
}
_INSTALL = "pip install torch (of the CPU: --index-url https://download.pytorch.org/whl/cpu)"


def sdpa(choice: str, _: Options) -> Target:
    """`torch.nn.functional.scaled_dot_product_attention`."""
    torch = imported("torch", _INSTALL)
    if choice and choice not in BACKENDS:
        raise TargetError(
            f"unknown target 'torch.sdpa:{choice}'; say torch.sdpa or one of "
            f"{', '.join(f'torch.sdpa:{name}' for name in BACKENDS)}"
        )
    backend = BACKENDS.get(choice)

    @contextlib.contextmanager
    def chosen() -> Iterator[None]:
        if backend is None:
            yield
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            yield

    def attend(problem: Problem, x: Inputs) -> Any:
        q, k, v, mask, bias, _ = x
        is_causal = problem.masking.is_causal
        if is_causal and (mask is not None or bias is not None):  # it takes one of the two
            like = bias if mask is None else mask
            tri = torch.ones(like.shape[-2:], dtype=torch.bool, device=q.device).tril()
            mask = tri if mask is None else mask & tri
        if bias is not None:
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        with chosen():
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=is_causal and mask is None,
                scale=problem.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    def script(problem: Problem) -> list[str]:
        masking = problem.masking
        is_causal = masking.is_causal
        words = "mask" if masking.mask is not None else ""
        if is_causal and words:
            words = "mask.tril()"
        if masking.bias is not None:
            tri = "torch.ones(bias.shape[-2:], dtype=torch.bool, device=device).tril()"
            hidden = words or (tri if is_causal else "")
            words = f"bias.masked_fill(~{hidden}, -torch.inf)" if hidden else "bias"
        mask = f", attn_mask={words}" if words else ""
        gqa = ", enable_gqa=True" if problem.q.shape[2] != problem.k.shape[2] else ""
        head = ["from torch.nn.attention import SDPBackend, sdpa_kernel"] if backend else []
        within = f"with sdpa_kernel(SDPBackend.{backend}): " if backend else ""
        call = (
            f"torch.nn.functional.scaled_dot_product_attention(q, k, v{mask}, "
            f"is_causal={is_causal and not words}, scale={problem.scale!r}{gqa})"
        )
        return torch_script(head, call, problem, "BNTH", within)

    return Target(
        name="torch.sdpa",
        call=torch_call(attend, "BNTH"),
        can=frozenset(ABILITIES) - {"window", "soft_cap", "sinks"},
        script=script,
    )


def flex(choice: str, _: Options) -> Target:
    """`torch.nn.attention.flex_attention`: masks as block masks, cap and bias as its `score_mod`.

    It is compiled where there is a GPU. On a CPU PyTorch has no backward pass of it.
    """
    torch = imported("torch", _INSTALL)
    if choice:
        raise TargetError(f"unknown target 'torch.flex:{choice}'; say torch.flex")
    from torch.nn.attention import flex_attention as module
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Since PyTorch 2.9; it warns of the older argument, which it will drop.
    has_aux = hasattr(module, "AuxRequest")
    ask = {"return_aux": module.AuxRequest(lse=True)} if has_aux else {"return_lse": True}
    on_gpu = torch.cuda.is_available()
    compiled = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention

    def attend(problem: Problem, x: Inputs) -> Any:
        masking, soft_cap, mask, bias = problem.masking, problem.soft_cap, x.mask, x.bias
        lengths = x.q.shape[2], x.k.shape[2]

        def score_mod(s: Any, b: Any, n: Any, t: Any, j: Any) -> Any:
            s = s if soft_cap is None else soft_cap * torch.tanh(s / soft_cap)
            return s if bias is None else s + bias[0, n, t, j]

        def mask_mod(b: Any, n: Any, t: Any, j: Any) -> Any:
            seen = t >= j if masking.is_causal else j >= 0
            if masking.window is not None:
                seen = seen & (t - j <= masking.window[0]) & (j - t <= masking.window[1])
            return seen if mask is None else seen & mask[0, 0, t, j]

        o, lse = compiled(
            x.q,
            x.k,
            x.v,
            score_mod=score_mod,
            block_mask=create_block_mask(mask_mod, None, None, *lengths, device=x.q.device.type),
            scale=problem.scale,
            enable_gqa=x.q.shape[1] != x.k.shape[1],
            **ask,
        )
        return o, (lse.lse if has_aux else lse)

    def script(problem: Problem) -> list[str]:
        score_mod, mask_mod = _flex_rules(problem)
        gqa = ", enable_gqa=True" if problem.q.shape[2] != problem.k.shape[2] else ""
        lengths = f"{problem.q.shape[1]}, {problem.k.shape[1]}"
        head = ["from torch.nn.attention.flex_attention import create_block_mask, flex_attention"]
        head += ["flex_attention = torch.compile(flex_attention, dynamic=False)"] * on_gpu
        call = (
            f"flex_attention(q, k, v, score_mod={score_mod}, block_mask=create_block_mask("
            f"{mask_mod}, None, None, {lengths}, device=device), scale={problem.scale!r}{gqa}"
        )
        if problem.dlse is None:
            call += ")"
        elif has_aux:
            head += ["from torch.nn.attention.flex_attention import AuxRequest"]
            call = f"(lambda o, aux: (o, aux.lse))(*{call}, return_aux=AuxRequest(lse=True)))"
        else:
            call += ", return_lse=True)"
        return torch_script(head, call, problem, "BNTH")

    return Target(
        name="torch.flex",
        call=torch_call(attend, "BNTH"),
        can=frozenset({*ABILITIES, "lse"}) - {"sinks"},
        script=script,
        notes=() if on_gpu else ("unfused: this is no GPU",),
    )


def _flex_rules(problem: Problem) -> tuple[str, str]:
    """`score_mod` and `mask_mod` of a script, of its `mask` and `bias`."""
    masking = problem.masking
    cap = problem.soft_cap
    score = "s" if cap is None else f"{cap} * torch.tanh(s / {cap})"
    if masking.bias is not None:
        score += " + bias[0, n, t, j]"
    seen = ["t >= j"] if masking.is_causal else []
    if masking.window is not None:
        left, right = masking.window
        seen += [f"t - j <= {left}", f"j - t <= {right}"]
    seen += ["mask[0, 0, t, j]"] if masking.mask is not None else []
    both = " & ".join(f"({rule})" for rule in seen) or "j >= 0"
    return f"(lambda s, b, n, t, j: {score})", f"(lambda b, n, t, j: {both})"
