"""What to do about a finding in JAX and PyTorch: the setting, its cost and where to resume.

Costs of time were measured (docs/failure.md, docs/exploded.md); an entry says where one was not.
"""

from typing import NamedTuple

from lowprec_attn.diagnostics.verdict import Kind


class Action(NamedTuple):
    """What a user can do about one kind of finding.

    Attributes:
      jax, torch: the setting or option, and the library that has it.
      cost: what it costs in time, memory or loss.
      resume: the checkpoint to resume from; empty where nothing has to be undone.
    """

    jax: str
    torch: str
    cost: str
    resume: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """Returns the label and the text of every part that is not empty."""
        parts = (self.jax, self.torch, self.cost, self.resume)
        labels = ("JAX", "PyTorch", "cost", "resume")
        return [(label, text) for label, text in zip(labels, parts, strict=True) if text]


_BEFORE_GROWTH = "from a checkpoint at which the largest score was below 100 or so"
_BEFORE_VALUES = "from the last checkpoint whose loss and weights are finite"
_MATH = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
_EPSILON = (  # results/true_bfloat16/recipes
    "AdamW with eps=1e-5 kept GPT-2's scores down for 6,000 steps at a rate of 2e-3, and its loss "
    "came out lower"
)

ACTIONS: dict[Kind, Action] = {
    "row_sums": Action(
        'attention.dot_product_attention(numerics="flash") and jax.nn keep m, l and lse in '
        "float32; of numerics of your own set stats and lse to float32",
        "scaled_dot_product_attention keeps them in float32; in a kernel of your own store them so",
        "4 bytes a row and number instead of 2; no time that was measured",
        _BEFORE_GROWTH,
    ),
    "delta": Action(
        'attention.attention_fn(numerics="normalized_delta"), of this library; in its trainer '
        f"--config.attention.numerics=normalized_delta; jax.nn has no such option; {_EPSILON}",
        "lowprec_attn.torch.attention in place of scaled_dot_product_attention; PyTorch's own "
        f"are {_MATH}, or norms on q and k; {_EPSILON}",
        "9 to 14 % of attention's time in JAX on one NVIDIA H200; in PyTorch not measured",
        f"{_BEFORE_GROWTH}; from a later one, scores stop growing and hardly fall",
    ),
    "scores": Action(
        "Flax's MultiHeadAttention(normalize_qk=True), in this trainer "
        "--config.model.qk_norm=True, bounds scores whatever the cause",
        "torch.nn.RMSNorm on q and k of each head, as Qwen3 has, bounds scores whatever the cause",
        "a norm of q and of k in each layer; a checkpoint without their weights cannot be resumed",
        _BEFORE_GROWTH,
    ),
    "rate": Action(
        "a lower peak of the Optax schedule, or longer warm-up; or "
        "MultiHeadAttention(normalize_qk=True) of Flax",
        "a lower lr of the optimizer, or longer warm-up; or torch.nn.RMSNorm on q and k",
        "a slower start; of a norm, one of q and one of k in each layer",
        _BEFORE_GROWTH,
    ),
    "non_finite": Action(
        'diagnose again with --numerics exact; then attention.attention_fn(numerics="exact")',
        f"{_MATH} on float32 q, k and v",
        "exact arithmetic: several times the time, and in PyTorch memory for all scores",
        _BEFORE_VALUES,
    ),
    "non_finite_output": Action(
        'jax.nn.dot_product_attention(implementation="xla") for this layer, and compare',
        f"{_MATH} for this layer, and compare; lowprec-attn check names the bug of a kernel",
        "memory for all scores of the layer",
        _BEFORE_VALUES,
    ),
    "non_finite_input": Action(
        "jax.config.update('jax_debug_nans', True) for this step, or capture an earlier one",
        "torch.autograd.set_detect_anomaly(True) for this step, or capture an earlier one",
        "one slow step",
        _BEFORE_VALUES,
    ),
    "float16": Action(
        "dtype=jnp.bfloat16 of the modules",
        'torch.autocast("cuda", dtype=torch.bfloat16), and no GradScaler',
        "3 significand bits",
        _BEFORE_VALUES,
    ),
    "lse": Action(
        'is_causal=True instead of a mask, or implementation="xla" of jax.nn',
        "is_causal=True instead of a mask, or "
        "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
        "nothing for causality; another kernel's time",
    ),
    "zero_gradient": Action(
        "look at the loss and its mask: jax.grad of it by this layer's output is 0",
        "look at the loss, its mask, detach() and the loss scale",
        "nothing",
    ),
}
