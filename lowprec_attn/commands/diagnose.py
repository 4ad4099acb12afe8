"""`lowprec-attn diagnose FILE`: is low-precision attention the problem of this layer?

It reads q, k, v and, if the file has it, dO. It computes attention in each arithmetic asked for and
in exact arithmetic, and prints one row per head and one sentence. The rules and thresholds stand in
`lowprec_attn.diagnostics.verdict`. Where errors of δ add up, it tries cures on the same arrays and
names the one that leaves least of the mean error.
"""

import argparse
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_attn.diagnose import array_file
from lowprec_attn.diagnose.array_file import DiagnoseError, Inputs
from lowprec_attn.diagnose.measurement import Arithmetic, keys_per_step, measure, with_advice
from lowprec_attn.diagnostics import verdict
from lowprec_attn.files import require_writable, writing
from lowprec_attn.numerics import (
    PRESETS,
    ROW_MAX_RULES,
    KvBlock,
    Numerics,
    get_preset,
    get_row_max,
)
from lowprec_attn.tables import columns

DEFAULT_NUMERICS = ("flash", "published")

_EPILOG = """Ō (the output before division by the row sum) and δ = rowsum(dO ∘ O) are compared with
exact arithmetic on the same scores, O with exact arithmetic throughout. Coherence is
‖Σx‖ / √(Σ‖x‖²) over the rows: about 1 for errors of random sign, the square root of the number
of rows if all are alike. The arrays are those of one layer, after any position encoding."""

_LEGEND = (
    "repeat: rows whose largest score repeats; ones: rows with two or more P̄ that round to 1;",
    "one key: rows where one key holds all weight; cohere: coherence, about 1 if signs are random",
)


_KV_BLOCK_HELP = "keys per online-softmax step (default: that of the preset, else 256)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("file", type=Path, help="npz or safetensors with q, k, v and, for δ, do [B,T,N,H]")
    add("--full", action="store_true", help="every row sees every key (default: causal)")
    add("--scale", type=float, help="factor of q kᵀ (default: 1/√H)")
    add("--kv-block", type=int, metavar="KEYS", help=_KV_BLOCK_HELP)
    add(
        "--numerics",
        action="append",
        metavar="NAME",
        help=f"arithmetic, repeatable (default: flash, published): {', '.join(PRESETS)}",
    )
    add("--row-max", default="standard", metavar="RULE", help=", ".join(ROW_MAX_RULES))
    add("--layout", choices=array_file.LAYOUTS, default="BTNH", help="BNTH: as torch has it")
    add("--json", type=Path, metavar="OUT", help="also write everything measured to this file")


def run(args: argparse.Namespace) -> None:
    """Reads, measures, prints.

    Raises:
      DiagnoseError: an option or the file cannot serve.
      DiskError: the report cannot be written.
    """
    arithmetics = _arithmetics(args)
    _check_options(args)
    inputs = array_file.load(args.file, args.layout)
    print("\n".join(_preface(args, inputs)))
    measured_as = functools.partial(measure, inputs, scale=args.scale, is_causal=not args.full)
    measured = {arithmetic.label: measured_as(arithmetic) for arithmetic in arithmetics}
    for label, signals in measured.items():
        print(f"\n{_table(label, signals)}")
    print("\n" + "\n".join(_LEGEND))
    finding = verdict.judge(measured, _rows(inputs))
    if finding.kind == "delta":
        found = next(a for a in arithmetics if a.label == finding.arithmetic)
        error = float(measured[found.label]["delta_error_mean"][finding.heads[0]])
        finding = with_advice(finding, found, error, measured_as)
    print(f"\nVerdict: {finding.sentence}.")
    if args.json is not None:
        _write_json(args, inputs, measured, finding)


def _arithmetics(args: argparse.Namespace) -> list[Arithmetic]:
    names = dict.fromkeys(args.numerics or DEFAULT_NUMERICS)
    try:
        row_max = get_row_max(args.row_max)
        presets = {name: _preset(name, args.kv_block) for name in names}
    except ValueError as error:
        raise DiagnoseError(str(error)) from error
    for name, preset in presets.items():
        if preset.normalize_probs and args.kv_block is not None:
            raise DiagnoseError(
                f"numerics {name} takes one step over all keys; leave out --kv-block"
            )
    suffix = "" if args.row_max == "standard" else f" with row_max={args.row_max}"
    return [Arithmetic(name + suffix, preset, row_max) for name, preset in presets.items()]


