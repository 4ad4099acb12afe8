"""Tabulates how often `lowprec-attn diagnose` was right on runs, from `benchmarks.verdicts`.

A run is *lost* if it broke (it exploded, or a value was not finite), or if its last losses lie at
least 0.7 nats above those of the negative control. The cause follows from its arithmetic: it is a
mechanism to which the run is open (`report.mechanism`), or the learning rate if there is none.
"""

import collections
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowprec_attn.diagnostics.verdict import Kind
from lowprec_attn.lab.archive import RecordError
from lowprec_attn.lab.report.mechanism import NEITHER
from lowprec_attn.lab.report.outcomes import ArmOutcome, wilson
from lowprec_attn.runs.instability.explosion import EXCESS_NATS
from lowprec_attn.tables import markdown, with_legend

FILE = "verdicts.ndjson"
_NAMES: dict[str, Kind] = {"A": "row_sums", "B": "delta", NEITHER: "rate"}


class Diagnosis(NamedTuple):
    """One call of `lowprec-attn diagnose`.

    Attributes:
      arm: the arm of the run.
      seed: the seed of the run.
      causes: the kinds of verdict that name the cause of the loss; none if the run was not lost.
      before: how many steps before the break the run was diagnosed; None for the newest checkpoint.
        For a run that held, the break is that of its seed's positive control, else its own end.
      kind: the kind of the leading verdict; None if there is no warning.
      at_batch: whether the diagnosis notes a spike of the loss that points at its batch.
    """

    arm: str
    seed: int
    causes: tuple[Kind, ...]
    before: int | None
    kind: Kind | None
    at_batch: bool


def read(directory: Path) -> list[dict[str, Any]]:
    """Returns the lines of `verdicts.ndjson`, one per diagnosis; none if there is no file."""
    path = directory / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdict_table(directory: Path, found: Iterable[ArmOutcome]) -> str | None:
    """Returns tables of leading verdicts by arm, and of hits, causes and false alarms.

    Both tables distinguish how long before the break the diagnosed checkpoint was saved.

    Args:
      directory: the directory of the records, which may hold `verdicts.ndjson`.
      found: the outcomes of the records. Diagnoses of other runs are left out.

    Returns:
      The two tables as text, or None if no run was diagnosed.

    Raises:
      RecordError: the file is damaged.
    """
    runs = {
        record.name: (outcome.arm.name, seed, causes(outcome, seed))
        for outcome in found
        for seed, record in outcome.records.items()
    }
    try:
        lines = [line for line in read(directory) if line["run"] in runs]
        diagnoses = [
            Diagnosis(
                *runs[line["run"]],
                line["before"],
                line["kind"] if line["code"] else None,
                line["at_batch"],
            )
            for line in lines
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{directory / FILE} does not hold diagnoses ({error!r})") from error
    order = {arm: place for place, (arm, *_) in enumerate(runs.values())}
    diagnoses.sort(key=lambda one: (order[one.arm], not one.causes))
    return f"{_by_arm(diagnoses)}\n{_counts(diagnoses)}" if diagnoses else None


def causes(outcome: ArmOutcome, seed: int) -> tuple[Kind, ...]:
    """Returns the kinds of verdict that name why a run was lost; none if it was not lost."""
    letters = [part[0] for part in outcome.mechanism.split("), ")]  # of the form A (…), B (…)
    return tuple(_NAMES[letter] for letter in letters) if outcome.is_lost(seed) else ()


def _by_arm(diagnoses: Sequence[Diagnosis]) -> str:
    distances = _distances(diagnoses)
    legend = (
        "The kind that leads the verdict of `lowprec-attn diagnose RUN`, at the newest checkpoint "
        "and at the newest one so many steps before the run broke (explosion, or a value that was "
        "not finite); where it held, before its seed's positive control did. "
        f"{NEITHER}: no warning, exit code 0. Lost: broke, or at the end {EXCESS_NATS} nats or "
        "more above the negative control. Batch: runs of which, at any of these checkpoints, a "
        "spike is noted that points at its batch."
    )
    rows = []
    for arm, named in dict.fromkeys((one.arm, one.causes) for one in diagnoses):
        of_arm = [one for one in diagnoses if (one.arm, one.causes) == (arm, named)]
        runs = len({one.seed for one in of_arm})
        what = "lost" if named else "not lost"
        cells = [_kinds(one for one in of_arm if one.before == n) for n in distances]
        noted = len({one.seed for one in of_arm if one.at_batch})
        rows.append([arm, f"{runs} {what}", " or ".join(named) or NEITHER, *cells, str(noted)])
    header = ["arm", "runs", "names the cause", *map(_title, distances), "batch"]
    return with_legend(legend, header, rows)


def _kinds(diagnoses: Iterable[Diagnosis]) -> str:
    counts = collections.Counter(one.kind or NEITHER for one in diagnoses)
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "no checkpoint"


def _counts(diagnoses: Sequence[Diagnosis]) -> str:
    rows = []
    for distance in _distances(diagnoses):
        of_all = [one for one in diagnoses if one.before == distance]
        lost = [one for one in of_all if one.causes]
        cells = [
            _share(one.kind is not None for one in lost),
            _share(one.kind in one.causes for one in lost),
            _share(one.kind is not None for one in of_all if not one.causes),
        ]
        rows.append([_title(distance), *cells])
    header = ["checkpoint", "lost, warned", "lost, cause named", "not lost, warned"]
    return f"Of all arms, with Wilson's 95 % intervals:\n\n{markdown(header, rows)}"


def _share(found: Iterable[bool]) -> str:
    hits = list(found)
    if not hits:
        return NEITHER
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)} of {len(hits)} ({low:.0%} to {high:.0%})"


def _distances(diagnoses: Iterable[Diagnosis]) -> list[int | None]:
    """Returns the distances before the break, the farthest first; the newest checkpoint is last."""
    found = {one.before for one in diagnoses}
    return sorted(found, key=lambda n: -1 if n is None else n, reverse=True)


def _title(distance: int | None) -> str:
    return "newest" if distance is None else f"{distance} before"
