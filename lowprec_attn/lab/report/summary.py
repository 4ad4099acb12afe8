"""Summarizes several experiments: outcomes of all arms, and what the warnings were worth."""

from collections.abc import Mapping, Sequence

from lowprec_attn.counts import many
from lowprec_attn.lab.records import ArmRecord, ran_away, runaway, tokens_read
from lowprec_attn.lab.report.outcomes import ArmOutcome, Word, outcomes, undecided
from lowprec_attn.lab.report.spans import NONE
from lowprec_attn.lab.report.tables import share_interval
from lowprec_attn.lab.report.warnings import loss_table, warning_table
from lowprec_attn.tables import markdown, with_legend

_COUNTED: tuple[Word, ...] = ("not finite", "censored", "growing")


def summary(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """Returns Markdown with counts, a row per arm, and tables of warnings, spikes and runaways.

    Args:
      experiments: the records of runs by the name of their experiment.
    """
    rows, reasons, read = [], [], []
    for name, records in experiments.items():
        found = outcomes(records)
        rows += [[name, *_row(outcome)] for outcome in found]
        read.append(f"- {name}: {tokens_read(records)}")
        reasons += [f"- {name}: {reason}" for reason in undecided(found)]
    header = ["experiment", "arm", "mechanism", "role", "exploded", "95 % interval"]
    header += ["median step", *_COUNTED]
    parts = [
        _counted(experiments),
        markdown(header, rows),
        "Tokens read:\n",
        "\n".join(read) + "\n",
    ]
    if reasons:
        parts.append("Where a control fails or is missing, nothing is decided:\n")
        parts.append("\n".join(reasons) + "\n")
    warnings = warning_table(experiments)
    parts += [warnings] if warnings else []
    parts.append(loss_table(experiments))
    runaways = runaway_table(experiments)
    return "\n".join([*parts, runaways] if runaways else parts)


def _counted(experiments: Mapping[str, Sequence[ArmRecord]]) -> str:
    """Returns a sentence that counts the outcomes of all runs."""
    runs = [record for records in experiments.values() for record in records]
    exploded = sum(record.explosion is not None for record in runs)
    held = sum(record.held for record in runs)
    not_finite = len(runs) - exploded - held
    return (
        f"Of {many(len(runs), 'run')} {exploded} exploded, {not_finite} ended at a value that was "
        f"not finite without an explosion before, and {held} held.\n"
    )


def runaway_table(experiments: Mapping[str, Sequence[ArmRecord]]) -> str | None:
    """Returns a table of how often scores ran away, by the outcome of the run.

    It has a row per experiment with runs that were long enough to be judged, and a row of all of
    them. Without such runs the result is None.

    Args:
      experiments: the records of runs by the name of their experiment.
    """
    judged = {
        name: [record for record in records if record.large_heads]
        for name, records in experiments.items()
    }
    judged = {name: records for name, records in judged.items() if records}
    if not judged:
        return None
    everything = [record for records in judged.values() for record in records]
    rows = [
        [name, *_runaway_cells(records)] for name, records in [*judged.items(), ("all", everything)]
    ]
    legend = (
        f"{runaway(record.runaway_rule for record in everything)}. Counted are runs that were "
        "recorded so far, by what became of them later. A runaway of the negative control is a "
        "false alarm."
    )
    header = ["experiment", "negative control", "others that held", "exploded", "not finite"]
    return with_legend(legend, header, rows)


def _runaway_cells(records: Sequence[ArmRecord]) -> list[str]:
    groups: dict[str, list[ArmRecord]] = {"control": [], "held": [], "exploded": [], "broke": []}
    for record in records:
        held = "control" if record.arm.control == "negative" else "held"
        broke = "broke" if record.explosion is None else "exploded"
        groups[held if record.held else broke].append(record)
    return [ran_away(group) for group in groups.values()]


def _row(outcome: ArmOutcome) -> list[str]:
    median = outcome.median_explosion
    return [
        outcome.arm.name,
        outcome.mechanism,
        f"{outcome.arm.control} control" if outcome.arm.control else "",
        f"{outcome.exploded} of {len(outcome.records)}",
        share_interval(outcome),
        NONE if median is None else f"{median:,.0f}",
        *(str(outcome.count(word) or "") for word in _COUNTED),
    ]
