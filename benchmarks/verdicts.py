"""Records what `lowprec-attn diagnose` says of an experiment's runs, at several checkpoints each.

    lowprec-attn lab collect runs/verdict_cpu results/failure/verdict_cpu
    python -m benchmarks.verdicts runs/verdict_cpu results/failure/verdict_cpu

A run is diagnosed at its newest checkpoint, which is the command's default. It is also diagnosed at
the newest checkpoints that lie `--before` steps before its end. The end of a run is the step at
which its loss exploded or a value was not finite. If a run held, the end of its seed's positive
control is taken; if that held too, the run's own last step.

Each diagnosis adds a JSON line to `verdicts.ndjson` beside the records, from which `lowprec-attn
lab report` makes a table. The same command continues after an interruption.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import program
from lowprec_attn.commands.diagnose import EXIT_FOUND
from lowprec_attn.commands.main import main as lowprec_attn
from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.errors import RunError
from lowprec_attn.files import append_line
from lowprec_attn.lab import records
from lowprec_attn.lab.records import ArmRecord
from lowprec_attn.lab.report.verdicts import FILE, read
from lowprec_attn.runs.instability import rollbacks
from lowprec_attn.runs.instability.incidents import AT_ITS_BATCH
from lowprec_attn.runs.run_dir import RunDir

BEFORE = (400, 200, 100, 50)
_FIRST = 50  # before this step a model has learned nothing that could be judged


def steps(
    record: ArmRecord, control: ArmRecord | None, before: Sequence[int]
) -> dict[int | None, int | None]:
    """Returns the step of each diagnosis by its distance from the end of the run.

    None stands for the newest checkpoint, both as a step and as a distance.
    """
    ends = (record.broke, control.broke if control else None, record.steps)
    end = next(end for end in ends if end is not None)
    return {None: None} | {n: end - n for n in before if end - n >= _FIRST}


def diagnose(run: Path, step: int | None) -> dict[str, Any]:
    """Returns what the command says of a run up to a step; None for the newest checkpoint.

    Raises:
      RunError: the command fails, or the run was rolled back, so that its metrics record no
        explosion.
    """
    if went_back := rollbacks.read(RunDir(run).rollbacks):
        raise RunError(
            f"{run} went back to step {went_back[0].to} and recorded no explosion; take an "
            f"experiment without rollback.tries, or look at this run: lowprec-attn diagnose {run}"
        )
    at = [] if step is None else ["--step", str(step)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "verdict.json"
        with contextlib.redirect_stdout(io.StringIO()):
            code = lowprec_attn(["diagnose", str(run), *at, "--json", str(path)])
        if code not in (0, EXIT_FOUND):
            raise RunError(f"{run} cannot be diagnosed")
        report = json.loads(path.read_text())
    layers = report["layers"]
    warnings = [[f["kind"] for f in layer["findings"] if f["warns"]] for layer in layers]
    return {
        "code": code,
        "kind": report["verdict"]["kind"] if code else "none",
        "layers": {one["layer"]: kinds for one, kinds in zip(layers, warnings, strict=True)},
        "at_batch": any(AT_ITS_BATCH in note for layer in layers for note in layer["notes"]),
        **_largest([signals for layer in layers for signals in layer["signals"].values()]),
    }


def _largest(layers: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, float | None]:
    """Returns each rule's signal in the worst head that it looks at, or None if there is none."""
    found: dict[str, float | None] = {}
    for rule in RULES:
        # With a threshold of −inf, `severity` is the signal of every head that counts.
        of_heads = [
            rule._replace(threshold=-np.inf).severity(
                {name: np.array(values, np.float32) for name, values in signals.items()}
            )
            for signals in layers
        ]
        value = float(np.max(of_heads, initial=-np.inf))
        found[rule.name] = float(f"{value:.4g}") if np.isfinite(value) else None
    return found


def _missing(
    runs: Sequence[ArmRecord], before: Sequence[int], directory: Path
) -> Iterator[tuple[ArmRecord, int | None, int | None]]:
    done = {(line["run"], line["before"]) for line in read(directory)}
    controls = {one.seed: one for one in runs if one.arm.control == "positive"}
    for record in runs:
        for distance, step in steps(record, controls.get(record.seed), before).items():
            if (record.name, distance) not in done:
                yield record, distance, step


@program.told
def main() -> None:
    """Makes the missing diagnoses, and prints and records each."""
    parser = program.parser(__doc__)
    parser.add_argument("workdir", type=Path, help="of `lab run`, with checkpoints")
    parser.add_argument("results", type=Path, help="of `lab collect`")
    parser.add_argument("--before", type=int, nargs="+", default=BEFORE, help="steps (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="only these")
    args = parser.parse_args()
    runs = records.read_all(args.results)
    if args.seeds is not None:
        runs = records.of_seeds(runs, args.seeds)
    for record, before, step in _missing(runs, args.before, args.results):
        line = {"run": record.name, "before": before, "step": step}
        line |= diagnose(args.workdir / record.name, step)
        append_line(args.results / FILE, json.dumps(line))
        print(
            record.name,
            "newest" if before is None else f"{before} before",
            line["kind"],
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
