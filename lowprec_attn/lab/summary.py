"""Several experiments on one page: what became of every arm, and what the warnings were worth."""

import textwrap
from collections.abc import Mapping, Sequence

from lowprec_attn.lab.outcomes import ArmOutcome, outcomes, undecided
from lowprec_attn.lab.records import ArmRecord, tokens_read
from lowprec_attn.lab.warnings import loss_table, warning_table
from lowprec_attn.runs.explosion import (
    RUNAWAY_AFTER_STEPS,
    RUNAWAY_BEFORE_STEPS,
    RUNAWAY_FACTOR,
)
from lowprec_attn.tables import markdown


def summary(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """Markdown: a row an arm of every experiment, `warning_table`, `loss_table`, `runaway_table`.

    Args:
      experiments: runs by the name of their experiment.
    """
    rows, reasons, read = [], [], []
    for name, records in experiments.items():
        found = outcomes(records)
        rows += [[name, *_row(outcome)] for outcome in found]
        read.append(f"- {name}: {tokens_read(records)}")
        reasons += [f"- {name}: {reason}" for reason in undecided(found)]
    header = ["experiment", "arm", "mechanism", "role", "exploded", "95 % interval"]
    header += ["median step", "censored"]
    parts = [markdown(header, rows), "Tokens read:\n", "\n".join(read) + "\n"]
    if reasons:
        parts.append("Where a control fails or is missing, nothing is decided:\n")
        parts.append("\n".join(reasons) + "\n")
    warnings = warning_table(experiments)
    parts += [warnings] if warnings else []
    return "\n".join([*parts, loss_table(experiments), runaway_table(experiments)])


def runaway_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """How often scores ran away, by what became of the run; one row an experiment, one of all.

    Args:
      experiments: runs by the name of their experiment.
    """
    everything = [record for records in experiments.values() for record in records]
    rows = [
        [name, *_runaway_cells(records)]
        for name, records in [*experiments.items(), ("all", everything)]
    ]
    legend = (
        f"Runaway: a layer's largest |score| is above {RUNAWAY_FACTOR:g} times its median of the "
        f"{RUNAWAY_BEFORE_STEPS:,} steps before, and still is {RUNAWAY_AFTER_STEPS} steps later. "
        "Counted are runs with signals over so many steps. In brackets: at the earliest step at "
        "which that can be, where the median is of a run's first steps, in which all scores grow. "
        "A runaway of the negative control is a false alarm."
    )
    header = ["experiment", "negative control", "others that held", "exploded"]
    return f"{textwrap.fill(legend, 100)}\n\n{markdown(header, rows)}"


def _runaway_cells(records: Sequence[ArmRecord]) -> list[str]:
    groups: dict[str, list[ArmRecord]] = {"control": [], "held": [], "exploded": []}
    for record in records:
        steps = sorted(record.signals)
        if steps[-1] - steps[0] < RUNAWAY_BEFORE_STEPS + RUNAWAY_AFTER_STEPS:
            continue
        held = "control" if record.arm.control == "negative" else "held"
        groups[held if record.explosion is None else "exploded"].append(record)
    return [_ran_away(group) for group in groups.values()]


def _ran_away(records: Sequence[ArmRecord]) -> str:
    if not records:
        return "–"
    after = [
        record.runaway.step - min(record.signals)
        for record in records
        if record.runaway is not None
    ]
    earliest = sum(steps <= RUNAWAY_BEFORE_STEPS for steps in after)
    return f"{len(after)} of {len(records)}" + (f" ({earliest})" if earliest else "")


def _row(outcome: ArmOutcome) -> list[str]:
    median = outcome.median_explosion
    return [
        outcome.arm.name,
        outcome.mechanism,
        f"{outcome.arm.control} control" if outcome.arm.control else "",
        f"{outcome.exploded} of {len(outcome.records)}",
        "{:.0%} to {:.0%}".format(*outcome.interval),
        "–" if median is None else f"{median:,.0f}",
        str(sum(word == "censored" for word in outcome.words.values()) or ""),
    ]
