"""`lowprec-attn deviation DIR`: how far attention, and weights, lie from what they could be.

It measures O, dQ, dK and dV of attention against float64, by format, length, tile and
implementation, as Golden et al. (arXiv 2405.02803) did, and with --runs the distance between the
weights of training runs. DIR gets the records, one JSON line each (`attention.jsonl`,
`weights.jsonl`), what they were measured on (`measured.json`), and figures of them.

The defaults take about two minutes on two CPU cores, with --crossed four. A GPU adds its kernels
and cuDNN.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lowprec_attn.errors import RunError, reading_records
from lowprec_attn.files import (
    complete_lines,
    make_directory,
    read_record,
    write_atomically,
    write_json,
    writing,
)
from lowprec_attn.lab import deviation
from lowprec_attn.lab.deviation import ARMS, Grid, Tile
from lowprec_attn.tables import columns

_MEASURED, _ATTENTION, _WEIGHTS = "measured.json", "attention.jsonl", "weights.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    default = Grid()
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="of the records and figures; made if needed")
    add("--report", action="store_true", help="draw the figures of the records in DIR again")
    add(
        "--runs",
        type=Path,
        nargs="+",
        action="append",
        metavar="RUN",
        help="measure weights, not attention: the first run directory against the others, at every "
        "step of which both have a checkpoint; once for each seed, with the same names of "
        "directories",
    )
    grid = parser.add_argument_group("what is measured")
    add = grid.add_argument
    add("--formats", nargs="+", default=default.formats, help="default: all three")
    add("--lengths", type=int, nargs="+", default=default.lengths, metavar="T")
    add("--tiles", type=_tile, nargs="+", default=default.tiles, metavar="QxK", help="by --length")
    add("--length", type=int, default=default.length, metavar="T", help="default: %(default)s")
    add("--tile", type=_tile, default=default.tile, metavar="QxK", help="default: 64x64")
    add("--crossed", action="store_true", help="every tile in every format at every length")
    add("--seeds", type=int, metavar="N", help=f"default: {default.seeds}, or 1 with --crossed")
    add("--heads", type=int, default=default.heads, metavar="N", help="default: %(default)s")
    add("--head-size", type=int, default=default.head_size, metavar="H", help="default: 64")


def run(args: argparse.Namespace) -> None:
    """Measures, unless only a report is asked for, and draws.

    Raises:
      UserError: an option, a run or a record cannot serve, or the disk refuses.
    """
    if args.report and args.runs is not None:
        raise RunError("--report draws what is in DIR, and --runs measures; leave one out")
    if not args.report:
        with writing(args.directory):
            make_directory(args.directory)
        _measure_weights(args) if args.runs is not None else _measure_attention(args)
    with reading_records(args.directory):
        _report(args.directory)


def _tile(text: str) -> Tile:
    rows, _, keys = text.partition("x")
    try:
        return int(rows), int(keys)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be QUERIESxKEYS, got {text!r}") from error


def _measure_attention(args: argparse.Namespace) -> None:
    # Here and below: the trainer's packages, which --help does without.
    from tqdm import tqdm

    from lowprec_attn.runs import environment

    chosen: dict[str, Any] = {name: getattr(args, name) for name in Grid._fields}
    if args.seeds is None:  # four times as many programs
        chosen["seeds"] = 1 if args.crossed else Grid().seeds
    lists = {name: tuple(chosen[name]) for name in ("formats", "lengths", "tiles")}
    grid = Grid(**{**chosen, **lists})
    deviation.check(grid)
    wanted = deviation.cases(grid)
    records: list[dict[str, Any]] = []
    notes: list[str] = []
    for found in tqdm(deviation.measure(grid, wanted), total=len(wanted), unit="program"):
        if isinstance(found, str):
            notes.append(found)
        else:
            records += found
    notes = list(dict.fromkeys(notes))  # each length says the same
    print("".join(f"note: {note}\n" for note in notes), end="")
    _write_lines(args.directory / _ATTENTION, records)
    # Last: a report that finds it finds the records.
    with writing(args.directory):
        described = {"environment": environment.describe(), "left_out": notes}
        write_json(args.directory / _MEASURED, {"grid": grid._asdict(), **described})


def _measure_weights(args: argparse.Namespace) -> None:
    from lowprec_attn.lab import weight_drift

    for base, *others in args.runs:
        if not others:
            raise RunError(f"--runs {base} is one run; name others to compare it with")
    _write_lines(args.directory / _WEIGHTS, weight_drift.compare_seeds(args.runs))


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    text = "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in records)
    with writing(path):
        write_atomically(path, text.encode())


def _report(directory: Path) -> None:
    from lowprec_attn.lab.deviation_figures import figures
    from lowprec_attn.runs.pages.drawing import write_figure

    records, drift = (_read_lines(directory / name) for name in (_ATTENTION, _WEIGHTS))
    if not records and not drift:
        raise RunError(
            f"{directory} holds no records; measure them with `lowprec-attn deviation {directory}`"
        )
    if any("seed" not in record for record in drift):
        raise RunError(f"{directory / _WEIGHTS} is of another version; measure again")
    grid = _grid(directory / _MEASURED) if records else Grid()
    for name, figure in figures(records, drift, grid).items():
        path = directory / f"{name}.png"
        with writing(path):
            write_figure(path, figure)
        print(path)
    if records:
        print(f"\nat length {grid.length}, tiles of {grid.tile[0]} x {grid.tile[1]}, mean of seeds")
        print(_table(records, grid))
    if drift:
        print(f"\nweights beside those of {drift[0]['base']} at the last common step, by seed")
        print(_drift_table(drift))


def _grid(path: Path) -> Grid:
    if not path.is_file():
        raise RunError(f"{path} is missing; it stands beside its {_ATTENTION}: copy it as well")
    fields: dict[str, Any] = read_record(path, grid=dict)["grid"]
    try:
        return Grid(**{n: _as_tuples(value) for n, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} is of another version ({error}); measure again") from error


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in complete_lines(path)] if path.is_file() else []
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); measure again") from error


def _table(records: Sequence[dict[str, Any]], grid: Grid) -> str:
    """The largest and RMS deviation and the coherence of O and dQ, by format and arm."""
    rows = [["format", "arm", *("O: max", "RMS", "cohere"), *("dQ: max", "RMS", "cohere")]]
    for fmt in grid.formats:
        for arm in ARMS:
            of_arm = [
                r
                for r in records
                if (r["format"], r["arm"], r["length"]) == (fmt, arm, grid.length)
                and r["tile"] in (None, list(grid.tile))
            ]
            if of_arm:
                cells = [_mean(of_arm, t, s) for t in ("O", "dQ") for s in _SHOWN]
                rows.append([fmt, arm, *cells])
    return columns(rows, "<<>>>>>>")


_SHOWN = {"max": ".1e", "rms": ".1e", "coherence": ".1f"}


def _mean(records: Iterable[dict[str, Any]], tensor: str, statistic: str) -> str:
    values = [r[statistic] for r in records if r["tensor"] == tensor]
    if any(value is None for value in values):
        return "not finite"
    return format(sum(values) / len(values), _SHOWN[statistic])


def _drift_table(drift: Sequence[dict[str, Any]]) -> str:
    rows = [["run", "seed", "step", "max", "RMS", "Wasserstein", "largest, in"]]
    last = {(r["other"], r["seed"]): r for r in sorted(drift, key=lambda r: r["step"])}
    for other in dict.fromkeys(r["other"] for r in drift):
        for seed in dict.fromkeys(r["seed"] for r in drift):
            if r := last.get((other, seed)):
                numbers = [f"{r[s]:.2e}" for s in ("max", "rms", "wasserstein")]
                largest = f"{r['wasserstein_max']:.2e} {r['tensor']}"
                rows.append([other, str(seed), str(r["step"]), *numbers, largest])
    return columns(rows, "<>>>>><")
