"""`lowprec-attn diagnose FILE ...`: is low-precision attention the problem of these layers?

The first printed line is the answer. The command reads q, k, v and, if present, dO of one or more
layers from files. Or it computes them by one step of a model: the newest checkpoint of a run
directory (`--step` chooses an earlier one), or a Hugging Face model on a text.

It then computes attention in exact arithmetic and in each requested arithmetic; the default for a
run is the run's own arithmetic. It prints a table of all heads, the nearest to a warning first, a
verdict for each layer with a finding, and what to do about it in JAX and in PyTorch. For the worst
layer it tries cures on the same arrays and says how much of the error remains under each. For a
run, and for captures of several steps (`--series`), it also says which layer departs from its own
past or from the other layers.

The rules are in `lowprec_attn.diagnostics.rules` and `.verdict`, the advice is in `.actions`.

Exit codes: 0 no warning; 3 a warning; 1 an unusable file or option.
"""

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_attn.attention import validation
from lowprec_attn.counts import many
from lowprec_attn.diagnostics.examine import array_file, page, wording
from lowprec_attn.diagnostics.examine import series as trends
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError
from lowprec_attn.diagnostics.examine.examination import (
    Examination,
    examine,
    heads,
    with_advice,
    worst_first,
)
from lowprec_attn.diagnostics.examine.series import Series
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.measurement import Arithmetic, keys_per_step, refusal
from lowprec_attn.errors import RunError
from lowprec_attn.files import require_outputs, write_json, writing
from lowprec_attn.numerics import PRESETS, ROW_MAX_RULES, get_preset, get_row_max
from lowprec_attn.tables import columns, wrapped

EXIT_FOUND = 3
DEFAULT_NUMERICS = ("flash", "published")
DEFAULT_ROWS = 16

_EPILOG = """q, k, v are the arrays after any position encoding; do is the gradient of the loss by
attention's output O. Ō, the output before division by the row sum, and δ = rowsum(dO ∘ O) are
compared with exact arithmetic on the same scores, O with arithmetic that also computes the scores
exactly. Coherence is ‖Σx‖ / √(Σ‖x‖²) over the rows: about 1 for errors of random sign, the square
root of the number of rows if all are alike. Exit code 0: no warning, 3: a warning, 1: bad
input."""

