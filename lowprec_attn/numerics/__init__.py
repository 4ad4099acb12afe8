"""The vocabulary: formats, rounding, the `Numerics` record with its presets, row-max rules."""

from lowprec_attn.numerics.formats import FORMATS, Format, get_format
from lowprec_attn.numerics.presets import (
    AUXILIARY_OUTPUT,
    DELTA_DP_P,
    EXACT,
    FLASH,
    FLOAT32_OUTPUT,
    NORMALIZED_DELTA,
    PRESETS,
    PROBE,
    PUBLISHED,
    PUBLISHED_EAGER,
    STANDARD,
    STOCHASTIC_OUTPUT,
    get_preset,
)
from lowprec_attn.numerics.record import POINTS, SALTS, KvBlock, Numerics
from lowprec_attn.numerics.rounding import MODES, Rounding, counter_bits, get_rounding, round_to
from lowprec_attn.numerics.row_max import (
    MASKED,
    ROW_MAX_RULES,
    DynamicMax,
    PublishedMax,
    RowMax,
    StandardMax,
    get_row_max,
)

__all__ = [
    "AUXILIARY_OUTPUT",
    "DELTA_DP_P",
    "EXACT",
    "FLASH",
    "FLOAT32_OUTPUT",
    "FORMATS",
    "MASKED",
    "MODES",
    "NORMALIZED_DELTA",
    "POINTS",
    "PRESETS",
    "PROBE",
    "PUBLISHED",
    "PUBLISHED_EAGER",
    "ROW_MAX_RULES",
    "SALTS",
    "STANDARD",
    "STOCHASTIC_OUTPUT",
    "DynamicMax",
    "Format",
    "KvBlock",
    "Numerics",
    "PublishedMax",
    "Rounding",
    "RowMax",
    "StandardMax",
    "counter_bits",
    "get_format",
    "get_preset",
    "get_rounding",
    "get_row_max",
    "round_to",
]
