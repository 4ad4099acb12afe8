"""Named `Numerics`: the roundings of published kernels and codes, and of proposed cures."""

from lowprec_attn.numerics.formats import did_you_mean
from lowprec_attn.numerics.record import Numerics

EXACT = Numerics(saved_output="float32", statistics="m_and_l")
"""Float32 at every point; only O and the gradients are rounded, to the format of the inputs.

m and l are saved separately, so Σ P = 1 holds even in rows whose scores are all near ± 1e6.
"""

FLASH = Numerics(probs="bfloat16", output="bfloat16", probs_bwd="bfloat16", ds="bfloat16")
"""Only operands of matrix products and O are rounded, as in every fused kernel that people run.

Each implementation of this library forms exponents in its own way. The presets from
`flash_attention_3` to `jax_pallas` say how other libraries form them, and what else differs, see
docs/who_rounds_what.md.

The backward pass of `FLASH` and of the presets made of it reads lse as one number, unless they save
m and l. Rows whose scores are all near ± 1e6, as in padding that a bias of −1e9 hides, then get
gradients that are wrong by a factor of up to the number of keys. A mask hides padding without that;
`NORMALIZED_DELTA`, `CORRECTED_AFTER_CAST`, `MATCHED` and `EXACT` save m and l.
"""

FLASH_ATTENTION_3 = FLASH.replace(exponent="scale_first")
"""FlashAttention-3, and FlashAttention-2 as its authors build it.

With `row_max='lazy_max'` it is FlashAttention-4.
"""

TORCH_FLASH = FLASH.replace(exponent="unfused")
"""FlashAttention-2 as PyTorch builds it, with UNFUSE_FMA; also cuDNN 9.19, judged by its O."""

SPLASH = FLASH.replace(exponent="shift_first")
"""JAX's splash attention for TPUs."""

KOHAKU_FA = SPLASH.replace(statistics="m_and_l")
"""KohakuFA, JAX's flash attention for TPUs, and tokamax with Triton, which save m and l apart."""

TOKAMAX = FLASH_ATTENTION_3.replace(statistics="m_and_l")
"""tokamax with Mosaic GPU."""

JAX_PALLAS = TORCH_FLASH.replace(delta="do_o_storage", delta_value="bfloat16")
"""JAX's Pallas kernel for GPUs with Triton, which rounds the products and the sum of δ."""

PUBLISHED = FLASH.replace(
    scores="bfloat16",
    pv="bfloat16",
    normalizer="bfloat16",
    dp="bfloat16",
    tile_grads="bfloat16",
    kv_block=512,
)
"""The public code of arXiv 2510.04212 as it runs, which is compiled; see docs/who_rounds_what.md.

Its eager backward pass raises an error. The compiler leaves out the roundings between operations
that it fuses: the roundings of S − m, of Ō before the division, and of m and l from step to step.
The preset is faithful only for head sizes whose scale is a power of two, because the code rounds
q kᵀ before the scale. It lacks one detail, the division by the unrounded l in the first 512 rows,
which `published_as_compiled` has.
"""

PUBLISHED_AS_COMPILED = PUBLISHED.replace(divisor="first_unrounded")
"""`published` with the first 512 rows as the compiler computes them under the standard maximum."""

PUBLISHED_EAGER = PUBLISHED.replace(
    shift="bfloat16",
    rescale="bfloat16",
    accumulator="bfloat16",
    stats="bfloat16",
    delta="do_o_storage",
)
"""The same code with every operation run by itself: PyTorch on bfloat16 arrays under autocast.

The preset is faithful only for up to two steps of 512 keys, because the code rounds its gradients
after every tile, and only for head sizes whose scale is a power of two, because the code rounds S
before and after the scale.
"""

PROBE = FLASH.replace(scores="bfloat16", pv="bfloat16", dp="bfloat16")
"""`flash` with S, P̄V and dP rounded too and a float32 running state; for all keys in one step."""

