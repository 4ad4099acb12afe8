"""Draws docs/images/first_sight.png: python results/first_sight/figure.py (in the checkout)."""

import json
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ARMS = {
    "exact": "exact",
    "flash": "flash",
    "probe": "probe",
    "probe_float32_saved": "probe, saved_output=float32",
}


def main() -> None:
    """One panel an arm, one line a layer."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 4, sharey=True)
    for axis, (arm, title) in zip(axes, ARMS.items(), strict=True):
        records = [json.loads(line) for line in (HERE / f"{arm}.jsonl").open()]
        signals = {r["step"]: r["signals"] for r in records if "signals" in r}
        for i in range(12):
            values = [max(s[f"layer_{i}"]["score_maximum"]) for s in signals.values()]
            colour = "red" if i == 1 else colormaps["viridis"](i / 12)
            axis.plot(
                list(signals), values, color=colour, lw=2 if i == 1 else 1, label=f"layer {i}"
            )
        axis.set(title=title, xlabel="step", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("largest |score|")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=12, fontsize=7
    )
    figure.savefig(HERE.parents[1] / "docs" / "images" / "first_sight.png", dpi=110)


if __name__ == "__main__":
    main()
