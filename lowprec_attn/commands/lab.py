"""`lowprec-attn lab`: runs a set of arms, collects their records and writes reports.

The trainer's packages are imported inside functions, so that --help does not need them.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowprec_attn.commands.config import config_file
from lowprec_attn.errors import RunError, reading_records
from lowprec_attn.files import require_output, write_atomically, writing
from lowprec_attn.lab import RECORDS

if TYPE_CHECKING:
    from lowprec_attn.lab.jobs import Cluster
    from lowprec_attn.lab.processes import Slot
    from lowprec_attn.lab.records import ArmRecord

_MOST_JOBS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's actions and their arguments to its parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_run(actions.add_parser("run", help="train all arms; the same command continues"))
    collect = _add(actions, "collect", "write compact records of the arms")
    collect.add_argument(
        "workdir", type=Path, help="work directory of `lab run`, which may still be running"
    )
    collect.add_argument("results", type=Path, help=f"directory for {RECORDS}")
    report = _add(actions, "report", "write tables and a figure of these records")
    add = report.add_argument
    add(
        "results",
        type=Path,
        help=f"directory with {RECORDS}, or one that holds several such directories; table.md is "
        "written beside the records",
    )
    add(
        "--layer",
        type=int,
        default=1,
        help="layer of the tables and figure, from 0 (default %(default)s)",
    )
    add("--steps", type=int, nargs="+", help="steps of the tables (default: seven)")
    add("--seeds", nargs="+", type=int, metavar="N", help="use only these seeds")
    add("--figure", type=Path, help="file of the figure (default: figure.png in RESULTS)")
    for control, fate in (("positive", "must"), ("negative", "must not")):
        add(
            f"--{control}-control",
            metavar="ARM",
            help=f"the arm that {fate} break; needed if the records name none",
        )


def _add(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=summary, description=summary)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains all arms of an experiment, each with every seed; the same command continues. "
        "--config.NAME=VALUE sets a field in every arm, as for train.py."
    )
    add = parser.add_argument
    add("experiment", help="definition of the arms: NAME of configs/, or a FILE")
    add("--workdir", type=Path, required=True, help="directory for all arms")
    add("--arms", nargs="+", metavar="ARM", help="run only these arms (default: all)")
    add("--seeds", nargs="+", type=int, metavar="N", help="seeds in place of the file's own")
    places = parser.add_mutually_exclusive_group()
    places.add_argument(
        "--devices",
        metavar="0,1,...",
        help="GPUs, one arm on each; 0+1,2+3: one arm on two GPUs (default: one arm on each GPU, "
        "or one at a time without a GPU)",
    )
    places.add_argument("--jobs", type=int, help="number of arms at a time, bound to no device")
    add(
        "--launcher",
        choices=("processes", "slurm"),
        default="processes",
        help="processes of this host (default), or a Slurm job for each arm",
    )
    add(
        "--slurm",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options of each job: time (minutes), partition, gpus_per_node, cpus_per_task, mem, …",
    )
    parser.set_defaults(config_flags=[])


def run(args: argparse.Namespace) -> None:
    """Runs the chosen action.

    Raises:
      RunError: a definition, directory or arm fails; see the modules of `lab`.
    """
    if args.action == "run":
        _run(args)
        return
    reads, act = (args.workdir, _collect) if args.action == "collect" else (args.results, _report)
    with reading_records(reads):
        act(args)


def _run(args: argparse.Namespace) -> None:
    from lowprec_attn.lab import experiment, runner

    defined = experiment.load(config_file(args.experiment, ".toml")).with_flags(args.config_flags)
    if args.arms is not None:
        defined = defined.select(args.arms)
    if args.seeds is not None:
        defined = defined.with_seeds(args.seeds)
    again = shlex.join(["lowprec-attn", *sys.argv[1:]])
    workdir = args.workdir.absolute()
    cluster = _cluster(args, workdir)
    slots = [] if cluster else _slots(args)
    runner.run_arms(defined, workdir, slots, again=again, cluster=cluster)


def _cluster(args: argparse.Namespace, workdir: Path) -> "Cluster | None":
    from lowprec_attn.lab.jobs import Cluster
    from lowprec_attn.lab.workdir import internal

    if args.launcher != "slurm":
        if args.slurm:
            raise RunError(f"--slurm {args.slurm[0]} needs --launcher=slurm; add it")
        return None
    for name in ("devices", "jobs"):
        if getattr(args, name) is not None:
            raise RunError(
                f"--{name} is for processes, and Slurm gives a job its devices: leave it out"
            )
    options: dict[str, str] = {}
    for word in args.slurm:
        key, separator, value = word.partition("=")
        if not separator or not value:
            raise RunError(f"--slurm {word}: say KEY=VALUE, as in time=240")
        if key in options:
            raise RunError(f"--slurm {word}: {key} is {options[key]} already")
        options[key] = value
    return Cluster(internal(workdir) / "jobs", options)


def _slots(args: argparse.Namespace) -> "list[Slot]":
    from lowprec_attn.lab.processes import cpu_slots, gpu_slots

    if args.jobs is None:
        devices = None if args.devices is None else args.devices.split(",")
        return gpu_slots(devices) or cpu_slots(1)
    if args.jobs < 1:
        raise RunError(f"--jobs must be at least 1, got {args.jobs}")
    if args.jobs > _MOST_JOBS:
        raise RunError(f"--jobs must be at most {_MOST_JOBS}, got {args.jobs}")
    return cpu_slots(args.jobs)


def _collect(args: argparse.Namespace) -> None:
    from lowprec_attn.lab import collection
    from lowprec_attn.lab.comparison import unwanted_differences
    from lowprec_attn.lab.workdir import arm_runs

    runs = arm_runs(args.workdir.absolute())
    unwanted = unwanted_differences(runs)
    if unwanted:
        raise RunError("the arms cannot be compared:\n" + "\n".join(unwanted))
    path = collection.collect(runs, args.results)
    for arm_run in runs:
        print(f"{arm_run.name}: {arm_run.outcome().text}")
    print(path)


def _report(args: argparse.Namespace) -> None:
    from lowprec_attn.lab.report.summary import summary
    from lowprec_attn.runs.pages.drawing import require_figure_format

    if args.positive_control is not None and args.positive_control == args.negative_control:
        raise RunError(
            f"--positive-control and --negative-control both name {args.positive_control}; the one "
            "must break and the other must not, so give two arms"
        )
    if args.figure is not None:  # checked before the records are read, which takes long
        require_figure_format(args.figure)
        require_output(args.figure, [args.results / RECORDS])
    if (args.results / RECORDS).exists():
        _report_one(args, args.results, args.figure or args.results / "figure.png")
        return
    directories = sorted(path.parent for path in args.results.rglob(RECORDS))
    # Deeper directories analyse the runs of the experiment above them again, so they do not count.
    counted = [path for path in directories if path.parent == args.results]
    if not counted:
        raise RunError(
            f"{args.results} holds no records ({RECORDS}), and no directory with records; make "
            f"them from runs: lowprec-attn lab collect WORKDIR {args.results}"
        )
    if args.figure is not None:
        raise RunError(
            f"--figure takes the records of one experiment, and {args.results} holds several "
            f"({', '.join(path.name for path in counted)}): name one of them, as in {counted[0]}"
        )
    arms = {path: _report_one(args, path, path / "figure.png") for path in directories}
    path = args.results / "summary.md"
    with writing(path):
        text = summary({path.name: arms[path] for path in counted})
        write_atomically(path, text.encode())
    print(path)


def _report_one(args: argparse.Namespace, directory: Path, figure: Path) -> "list[ArmRecord]":
    """Writes the table and the figure of one experiment, and returns its records."""
    from lowprec_attn.lab import records
    from lowprec_attn.lab.report import figures, outcomes, tables
    from lowprec_attn.lab.report.bias import bias_table
    from lowprec_attn.lab.report.growth import growth_table
    from lowprec_attn.lab.report.titles import plain_titles
    from lowprec_attn.lab.report.verdicts import verdict_table
    from lowprec_attn.lab.report.warnings import warning_table
    from lowprec_attn.runs.pages.drawing import write_figure

    arms = records.read_all(directory)
    if args.seeds is not None:
        arms = records.of_seeds(arms, args.seeds)
    for control in ("positive", "negative"):
        arms = records.with_control(arms, control, getattr(args, f"{control}_control"))
    layers = min(len(layers) for arm in arms for layers in arm.signals.values())
    if not 0 <= args.layer < layers:
        raise RunError(f"--layer must be 0 to {layers - 1}, got {args.layer}")
    recorded = sorted({step for arm in arms for step in arm.signals})
    if missing := [step for step in args.steps or () if step not in recorded]:
        raise RunError(
            f"--steps {missing[0]}: no run of {directory} has a record there; it has records at "
            f"{', '.join(map(str, recorded[:8]))}{' …' * (len(recorded) > 8)}"
        )
    found = outcomes.outcomes(arms)
    judged = len({arm.seed for arm in arms}) > 1 or any(arm.arm.control for arm in arms)
    parts = [verdict_table(directory, found)]
    parts += [bias_table(directory, arms), tables.across_steps_table(arms)]
    if judged:
        warnings = warning_table({directory.name: arms})
        parts = [tables.outcome_table(found), tables.not_finite_table(found), warnings, *parts]
    parts = [f"{records.tokens_read(arms)}\n", *parts]
    steps = args.steps or tables.spread(arms)
    parts += [growth_table(arms, steps), tables.score_table(arms, args.layer, steps)]
    text = "\n".join(part for part in parts if part)
    titles = plain_titles(directory, [record.arm for record in arms])
    if judged:
        drawn = figures.loss_figure(found, titles)
    else:
        drawn = figures.score_figure(arms, args.layer, titles)
    with writing(figure):
        write_atomically(directory / "table.md", text.encode())
        write_figure(figure, drawn)
    print(text)
    print(figure)
    return arms