FLASH_ATTENTION_3_FP8 = FLASH_ATTENTION_3.replace(
    query="float8_e4m3fn/head",
    key="float8_e4m3fn/head",
    value="float8_e4m3fn/head",
    probs="float8_e4m3fn/x256",
)
"""FlashAttention-3's FP8 forward pass, which rounds 2^8 · P̄ and adds the unrounded P̄ in l.

FlashAttention-3 has a backward pass only for 16-bit formats. The backward pass here is that of
`flash_attention_3`, applied to q, k and V as the forward pass reads them.
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
"""TransformerEngine's attention in FP8 with cuDNN, with current scaling of q, k, V and dO.

TransformerEngine scales P̄ by 448 / amax and dS by 57344 / amax, with the amax of the previous
training step. Here the amax of P̄ is 1, as in the first row of causal attention, and dS is scaled by
its current amax. docs/who_rounds_what.md describes the effect of delayed scaling.
"""

FLOAT32_OUTPUT = FLASH.replace(saved_output="float32")
"""`flash` in which δ reads O before it is rounded."""

AUXILIARY_OUTPUT = FLASH.replace(saved_output="auxiliary")
"""`flash` in which δ reads O′, formed from unrounded P̄ (Attn-QAT, arXiv 2603.00040)."""

HALVES_OUTPUT = FLASH.replace(saved_output="halves")
"""`flash` in which δ reads O in two bfloat16 halves (FlashAttention-4's sparse MLA)."""

DELTA_DP_P = FLASH.replace(delta="dp_p")
"""`flash` with δ = rowsum(dP ∘ P), which does not read O at all."""

NORMALIZED_DELTA = FLASH.replace(delta="normalized", statistics="m_and_l")
"""`flash` with δ = Σ P dP / Σ P, computed in the backward pass, so that rows of dS sum to zero.

m and l are saved apart, because m + log l, as one float32 number, loses log l at large scores.
"""

CORRECTED_AFTER_CAST = FLASH.replace(delta="after_cast", statistics="m_and_l")
"""`flash` corrected so that rows of the rounded dS sum to zero (Chen et al., arXiv 2609.34272).

m and l are saved apart, because m + log l, as one float32 number, loses log l at large scores.
"""

MATCHED = FLASH.replace(
    exponent="whole_max",
    statistics="m_and_l",
    row_sum="rounded",
    recomputed_probs="rounded",
    saved_output="halves",
)
"""The same rounded P̄ in l, P̄V and dS, relative to a whole-number maximum in base 2.

Before the cast of dS its rows sum to zero, up to the rounding of the lower half of O, without a
separate pass over the keys.
"""

MATCHED_FLOAT32_OUTPUT = MATCHED.replace(saved_output="float32")
"""`matched` in which δ reads O in float32: rows of dS sum to zero up to float32 rounding."""

STOCHASTIC_OUTPUT = FLASH.replace(output="bfloat16:stochastic")
"""`flash` with O rounded stochastically, so that its errors have no persistent sign."""

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
"""Unfused attention under autocast: P is normalised before it is rounded (`dense` only)."""

JAX_NN = Numerics(
    probs="bfloat16",
    output="bfloat16",
    delta="dp_p",
    probs_bwd="bfloat16",
    dp="bfloat16",
    statistics="m_and_l",
    normalize_probs=True,
)
"""`jax.nn.dot_product_attention` with XLA: S, softmax and dS are float32 (`dense` only)."""

PRESETS: dict[str, Numerics] = {
    name.lower(): value for name, value in vars().items() if isinstance(value, Numerics)
}
"""The presets by name, in lower case."""


def get_preset(name: str) -> Numerics:
    """Returns the preset called `name`.

    Raises:
      ValueError: there is no such preset; the message lists the presets.
    """
    if name not in PRESETS:
        meant = did_you_mean(name, PRESETS)
        raise ValueError(f"unknown numerics {name!r}{meant}; presets are {', '.join(PRESETS)}")
    return PRESETS[name]