_KV_BLOCK_HELP = "keys per online-softmax step (default: the number of the preset, else 256)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "source",
        type=Path,
        nargs="+",
        help="npz or safetensors with q, k, v and, for the backward pass, do [B,T,N,H] of a layer, "
        "or layer_00/q and so on of several, as diagnostics.capture saves them; or a run "
        "directory; or, with --text, the folder of a Hugging Face GPT-2, Llama or Qwen3",
    )
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="text for the model, or its token ids as .npy or .bin (default for a run: its "
        "held-out text)",
    )
    add(
        "--step",
        type=int,
        metavar="N",
        help="take a run's newest checkpoint of step N or before, and the trend up to there "
        "(default: the newest checkpoint)",
    )
    add(
        "--series",
        action="store_true",
        help="the files are captures of one model in the order of their steps: also say in which "
        "layer scores or weights grow beyond its earlier values or the other layers; layers are "
        "matched by name",
    )
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument(
        "--full",
        action="store_false",
        dest="is_causal",
        default=None,
        help="every row sees every key (default: from the source, else causal)",
    )
    seen.add_argument(
        "--causal",
        action="store_true",
        dest="is_causal",
        default=None,
        help="every row sees only the keys up to its own position",
    )
    add("--scale", type=float, help="factor of q kᵀ (default: the factor of the source, else 1/√H)")
    add("--kv-block", type=int, metavar="KEYS", help=_KV_BLOCK_HELP)
    add(
        "--numerics",
        action="append",
        metavar="NAME",
        help="arithmetic, repeatable (default: flash, published; for a run, only its own): "
        f"{', '.join(PRESETS)}",
    )
    add("--row-max", default="standard", metavar="RULE", help=", ".join(ROW_MAX_RULES))
    add(
        "--layout",
        metavar="ORDER",
        help="order of the axes in a file: BTNH, or BNTH as in torch, for all arrays; or for each, "
        "as in q=BNTH,k=BNTH,v=BNTH,do=BTNH (default: as the file says, else BTNH)",
    )
    add("--rows", type=int, default=DEFAULT_ROWS, help="rows of the table (default: 16; 0: all)")
    add("--json", type=Path, metavar="OUT", help="also write all measurements to this file")
    add("--html", type=Path, metavar="OUT", help="also write the printed report as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Reads the layers, measures them, prints and writes the report; returns the exit code.

    Raises:
      DiagnoseError: an option or a source is unusable.
      DiskError: the report cannot be written.
    """
    arithmetics = _arithmetics(args)
    _check_options(args)
    loaded = [[_as_asked(layer, args) for layer in _load(path, args)] for path in args.source]
    layers = [layer for of_source in loaded for layer in of_source]
    of_runs = [layer for layer in layers if layer.own is not None]
    if args.numerics is None and of_runs:
        if args.row_max != "standard" or args.kv_block is not None:
            raise DiagnoseError(
                f"{of_runs[0].source} is measured in its own arithmetic; --row-max and --kv-block "
                "need --numerics NAME"
            )
        arithmetics = [] if len(of_runs) == len(layers) else arithmetics

    def asked(layer: Layer) -> Sequence[Arithmetic]:
        return [] if args.numerics is None and layer.own is not None else arithmetics

    for layer in layers:
        for arithmetic in asked(layer):
            if (refused := refusal(layer, arithmetic)) is not None:
                raise DiagnoseError(f"{layer.source}: no attention has {refused}; give other "
                                    "--numerics")  # fmt: skip
    by_source = [[examine(layer, asked(layer)) for layer in of_source] for of_source in loaded]
    series = _series(args, by_source)
    examined = worst_first(one for of_source in by_source for one in of_source)
    examined[:1] = [with_advice(one, arithmetics) for one in examined[:1]]
    print(_wrapped([wording.headline(examined), "", *wording.preface(layers, arithmetics)]))
    print(f"\n{_table(examined, layers, args.rows)}")
    not_finite = [line for of_source in by_source for line in wording.first_not_finite(of_source)]
    print("\n" + _wrapped([*not_finite, *_verdicts(examined)]))
    for one in series:
        print("\n" + _wrapped(_trend(one)))
    if args.json is not None:
        _write_json(args, examined, arithmetics, series)
    if args.html is not None:
        page.write(args.html, examined, arithmetics, series, not_finite)
    return EXIT_FOUND if any(one.found for one in examined) else 0


def _load(path: Path, args: argparse.Namespace) -> list[Layer]:
    if path.is_dir():
        # These import the trainer's packages, which are not needed to read files.
        from lowprec_attn.diagnostics.examine import folder_layers, run_layers

        if not folder_layers.is_one(path):
            return run_layers.load(path, args.text, args.step)
        if args.step is None:
            return folder_layers.load(path, args.text)
    if args.step is not None:
        raise DiagnoseError(f"--step needs a run directory, and {path} is not one; leave it out")
    if args.text is not None:
        raise DiagnoseError(
            f"--text needs a run directory or a model's folder, and {path} is neither; leave it out"
        )
    return array_file.load(path, args.layout)


def _series(args: argparse.Namespace, examined: Sequence[Sequence[Examination]]) -> list[Series]:
    """Returns one series of all files if `--series` is set, else the series of every run."""
    if args.series:
        return [trends.of_files(list(zip(map(str, args.source), examined, strict=True)))]
    found = []
    for path, of_source in zip(args.source, examined, strict=True):
        if any(one.layer.own is not None for one in of_source):
            from lowprec_attn.diagnostics.examine import run_layers  # late, as in `_load`

            try:
                found.append(run_layers.series(path, args.step))
            except RunError as error:  # not fatal: the checkpoint has been examined
                print(f"note: no trend: {error}")
    return [one for one in found if one is not None]


def _as_asked(layer: Layer, args: argparse.Namespace) -> Layer:
    """Returns the layer with the command's options, which override what its source says."""
    given = (args.is_causal, layer.is_causal, True)
    if args.scale is not None:
        try:
            validation.soft_cap(layer.soft_cap, args.scale)
        except ValueError as error:
            raise DiagnoseError(f"--scale {args.scale}: {error}") from error
    return layer._replace(
        is_causal=next(value for value in given if value is not None),
        scale=layer.scale if args.scale is None else args.scale,
    )


def _arithmetics(args: argparse.Namespace) -> list[Arithmetic]:
    names = dict.fromkeys(args.numerics or DEFAULT_NUMERICS)
    try:
        row_max = get_row_max(args.row_max)
        presets = {name: get_preset(name) for name in names}
        if args.kv_block is not None:
            presets = {name: n.replace(kv_block=args.kv_block) for name, n in presets.items()}
    except ValueError as error:
        raise DiagnoseError(str(error)) from error
    for name, preset in presets.items():
        if preset.normalize_probs and args.kv_block is not None:
            raise DiagnoseError(
                f"numerics {name} takes one step over all keys; leave out --kv-block"
            )
    suffix = "" if args.row_max == "standard" else f" with row_max={args.row_max}"
    return [Arithmetic(name + suffix, preset, row_max) for name, preset in presets.items()]


def _check_options(args: argparse.Namespace) -> None:
    if args.series and (len(args.source) < 2 or any(path.is_dir() for path in args.source)):
        raise DiagnoseError(
            "--series takes two files or more of one model, in the order of their steps; a run "
            "directory needs no --series"
        )
    folders = [path for path in args.source if path.is_dir()]
    given = {
        "--full": args.is_causal is False,
        "--scale": args.scale is not None,
        "--layout": args.layout is not None,
    }
    for flag in (flag for flag, is_given in given.items() if is_given and folders):
        raise DiagnoseError(
            f"{flag} describes arrays of a file, and {folders[0]} holds a model that computes its "
            "own; leave it out"
        )
    if args.scale is not None:
        array_file.check_scale("--scale", args.scale)
    if args.step is not None and args.step < 0:
        raise DiagnoseError(f"--step must be 0 or more, got {args.step}")
    if args.rows < 0:
        raise DiagnoseError(f"--rows must be 0 (all) or more, got {args.rows}")
    require_outputs({"--json": args.json, "--html": args.html}, _reads(args))


def _reads(args: argparse.Namespace) -> list[Path]:
    """Returns the files and directories that the command reads, if it writes files."""
    if args.json is None and args.html is None:
        return []
    reads = [*args.source]
    if args.text is not None:
        reads += [args.text, args.text.with_name("meta.json")]
    for path in args.source:
        if path.is_dir():
            from lowprec_attn.diagnostics.examine import folder_layers, run_layers  # as in `_load`

            reads += [] if folder_layers.is_one(path) else run_layers.text_of(path)
    return reads


def _wrapped(lines: Iterable[str]) -> str:
    """Wraps sentences at 100 columns without breaking the names of files and layers."""
    return "\n".join(
        part
        for line in lines
        for part in (wrapped(line, 100, subsequent_indent="  ") if len(line) > 100 else [line])
    )


def _table(examined: Sequence[Examination], layers: Sequence[Layer], limit: int) -> str:
    rows = heads(examined)
    shown = rows[:limit] if limit else rows
    table, align = wording.rows(shown, layers)
    # One space between columns: with two, lines would exceed the 120 columns of a wide terminal.
    lines = [columns(table, align, " ")] if shown else []
    if len(shown) < len(rows):
        lines.append(
            f"({many(len(rows) - len(shown), 'row')} more, none worse; --rows 0 shows all)"
        )
    return "\n".join([*lines, "", *wording.LEGEND] if shown else ["no layer could be measured"])


def _verdicts(examined: Sequence[Examination]) -> Iterator[str]:
    for name, (first, *others) in wording.verdicts(examined):
        yield f"Verdict{f' for {name}' if name else ''}: {first}"
        yield from (f"  also: {other}" for other in others)
    yield from wording.others(examined)
    for kind, texts in wording.actions(examined):
        yield ""
        yield f"What to do about {kind}:"
        for label, text in texts:
            yield from textwrap.wrap(f"{label:<9}{text}", 100, initial_indent="  ",
                                   subsequent_indent=" " * 11)  # fmt: skip
    worths = wording.worths(examined)
    if worths:
        yield ""
    yield from (f"In the lab, {k}: {worth}" for k, worth in worths)


def _trend(series: Series) -> list[str]:
    first, *rest = trends.sentences(series)
    worths = trends.worths(series)
    return [first, *(f"  {line}" for line in rest), *(f"In the lab, {k}: {w}" for k, w in worths)]


def _write_json(
    args: argparse.Namespace,
    examined: Sequence[Examination],
    arithmetics: Sequence[Arithmetic],
    series: Sequence[Series],
) -> None:
    report = {
        "verdict": _found(examined[0])[0],
        "kv_block": {a.label: keys_per_step(a) for a in arithmetics},
        "row_max": args.row_max,
        "layers": [
            {
                "source": one.layer.source,
                "layer": one.layer.name,
                "q_shape": one.layer.q.shape,
                "kv_shape": one.layer.k.shape,
                "dtype": str(one.layer.q.dtype),
                "has_do": one.layer.do is not None,
                "is_causal": one.layer.is_causal,
                "scale": one.layer.factor,
                "window": one.layer.window,
                "soft_cap": one.layer.soft_cap,
                "has_sinks": one.layer.sinks is not None,
                "notes": one.layer.notes,
                "findings": _found(one),
                "signals": {
                    label: {name: [_json_number(x) for x in value] for name, value in of.items()}
                    for label, of in one.measured.items()
                },
            }
            for one in examined
        ],
        "actions": {kind: dict(lines) for kind, lines in wording.actions(examined)},
        "trend": [trends.as_json(one) for one in series],
    }
    with writing(args.json):
        write_json(args.json, report, indent=1)


def _found(one: Examination) -> list[dict[str, Any]]:
    where = {"source": one.layer.source, "layer": one.layer.name}
    return [{**where, **finding._asdict()} for finding in one.findings]


def _json_number(x: Any) -> float | None:
    """Returns the number as a float, or None (null) for NaN and infinities, which JSON lacks."""
    return float(x) if np.isfinite(x) else None
