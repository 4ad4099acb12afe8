"""Colours, marks and letter sizes of all figures: a run's page, the lab's and the benchmarks'."""

from typing import Any

DPI = 110
"""Dots an inch of a figure in a file."""

# Points.
FRONT = 11  # legible where a phone shows 390 pixels of the figure
TITLE, TEXT, SMALL = 9, 8, 7

GRID: dict[str, Any] = {"alpha": 0.3}
LIMIT = "gray"
"""A value that something is compared with."""

# What an arithmetic does. Near Okabe and Ito's colours, which those who confuse red and green tell
# apart, on white and on black. Each also has a dash or a mark of its own, for print.
BREAKS, BREAKS_TOO, HOLDS, FLOAT32 = "#d55e00", "#cc79a7", "#009e73", "#2f8fd0"

# A panel of the lab has one arm, and its control behind it.
ARM, CONTROL = "C0", "0.75"
CHOSEN_LAYER = "red"
EXPLODED: dict[str, Any] = {"color": "red", "marker": "o", "markersize": 4, "linestyle": "none"}
NOT_FINITE: dict[str, Any] = {"color": "k", "marker": "x", "markersize": 5, "linestyle": "none"}

# A run's page, in its light and its dark theme.
EXPLOSION, ALARM, THRESHOLD = "#d62728", "#e08214", "#8c8c8c"
RAW, SMOOTHED, VALIDATION = "#8fb8de", "#1f77b4", "#2ca02c"

# Kernels in a benchmark.
OURS, OTHERS = "tab:blue", "tab:gray"
