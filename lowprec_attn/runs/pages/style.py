"""Colours, markers and font sizes of all figures: of run pages, the lab and the benchmarks."""

from typing import Any

DPI = 110
"""The resolution of a figure in a file, in dots per inch."""

WIDTH = 4.8
"""The width of a figure in inches. On a phone, 360 pixels wide, 10 points then are 10 pixels."""

# Font sizes in points.
FRONT = 11  # of the front figure
TITLE, TEXT, SMALL = 10, 10, 9  # of figures of that width
CHARACTERS_PER_INCH = 13
"""How many letters of the size `TEXT` stand side by side in an inch."""

GRID: dict[str, Any] = {"alpha": 0.3}
LIMIT = "gray"
"""The colour of a value with which something is compared."""

# Colours for what an arithmetic does. They are close to those of Okabe and Ito, which readers with
# red-green colour blindness can tell apart, on white and on black. Each also has a dash or marker
# of its own, for print.
BREAKS, BREAKS_TOO, HOLDS, FLOAT32 = "#d55e00", "#cc79a7", "#009e73", "#2f8fd0"

# A panel of the lab shows one arm, with its control behind it in a grey that stands out from white
# and, inverted, from a dark page.
ARM, CONTROL = "C0", "0.55"
CHOSEN_LAYER = "red"
EXPLODED: dict[str, Any] = {"color": "red", "marker": "o", "markersize": 4, "linestyle": "none"}
NOT_FINITE: dict[str, Any] = {"color": "k", "marker": "x", "markersize": 5, "linestyle": "none"}

# A run's page, for both the light and the dark theme.
EXPLOSION, ALARM, THRESHOLD = "#d62728", "#e08214", "#8c8c8c"
RAW, SMOOTHED, VALIDATION = "#8fb8de", "#1f77b4", "#2ca02c"

# Kernels in a benchmark.
OURS, OTHERS = "tab:blue", "tab:gray"
