"""Tabulates means of δ's error at one step of each run, measured by `benchmarks.delta_bias`."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowprec_attn.lab.archive import RecordError
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.lab.report.spans import NONE, span
from lowprec_attn.tables import with_legend

Line = Mapping[str, Any]
"""A measurement of a run.

It holds the run's name, the step and the number of draws, and for each layer and head the mean of
δ's error over its RMS, with the standard error.
"""


def bias_table(directory: Path, records: Sequence[ArmRecord]) -> str | None:
    """Returns a table with a row per arm and layer and a column per seed, or None.

    Args:
      directory: the directory of the records, which may hold `bias.ndjson`. Without that file, or
        without measurements of the records' runs, there is no table.
      records: the records in the directory. Measurements of other runs are left out.

    Raises:
      RecordError: the file is damaged, or a record has no scores at the step of the measurement.
    """
    path = directory / "bias.ndjson"
    if not path.exists():
        return None
    runs = {record.name: record for record in records}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        measured = [(line, runs[line["run"]]) for line in lines if line["run"] in runs]
        return _table(measured) if measured else None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordError(f"{path} does not belong to the records beside it ({error!r})") from error


def _table(measured: Sequence[tuple[Line, ArmRecord]]) -> str:
    seeds = sorted({record.seed for _, record in measured})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for line, record in measured:
        for layer, cell in _cells(line, record):
            rows.setdefault((record.arm.title, layer), {})[record.seed] = cell
    steps, draws = ({line[name] for line, _ in measured} for name in ("step", "draws"))
    errors = [error for line, _ in measured for heads in line["error"] for error in heads]
    legend = (
        f"The mean of δ's error over its RMS at step {_several(steps)}, over {_several(draws)} "
        f"sequences (`python -m benchmarks.delta_bias`): of a layer the smallest and largest of "
        f"its heads, each with a standard error of {span(errors, '{:.2g}'.format)}; in "
        "brackets the largest |score|, in the layer that has it. Then the mean of all heads with "
        "its standard error, as if they were independent."
    )
    body = [[*row, *(cells.get(seed, NONE) for seed in seeds)] for row, cells in rows.items()]
    return with_legend(legend, ["arm", "layer", *(f"seed {seed}" for seed in seeds)], body)


def _several(numbers: set[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _cells(line: Line, record: ArmRecord) -> Iterator[tuple[str, str]]:
    means, step = line["mean"], line["step"]
    scores = [record.largest("score_maximum", step, layer) for layer in range(len(means))]
    for layer, heads in enumerate(means):
        score = f" ({scores[layer]:,.0f})" if scores[layer] == max(scores) else ""
        yield str(layer), span(heads, "{:+.4f}".format) + score
    every = [mean for heads in means for mean in heads]
    error = math.hypot(*(error for heads in line["error"] for error in heads)) / len(every)
    yield "all", f"{sum(every) / len(every):+.4f} ± {error:.4f}"
