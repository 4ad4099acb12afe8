"""The `Numerics` record: presets as in the design's table, overrides, and what a call derives."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from lowprec_attn import attention, numerics
from lowprec_attn.numerics import FLASH, MATCHED, POINTS, Numerics

F32, BF16 = "float32", "bfloat16"
TABLE = ("scores", "probs", "pv", "output", "saved_output", "delta", "probs_bwd", "dp", "ds")
INPUT = "None"  # takes the format of q
PRESETS = {
    "exact": (F32, F32, F32, INPUT, "float32", "do_o", F32, F32, F32),
    "flash": (F32, BF16, F32, BF16, "same", "do_o", BF16, F32, BF16),
    **dict.fromkeys(
        ("flash_attention_3", "torch_flash", "splash", "kohaku_fa", "tokamax"),
        (F32, BF16, F32, BF16, "same", "do_o", BF16, F32, BF16),
    ),
    "jax_pallas": (F32, BF16, F32, BF16, "same", "do_o_storage", BF16, F32, BF16),
    "jax_nn": (F32, BF16, F32, BF16, "same", "dp_p", BF16, BF16, F32),
    "published": (BF16, BF16, BF16, BF16, "same", "do_o", BF16, BF16, BF16),
    "published_as_compiled": (BF16, BF16, BF16, BF16, "same", "do_o", BF16, BF16, BF16),
    "published_eager": (BF16, BF16, BF16, BF16, "same", "do_o_storage", BF16, BF16, BF16),
    "probe": (BF16, BF16, BF16, BF16, "same", "do_o", BF16, BF16, BF16),
    "float32_output": (F32, BF16, F32, BF16, "float32", "do_o", BF16, F32, BF16),
    "auxiliary_output": (F32, BF16, F32, BF16, "auxiliary", "do_o", BF16, F32, BF16),
    "halves_output": (F32, BF16, F32, BF16, "halves", "do_o", BF16, F32, BF16),
    "delta_dp_p": (F32, BF16, F32, BF16, "same", "dp_p", BF16, F32, BF16),
    "normalized_delta": (F32, BF16, F32, BF16, "same", "normalized", BF16, F32, BF16),
    "corrected_after_cast": (F32, BF16, F32, BF16, "same", "after_cast", BF16, F32, BF16),
    "matched": (F32, BF16, F32, BF16, "halves", "do_o", BF16, F32, BF16),
    "matched_float32_output": (F32, BF16, F32, BF16, "float32", "do_o", BF16, F32, BF16),
    "stochastic_output": (
        *(F32, BF16, F32, "bfloat16:stochastic", "same", "do_o", BF16, F32, BF16),
    ),
    "standard": (BF16, BF16, F32, BF16, "same", "dp_p", BF16, BF16, BF16),
    "flash_attention_3_fp8": (
        *(F32, "float8_e4m3fn/x256", F32, BF16, "same", "do_o", BF16, F32, BF16),
    ),
    "transformer_engine_fp8": (
        *(F32, "float8_e4m3fn/x448", F32, BF16, "same", "do_o"),
        *("float8_e4m3fn/x448", F32, "float8_e5m2/tensor"),
    ),
}
# The points that the table above omits: float32 in every preset except these.
OTHER_POINTS = (
    *("shift", "rescale", "accumulator", "stats", "normalizer", "lse", "tile_grads"),
    *("query", "key", "value", "do", "output_bwd", "delta_value"),
)
ROUNDED_TOO = {
    "published": {"normalizer", "tile_grads"},
    "published_as_compiled": {"normalizer", "tile_grads"},
    "published_eager": {
        *("shift", "rescale", "accumulator", "stats", "normalizer", "tile_grads"),
    },
    "jax_pallas": {"delta_value"},
}
# The roundings of arrays as they are read.
IN_8_BITS: dict[str, dict[str, str]] = {
    "flash_attention_3_fp8": dict.fromkeys(("query", "key", "value"), "float8_e4m3fn/head"),
    "transformer_engine_fp8": {
        **dict.fromkeys(("query", "key", "value"), "float8_e4m3fn/tensor"),
        "do": "float8_e5m2/tensor",
    },
}
# Exponent and statistics, except where the exponent is open and the statistics are `lse`.
ROWS = {
    "exact": (None, "m_and_l"),
    "standard": (None, "m_and_l"),
    **dict.fromkeys(("flash_attention_3", "flash_attention_3_fp8"), ("scale_first", "lse")),
    "torch_flash": ("unfused", "lse"),
    "jax_pallas": ("unfused", "lse"),
    "splash": ("shift_first", "lse"),
    "kohaku_fa": ("shift_first", "m_and_l"),
    "tokamax": ("scale_first", "m_and_l"),
    "jax_nn": (None, "m_and_l"),
    **dict.fromkeys(("normalized_delta", "corrected_after_cast"), (None, "m_and_l")),
    "matched": ("whole_max", "m_and_l"),
    "matched_float32_output": ("whole_max", "m_and_l"),
}


def test_every_preset_is_tabled() -> None:
    assert PRESETS.keys() == numerics.PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_the_table(name: str) -> None:
    preset = numerics.get_preset(name)
    assert tuple(str(getattr(preset, point)) for point in TABLE) == PRESETS[name]
    assert preset is getattr(numerics, name.upper())
    assert preset.normalize_probs == (name in ("standard", "jax_nn"))
    rounded = {point for point in OTHER_POINTS if str(getattr(preset, point)) == BF16}
    assert rounded == ROUNDED_TOO.get(name, set())
    others = {point: str(getattr(preset, point)) for point in set(OTHER_POINTS) - rounded}
    in_8_bits = {point: text for point, text in others.items() if text != F32}
    assert in_8_bits == IN_8_BITS.get(name, {})
    kv_block = 512 if name.startswith("published") else None
    assert (preset.kv_block, preset.grads) == (kv_block, None)
    assert preset.needs_bits == (name == "stochastic_output")
    assert (preset.exponent, preset.statistics) == ROWS.get(name, (None, "lse"))
    rounded_probs = "rounded" if name.startswith("matched") else "unrounded"
    assert preset.row_sum == preset.recomputed_probs == rounded_probs
    assert preset.divided_in_dv == "probs"


def test_no_two_presets_are_one_arithmetic() -> None:
    assert len(set(numerics.PRESETS.values())) == len(numerics.PRESETS)


def test_only_an_lse_that_is_saved_is_rounded() -> None:
    with pytest.raises(ValueError, match=r"lse=bfloat16 .* use statistics='lse'"):
        Numerics(lse="bfloat16", statistics="m_and_l")
    with pytest.raises(ValueError, match="lse=bfloat16 is not saved"):
        numerics.EXACT.replace(lse="bfloat16", statistics="m_and_l")
    assert numerics.EXACT.replace(lse="bfloat16").statistics == "lse"
    assert numerics.EXACT.replace(lse="float32") == numerics.EXACT


def test_records_are_values() -> None:
    same = FLASH.replace(scores="float16").replace(scores="float32")
    assert same == FLASH
    assert hash(same) == hash(FLASH)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLASH.scores = numerics.get_rounding("float16")  # type: ignore[misc]


@pytest.mark.parametrize("point", POINTS)
def test_every_point_takes_every_format_and_mode(point: str) -> None:
    for fmt in numerics.FORMATS:
        for mode in numerics.MODES:
            changed = numerics.EXACT.replace(**{point: f"{fmt}:{mode}"})
            rounding = getattr(changed, point)
            assert (rounding.format.name, rounding.mode) == (fmt, mode)
            drawn = fmt != "float32" and mode in ("stochastic", "error_random_sign")
            assert changed.needs_bits == drawn
            assert str(numerics.get_rounding(str(rounding))) == str(rounding)


def test_text_names_what_differs_from_float32() -> None:
    assert str(FLASH.replace(kv_block=128)) == (
        "Numerics(probs=bfloat16, output=bfloat16, probs_bwd=bfloat16, ds=bfloat16, kv_block=128)"
    )


@pytest.mark.parametrize("name", numerics.PRESETS)
def test_a_preset_is_written_as_its_name(name: str) -> None:
    written = repr(numerics.get_preset(name))
    assert written.startswith("numerics.")
    assert eval(written, {"numerics": numerics}) == numerics.get_preset(name)


@pytest.mark.parametrize(
    ("point", "mode"), list(zip(numerics.POINTS, itertools.cycle(numerics.MODES), strict=False))
)
def test_what_is_written_gives_the_record_again(point: numerics.Point, mode: str) -> None:
    record = numerics.FLASH.replace(**{point: f"bf16_m3:{mode}"}, kv_block=64, delta="dp_p")
    written = repr(record)
    assert eval(written, {"Numerics": numerics.Numerics}) == record
    assert eval(repr(getattr(record, point)), vars(numerics)) == getattr(record, point)
    assert len(written) < 250


def test_a_format_without_a_name_is_written_out() -> None:
    own = dataclasses.replace(numerics.get_format("bfloat16"), fraction_bits=5)
    assert eval(repr(own), vars(numerics)) == own
    rounding = numerics.Rounding(own, "stochastic")
    assert eval(repr(rounding), vars(numerics)) == rounding


def test_help_on_the_public_function_opens_with_short_defaults() -> None:
    parameters = inspect.signature(attention.dot_product_attention).parameters
    assert repr(parameters["numerics"].default) == "numerics.FLASH"
    assert sum(len(repr(p.default)) for p in parameters.values() if p.default is not p.empty) < 150


def test_another_format_replaces_bfloat16_everywhere_and_keeps_modes() -> None:
    changed = numerics.STOCHASTIC_OUTPUT.with_format("float16")
    assert str(changed.output) == "float16:stochastic"
    assert str(changed.probs) == str(changed.ds) == str(changed.probs_bwd) == "float16"
    assert str(changed.scores) == "float32"
    assert changed.grads is None


@pytest.mark.parametrize(
    ("output", "dtype", "expected"),
    [
        (None, "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("bf16_m3", "bfloat16", "bfloat16"),
        ("float8_e5m2", "float16", "float16"),
        ("float16", "bfloat16", "float32"),  # bfloat16's significand is too short
        ("bfloat16", "float16", "float32"),  # float16's exponent is too short
        ("float32", "bfloat16", "float32"),
        ("bfloat16:error_positive", "bfloat16", "float32"),  # injected errors are not rounded
        ("bfloat16:stochastic", "bfloat16", "bfloat16"),
    ],
)
def test_output_is_stored_where_its_format_fits(
    output: str | None, dtype: str, expected: str
) -> None:
    assert FLASH.replace(output=output).output_dtype(jnp.dtype(dtype)) == jnp.dtype(expected)


def test_grads_default_to_the_format_of_their_input() -> None:
    assert str(FLASH.rounding_at("grads", np.dtype("float16"))) == "float16"
    assert (
        str(FLASH.replace(grads="bfloat16").rounding_at("grads", np.dtype("float32"))) == "bfloat16"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: numerics.get_preset("fast"),
            r"'fast' \(did you mean flash\?\); presets are exact, flash, flash_att",
        ),
        (lambda: FLASH.replace(score="bfloat16"), "'score'; points are query, key, scores"),
        (lambda: FLASH.replace(scores="bf15"), "unknown format 'bf15'; formats are float32"),
        (lambda: FLASH.replace(scores=None), "got None"),
        (lambda: FLASH.replace(probs="bfloat16:up"), "'up'"),
        (lambda: FLASH.replace(delta="o_do"), "delta must be one of do_o, .* got 'o_do'"),
        (lambda: FLASH.replace(saved_output="bf16"), "saved_output must be one of same.*'bf16'"),
        (lambda: FLASH.replace(row_sum="both"), "row_sum.*'both'"),
        (lambda: FLASH.replace(exponent="exp2"), "exponent must be one of None, shift_first, "),
        (lambda: FLASH.replace(statistics="l"), "statistics must be one of lse, m_and_l, got 'l'"),
        (
            lambda: FLASH.replace(mean_key="no"),
            "mean_key must be one of kept.* got 'no'",
        ),
        (
            lambda: FLASH.replace(mean_key="subtracted", delta="after_cast"),
            "changes nothing with delta='after_cast'.*use mean_key='kept'",
        ),
        (
            lambda: FLASH.replace(divisor="first_unrounded", normalize_probs=True),
            "divisor='first_unrounded' divides O.*use divisor='rounded'",
        ),
        (
            lambda: FLASH.replace(exponent="whole_max"),
            "exponent='whole_max' forms P̄ against m.*use statistics='m_and_l'",
        ),
        (
            lambda: numerics.TORCH_FLASH.replace(shift="bfloat16"),
            "which exponent='unfused' does not form; use exponent='shift_first'",
        ),
        (
            lambda: FLASH.replace(recomputed_probs="rounded"),
            "recomputed_probs='rounded' forms P̄ against m.*use statistics='m_and_l'",
        ),
        (
            lambda: MATCHED.replace(shift="bfloat16"),
            "which exponent='whole_max' does not form; use exponent='shift_first'",
        ),
        (
            lambda: FLASH.replace(divided_in_dv="do"),
            "divided_in_dv='do' has P̄ as rounded.*use recomputed_probs='rounded'",
        ),
        (lambda: FLASH.replace(divided_in_dv="dv"), "divided_in_dv must be one of probs, do"),
        (lambda: MATCHED.replace(recomputed_probs="no"), "recomputed_probs must be.*got 'no'"),
        (lambda: MATCHED.replace(normalize_probs=True), "after; use recomputed_probs='unrounded'"),
        (lambda: MATCHED.with_format("float16"), "probs=float16 has subnormals.*'bfloat16'"),
        (lambda: MATCHED.replace(probs="float8_e4m3fn"), "probs=float8_e4m3fn has subnormals"),
        (lambda: FLASH.replace(kv_block=0), "kv_block must be a positive.*got 0"),
        (lambda: FLASH.replace(kv_block=-64), "got -64"),
        (lambda: FLASH.replace(kv_block=64.0), "got 64.0"),
        (lambda: FLASH.replace(kv_block=True), "got True"),
        (lambda: FLASH.with_format("half"), "'half'"),
        (lambda: Numerics(ds="int8"), "'int8'"),  # type: ignore[arg-type]
    ],
)
def test_bad_records_say_what_is_wrong(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
