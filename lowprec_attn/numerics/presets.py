"""Named `Numerics`: what the kernels, codes and cures of the field compute."""

from lowprec_attn.numerics.record import Numerics

EXACT = Numerics(saved_output="float32")
"""float32 at every point; only O is handed on in the input's format."""

FLASH = Numerics(
    probs="bfloat16",  # type: ignore[arg-type]
    output="bfloat16",  # type: ignore[arg-type]
    probs_bwd="bfloat16",  # type: ignore[arg-type]
    ds="bfloat16",  # type: ignore[arg-type]
)
"""FlashAttention-2 and -3, cuDNN: only operands of matrix products and O are rounded."""

PUBLISHED = FLASH.replace(
    scores="bfloat16",
    pv="bfloat16",
    rescale="bfloat16",
    accumulator="bfloat16",
    stats="bfloat16",
    dp="bfloat16",
)
"""The public code of arXiv 2510.04212: PyTorch operations on bfloat16 arrays."""

PROBE = PUBLISHED.replace(rescale="float32", accumulator="float32", stats="float32")
"""`published` without rounding of the running state; meant for all keys in one step."""

FLOAT32_OUTPUT = FLASH.replace(saved_output="float32")
"""`flash` where δ sees O before its rounding."""

AUXILIARY_OUTPUT = FLASH.replace(saved_output="auxiliary")
"""`flash` where δ sees O′, formed from unrounded P̄ (Attn-QAT, arXiv 2603.00040)."""

DELTA_DP_P = FLASH.replace(delta="dp_p")
"""`flash` with δ = rowsum(dP ∘ P), which does not see O at all."""

STOCHASTIC_OUTPUT = FLASH.replace(output="bfloat16:stochastic")
"""`flash` with O rounded stochastically: no persistent sign."""

STANDARD = Numerics(
    scores="bfloat16",  # type: ignore[arg-type]
    probs="bfloat16",  # type: ignore[arg-type]
    output="bfloat16",  # type: ignore[arg-type]
    delta="dp_p",
    probs_bwd="bfloat16",  # type: ignore[arg-type]
    dp="bfloat16",  # type: ignore[arg-type]
    ds="bfloat16",  # type: ignore[arg-type]
    normalize_probs=True,
)
"""Unfused attention under autocast: P is normalised, then rounded (`dense` only)."""

PRESETS: dict[str, Numerics] = {
    "exact": EXACT,
    "flash": FLASH,
    "published": PUBLISHED,
    "probe": PROBE,
    "float32_output": FLOAT32_OUTPUT,
    "auxiliary_output": AUXILIARY_OUTPUT,
    "delta_dp_p": DELTA_DP_P,
    "stochastic_output": STOCHASTIC_OUTPUT,
    "standard": STANDARD,
}


def get_preset(name: str) -> Numerics:
    """The preset called `name`.

    Raises:
      ValueError: no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown numerics {name!r}; presets are {', '.join(PRESETS)}")
    return PRESETS[name]