def _preset(name: str, kv_block: KvBlock | None) -> Numerics:
    """The preset, in steps of `kv_block` keys where that is given."""
    preset = get_preset(name)
    return preset if kv_block is None else preset.replace(kv_block=kv_block)


def _check_options(args: argparse.Namespace) -> None:
    if args.scale is not None and not math.isfinite(args.scale):
        raise DiagnoseError(f"--scale must be a finite number, got {args.scale}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise DiagnoseError(f"--json {args.json}: there is no directory {args.json.parent}")
    if args.json is not None:
        require_writable(args.json)


def _steps(args: argparse.Namespace) -> str:
    """`steps of 256 keys`, or `steps of 256 (flash), 512 (published) keys`."""
    labels = {a.label: str(keys_per_step(a)) for a in _arithmetics(args)}
    if len(set(labels.values())) > 1:
        return f"steps of {', '.join(f'{step} ({label})' for label, step in labels.items())} keys"
    return f"steps of {next(iter(labels.values()))} keys"


def _rows(inputs: Inputs) -> int:
    return inputs.q.shape[0] * inputs.q.shape[1]


def _preface(args: argparse.Namespace, inputs: Inputs) -> list[str]:
    (_, length, _, head_size), keys = inputs.q.shape, inputs.k.shape[1]
    scale = head_size**-0.5 if args.scale is None else args.scale
    seen = "all keys" if args.full else "causal"
    lines = [
        f"{args.file}: q {list(inputs.q.shape)}, k and v {list(inputs.k.shape)} [B,T,N,H], "
        f"{inputs.q.dtype}",
        f"{seen}, scale {scale:.6g}, {_steps(args)}",
    ]
    notes = list(inputs.notes)
    if not args.full and length != keys:
        notes.append(
            f"causal with {length} queries and {keys} keys: query t sees the keys 0 to t; "
            "use --full if that is not meant"
        )
    if inputs.do is None:
        notes.append("the file has no do (the gradient of the loss by O), so δ is skipped")
    return lines + [f"note: {note}" for note in notes]


def _table(label: str, signals: verdict.Signals) -> str:
    errors = {"Ō": "unnormalized_error", "O": "output_error", "δ": "delta_error"}
    errors = {letter: name for letter, name in errors.items() if f"{name}_rms" in signals}
    rows = [[""] * 5, ["head", "|score|", "repeat", "ones", "one key"]]
    for letter in errors:
        rows[0] += ["|", f"error of {letter}", "", ""]
        rows[1] += ["|", "mean", "RMS", "cohere"]
    for head in range(len(signals["score_maximum"])):
        value = {name: float(per_head[head]) for name, per_head in signals.items()}
        shares = (value[name] for name in ("repeated_maxima", "rounded_to_one", "dominated_rows"))
        row = [str(head), f"{value['score_maximum']:.4g}", *(f"{share:.1%}" for share in shares)]
        for name in errors.values():
            mean, rms = value[f"{name}_mean"], value[f"{name}_rms"]
            row += ["|", f"{mean:+.1e}", f"{rms:.1e}", f"{value[f'{name}_coherence']:.1f}"]
        rows.append(row)
    # One space between columns: with two, lines were longer than a wide terminal's 120.
    return f"{label}:\n{columns(rows, '>' * len(rows[0]), ' ')}"


def _write_json(
    args: argparse.Namespace,
    inputs: Inputs,
    measured: Mapping[str, verdict.Signals],
    finding: verdict.Finding,
) -> None:
    report = {
        "file": str(args.file),
        "q_shape": inputs.q.shape,
        "kv_shape": inputs.k.shape,
        "dtype": str(inputs.q.dtype),
        "has_do": inputs.do is not None,
        "is_causal": not args.full,
        "scale": args.scale,
        "kv_block": {a.label: keys_per_step(a) for a in _arithmetics(args)},
        "row_max": args.row_max,
        "notes": inputs.notes,
        "signals": {
            label: {name: [_json_number(x) for x in value] for name, value in signals.items()}
            for label, signals in measured.items()
        },
        "verdict": finding._asdict(),
    }
    with writing(args.json):
        args.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def _json_number(x: Any) -> float | None:
    """JSON has neither NaN nor infinity: null."""
    return float(x) if np.isfinite(x) else None
