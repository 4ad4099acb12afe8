"""Several experiments on one page: what became of every arm, and what the warnings were worth."""

from collections.abc import Mapping, Sequence

from lowprec_attn.lab.outcomes import ArmOutcome, outcomes, undecided
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.lab.warnings import loss_table, warning_table
from lowprec_attn.tables import markdown


def summary(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """Markdown: a row an arm of every experiment, then `warning_table` and `loss_table`.

    Args:
      experiments: runs by the name of their experiment.
    """
    rows, reasons = [], []
    for name, records in experiments.items():
        found = outcomes(records)
        rows += [[name, *_row(outcome)] for outcome in found]
        reasons += [f"- {name}: {reason}" for reason in undecided(found)]
    header = ["experiment", "arm", "role", "exploded", "95 % interval", "median step", "censored"]
    parts = [markdown(header, rows)]
    if reasons:
        parts.append("Where a control fails or is missing, nothing is decided:\n")
        parts.append("\n".join(reasons) + "\n")
    warnings = warning_table(experiments)
    return "\n".join([*parts, *([warnings] if warnings else []), loss_table(experiments)])


def _row(outcome: ArmOutcome) -> list[str]:
    median = outcome.median_explosion
    return [
        outcome.arm.name,
        f"{outcome.arm.control} control" if outcome.arm.control else "",
        f"{outcome.exploded} of {len(outcome.records)}",
        "{:.0%} to {:.0%}".format(*outcome.interval),
        "–" if median is None else f"{median:,.0f}",
        str(sum(word == "censored" for word in outcome.words.values()) or ""),
    ]
