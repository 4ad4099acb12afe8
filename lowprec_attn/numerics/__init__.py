"""The vocabulary: formats, rounding, the `Numerics` record with its presets, row-max rules."""

from lowprec_attn.numerics.formats import FORMATS, Format, get_format
from lowprec_attn.numerics.presets import (
    AUXILIARY_OUTPUT,
    DELTA_DP_P,
    EXACT,
    FLASH,
    FLOAT32_OUTPUT,
    PRESETS,
    PROBE,
    PUBLISHED,
    STANDARD,
    STOCHASTIC_OUTPUT,
    get_preset,
)
from lowprec_attn.numerics.record import POINTS, Numerics
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
    "POINTS",
    "PRESETS",
    "PROBE",
    "PUBLISHED",
    "ROW_MAX_RULES",
    "STANDARD",
    "STOCHASTIC_OUTPUT",
    "DynamicMax",
    "Format",
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
