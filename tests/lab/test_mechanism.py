"""The report's mechanisms A and B, checked against the arithmetic and the records."""

import pytest
from command import ROOT

from lowprec_attn.lab import archive
from lowprec_attn.lab.report.mechanism import mechanism

MODEL = {
    **dict.fromkeys(("layers", "heads"), 2),
    **dict.fromkeys(("width", "context", "vocab_size"), 16),
    "init": "gpt2",
    "scale_placement": "scores",
    "activation_dtype": "bfloat16",
}


def of(numerics, **fields):
    attention = {"numerics": numerics, "row_max": "standard", **fields}
    return mechanism({"model": MODEL, "attention": attention})


@pytest.mark.parametrize(
    ("numerics", "points", "found"),
    [
        ("exact", {}, "–"),
        ("exact", {"lse": "bf16_m2"}, "A (lse)"),
        ("exact", {"lse": "bf16_m2", "delta": "normalized"}, "A (lse)"),
        ("exact", {"row_sum": "rounded"}, "–"),  # the sum of float32 P̄
        ("exact", {"output": "bf16_m2"}, "–"),  # δ reads a float32 O
        ("exact", {"output": "bf16_m2", "saved_output": "same"}, "B (output)"),
        ("exact", {"saved_output": "same"}, "B (output)"),  # in the format of q
        ("exact", {"output_bwd": "bf16_m1"}, "B (output_bwd)"),
        ("exact", {"delta_value": "bf16_m1"}, "B (delta_value)"),
        ("exact", {"pv": "bf16_m2"}, "B (pv)"),
        ("exact", {"pv": "bf16_m2", "delta": "dp_p"}, "–"),
        ("exact", {"pv": "bf16_m2", "saved_output": "auxiliary"}, "B (saved_output)"),
        ("flash", {"row_sum": "rounded"}, "A (row_sum), B (output)"),
        ("published", {}, "A (normalizer), B (pv, output)"),
        ("published", {"delta": "normalized"}, "A (normalizer)"),
        ("halves_output", {}, "–"),
        ("matched", {}, "–"),
        ("matched", {"saved_output": "same"}, "B (output)"),
        ("matched", {"row_sum": "unrounded"}, "A (recomputed_probs)"),
        ("matched", {"recomputed_probs": "unrounded"}, "A (row_sum)"),
        ("published", {"saved_output": "halves"}, "A (normalizer), B (pv)"),
        ("published", {"delta": "after_cast"}, "A (normalizer)"),
        ("corrected_after_cast", {"delta_value": "bf16_m1"}, "–"),
    ],
)
def test_the_mechanism_is_read_off_the_points(numerics, points, found):
    assert of(numerics, points=points) == found


def test_an_arithmetic_of_one_layer_or_head_counts():
    assert of("exact", layers={"1": {"numerics": "flash"}}) == "B (output)"
    assert of("flash", heads={"0": {"points": {"lse": "bfloat16"}}}) == "A (lse), B (output)"


def test_in_the_records_rows_of_p_are_off_from_the_start_under_mechanism_a_alone():
    checked = set()
    experiments = [path for path in (ROOT / "results" / "failure").iterdir() if path.is_dir()]
    runs = [run for directory in experiments for run in archive.read(directory)]
    for run in runs:
        layers = run.signals[min(run.signals)]
        if run.header["config"].get("resume_from") or any(
            "p_row_sum_error_rms" not in layer for layer in layers
        ):
            continue
        off = max(float(x) for layer in layers for x in layer["p_row_sum_error_rms"])
        found = mechanism(run.header["config"])
        assert (off > 1e-5) == found.startswith("A"), (run.name, off, found)
        checked.add(found)
    assert len(checked) > 5
