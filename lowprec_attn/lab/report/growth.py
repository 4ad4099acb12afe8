"""Compares the growth of scores with the negative control of the same seed and batches."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lowprec_attn.lab.records import ArmRecord, largest_scores
from lowprec_attn.lab.report.spans import NONE, number, span
from lowprec_attn.tables import with_legend

_LEGEND = (
    "Score: the largest |score| of all layers by step, least and largest over the seeds. Over the "
    "control's: its ratio to the negative control's score with the same seed and batches, as a "
    "geometric mean; in brackets in how many pairs it is above 1. Runs that have ended by a step "
    "are left out."
)


def growth_table(records: Sequence[ArmRecord], steps: Sequence[int]) -> str | None:
    """Returns a Markdown table with two rows per arm; None without two seeds of a negative control.

    Args:
      records: the records of the arms.
      steps: the steps of the columns.
    """
    runs: dict[str, dict[int, Mapping[int, float]]] = {}
    titles: dict[str, str] = {}
    control = None
    for record in records:
        runs.setdefault(record.arm.name, {})[record.seed] = _largest(record)
        titles[record.arm.name] = record.arm.title
        if record.arm.control == "negative":
            control = record.arm.name
    if control is None or len(runs[control]) < 2:
        return None
    rows = []
    for name, of_seeds in runs.items():
        rows.append([titles[name], "score", *(_span(of_seeds.values(), step) for step in steps)])
        if name != control:
            pairs = [(run, runs[control][s]) for s, run in of_seeds.items() if s in runs[control]]
            rows.append(["", "over the control's", *(_ratio(pairs, step) for step in steps)])
    return with_legend(_LEGEND, ["arm", "", *map(str, steps)], rows)


def _largest(record: ArmRecord) -> dict[int, float]:
    """Returns the largest |score| of all layers by step; leaves out steps with NaN or infinity."""
    found = largest_scores(record.signals)
    return {step: max(values) for step, values in found.items() if all(map(math.isfinite, values))}


def _span(runs: Iterable[Mapping[int, float]], step: int) -> str:
    return span(run[step] for run in runs if step in run)


def _ratio(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float]]], step: int) -> str:
    ratios = [run[step] / other[step] for run, other in pairs if step in run and step in other]
    if not ratios:
        return NONE
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{number(mean)} ({sum(ratio > 1 for ratio in ratios)} of {len(ratios)})"
