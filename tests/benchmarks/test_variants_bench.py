"""The page of the Hopper kernels shows the times of its records."""

import json
import re

from command import ROOT

from benchmarks.variants import IMPLEMENTATIONS, VARIANTS


def test_the_page_has_the_times_of_the_records():
    page = (ROOT / "docs" / "developers" / "hopper.md").read_text()
    table = page.split("| causal |", 1)[1].split("\n\n")[0]
    said = re.findall(r"([\d.]+): ([\d.–]+), ([\d.–]+)", table)
    records = (ROOT / "results" / "hopper" / "variants_18_h200.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in records]
    found = {
        (row["variant"], row["shape"], row["implementation"]): row
        for row in rows
        if row.get("pass") == "both"
    }
    hopper, *others = IMPLEMENTATIONS
    expected = []
    for variant in VARIANTS:
        for shape in ("gpt2", "long64", "long128"):
            ratios = [found[variant, shape, name].get("ratio") for name in others]
            words = ["–" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            expected.append((f"{found[variant, shape, hopper]['ms']:.2f}", *words))
    assert said == expected
    forward = {
        (row["variant"], row["shape"]): row["ms"]
        for row in rows
        if row.get("pass") == "forward" and row["implementation"] == hopper
    }
    capped = [forward["soft_cap", name] / forward["plain", name] for name in ("gpt2", "long64")]
    assert [f"{ratio:.1f}" for ratio in capped] == ["2.0", "2.5"]
