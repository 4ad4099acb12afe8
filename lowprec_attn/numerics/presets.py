"""Named `Numerics`: what the kernels, codes and cures of the field compute."""

from lowprec_attn.numerics.record import Numerics

EXACT = Numerics(saved_output="float32", statistics="m_and_l")
"""float32 at every point; only O is handed on in the input's format.

m and l are saved apart: rows whose scores are all near ± 1e6 have Σ P = 1 too.
"""

FLASH = Numerics(
    probs="bfloat16",
    output="bfloat16",
    probs_bwd="bfloat16",
    ds="bfloat16",
)
"""Only operands of matrix products and O are rounded, as in every fused kernel that people run.

Each implementation forms exponents in its own way. The presets from `flash_attention_3` to
`jax_pallas` say how those of others do, and what else tells them apart: docs/who_rounds_what.md.
"""

FLASH_ATTENTION_3 = FLASH.replace(exponent="scale_first")
"""FlashAttention-3, FlashAttention-2 as its authors build it; -4 with `row_max='lazy_max'`."""

TORCH_FLASH = FLASH.replace(exponent="unfused")
"""FlashAttention-2 as PyTorch builds it, with UNFUSE_FMA; cuDNN 9.19 by its O."""

SPLASH = FLASH.replace(exponent="shift_first")
"""JAX's splash attention for TPUs."""

KOHAKU_FA = SPLASH.replace(statistics="m_and_l")
"""KohakuFA, JAX's flash attention for TPUs, tokamax by Triton: m and l apart."""

TOKAMAX = FLASH_ATTENTION_3.replace(statistics="m_and_l")
"""tokamax by Mosaic GPU."""

JAX_PALLAS = TORCH_FLASH.replace(delta="do_o_storage", delta_value="bfloat16")
"""JAX's Pallas kernel for GPUs by Triton: δ is a sum in bfloat16."""

PUBLISHED = FLASH.replace(
    scores="bfloat16",
    pv="bfloat16",
    normalizer="bfloat16",
    dp="bfloat16",
    tile_grads="bfloat16",
    kv_block=512,
)
"""The public code of arXiv 2510.04212 as it runs, compiled: docs/who_rounds_what.md.

Its eager backward pass raises an error, and the compiler leaves out the roundings between the
operations that it fuses: those of S − m, of Ō before the division, of m and l from step to step.
Faithful for head sizes whose scale is a power of two (the code rounds q kᵀ before the scale), and
but for the division by l in the first 512 rows, which `published_as_compiled` has.
"""

PUBLISHED_AS_COMPILED = PUBLISHED.replace(divisor="first_unrounded")
"""`published` with what the compiler makes of the first 512 rows under the standard maximum."""

PUBLISHED_EAGER = PUBLISHED.replace(
    shift="bfloat16",
    rescale="bfloat16",
    accumulator="bfloat16",
    stats="bfloat16",
    delta="do_o_storage",
)
"""The same source, every operation by itself: PyTorch on bfloat16 arrays under autocast.

Faithful up to two steps of 512 keys (its gradients round after every tile) and for head sizes whose
scale is a power of two (S is rounded before and after the scale).
"""

PROBE = FLASH.replace(scores="bfloat16", pv="bfloat16", dp="bfloat16")
"""S, P̄V and dP rounded as well, the running state float32; meant for all keys in one step."""

FLASH_ATTENTION_3_FP8 = FLASH_ATTENTION_3.replace(
    query="float8_e4m3fn/head",
    key="float8_e4m3fn/head",
    value="float8_e4m3fn/head",
    probs="float8_e4m3fn/x256",
)
"""FlashAttention-3's FP8 forward pass: P̄ is 2^8 times what it is, and l adds it unrounded.

Its backward pass takes 16 bits alone. This one is `flash_attention_3` of q, k and V as they were
read.
"""

TRANSFORMER_ENGINE_FP8 = FLASH.replace(
    query="float8_e4m3fn/tensor",
    key="float8_e4m3fn/tensor",
    value="float8_e4m3fn/tensor",
    probs="float8_e4m3fn/x448",
    do="float8_e5m2/tensor",
    probs_bwd="float8_e4m3fn/x448",
    ds="float8_e5m2/tensor",
)
"""TransformerEngine's attention in FP8 by cuDNN, with current scaling of q, k, V and dO.

Its scales of P̄ and dS are 448 / amax and 57344 / amax of the step before. Here that of P̄ is the
same with an amax of 1, which the first row of causal attention has, and that of dS has its own
amax. What delayed scaling adds is in docs/who_rounds_what.md.
"""

FLOAT32_OUTPUT = FLASH.replace(saved_output="float32")
"""`flash` where δ sees O before its rounding."""

AUXILIARY_OUTPUT = FLASH.replace(saved_output="auxiliary")
"""`flash` where δ sees O′, formed from unrounded P̄ (Attn-QAT, arXiv 2603.00040)."""

HALVES_OUTPUT = FLASH.replace(saved_output="halves")
"""`flash` where δ sees O in two bfloat16 halves (FlashAttention-4's sparse MLA)."""

DELTA_DP_P = FLASH.replace(delta="dp_p")
"""`flash` with δ = rowsum(dP ∘ P), which does not see O at all."""

NORMALIZED_DELTA = FLASH.replace(delta="normalized")
"""`flash` with δ = Σ P dP / Σ P of the backward pass itself: rows of dS sum to zero."""

CORRECTED_AFTER_CAST = FLASH.replace(delta="after_cast")
"""`flash` whose rows of dS as rounded sum to zero (Chen et al., arXiv 2609.34272)."""

MATCHED = FLASH.replace(
    exponent="whole_max",
    statistics="m_and_l",
    row_sum="rounded",
    recomputed_probs="rounded",
    saved_output="halves",
)
"""One rounded P̄ in l, P̄V and dS, against a whole-number maximum in base 2.

Rows of dS sum to zero before its cast, without a pass of their own: up to the lower half of O.
"""

MATCHED_FLOAT32_OUTPUT = MATCHED.replace(saved_output="float32")
"""`matched` where δ sees O in float32: rows of dS sum to zero up to float32."""

STOCHASTIC_OUTPUT = FLASH.replace(output="bfloat16:stochastic")
"""`flash` with O rounded stochastically: no persistent sign."""

STANDARD = Numerics(
    scores="bfloat16",
    probs="bfloat16",
    output="bfloat16",
    delta="dp_p",
    probs_bwd="bfloat16",
    dp="bfloat16",
    ds="bfloat16",
    statistics="m_and_l",
    normalize_probs=True,
)
"""Unfused attention under autocast: P is normalised, then rounded (`dense` only)."""

JAX_NN = Numerics(
    probs="bfloat16",
    output="bfloat16",
    delta="dp_p",
    probs_bwd="bfloat16",
    dp="bfloat16",
    statistics="m_and_l",
    normalize_probs=True,
)
"""`jax.nn.dot_product_attention` by XLA: S, softmax and dS are float32 (`dense` only)."""

PRESETS: dict[str, Numerics] = {
    name.lower(): value for name, value in vars().items() if isinstance(value, Numerics)
}
"""By name, in lower case."""


def get_preset(name: str) -> Numerics:
    """The preset called `name`.

    Raises:
      ValueError: no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown numerics {name!r}; presets are {', '.join(PRESETS)}")
    return PRESETS[name]
