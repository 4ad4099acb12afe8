"""Writes a report as text for a terminal of 100 columns, as JSON, or as a web page."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lowprec_attn.check.measure import EVERY, WORDS
from lowprec_attn.check.report import Arithmetic, Bug, Report
from lowprec_attn.counts import many
from lowprec_attn.files import write_json, writing
from lowprec_attn.numerics import Numerics
from lowprec_attn.runs.pages.markup import element, table, write_page
from lowprec_attn.tables import columns, wrapped

WIDTH = 100

_WHO = {
    "exact": "as PyTorch's unfused attention: only results are rounded",
    "flash": "as FlashAttention-2 and -3 and cuDNN",
    "jax_nn": "as jax.nn by XLA",
    "published": "as the public code of arXiv 2510.04212",
    "eager": "as eager attention of transformers: every operation is rounded",
    "eager_scaled": "as eager attention of transformers: every operation is rounded",
    "float32_output": "as Kimi K3, which keeps O in float32",
    "halves_output": "as FlashAttention-4's sparse MLA",
    "corrected_after_cast": "as Chen et al., arXiv 2609.34272",
}
_DELTA = {
    "dp_p": "δ = rowsum(P ∘ dP)",
    "normalized": "rows of dS sum to zero before its cast",
    "after_cast": "rows of dS sum to zero after its cast",
    "do_o_storage": "δ from the rounded O, its products rounded",
}
_OF_SAVED = {
    "same": "δ from the O that is returned",
    "float32": "δ from O in float32",
    "halves": "δ from O in two halves",
    "auxiliary": "δ from an O of unrounded P̄",
}
_SCORES = {
    "f32_m10": "TF32",
    "bf16_m6": "bfloat16 before and after the scale",
    "f32_m9": "float16 before and after the scale",
}
_STATE = {"right": "right", "risk": "a risk", "bug": "a bug"}


def described(numerics: Numerics, backward: bool) -> str:
    """Describes the roundings of an arithmetic, in the order in which they are made.

    Args:
      numerics: the arithmetic.
      backward: whether to describe the backward pass as well.
    """
    n = numerics
    scores = _SCORES.get(str(n.scores), str(n.scores))
    probs = "P divided by l, then" if n.normalize_probs else "P̄"
    delta = _DELTA.get(n.delta) or _OF_SAVED[n.saved_output]
    parts = [
        f"S in {scores}",
        f"{probs} in {n.probs}",
        *([] if n.pv.is_identity else [f"P̄V in {n.pv} at every step"]),
    ]
    if backward:
        parts += [delta, f"dP in {n.dp}", f"dS in {n.ds}", f"P of dV in {n.probs_bwd}"]
    return ", ".join(parts)


def lines(report: Report) -> Iterator[str]:
    """Yields the lines that the command prints."""
    tried = len(report.errors)
    words = [report.setting.words, "" if report.backward else "forward pass alone"]
    setting = "".join(f", {word}" for word in words if word)
    yield from _wrapped(
        f"{report.target}, {report.dtype}{setting}: {headline(report)} ({many(tried, 'problem')})",
        "",
    )
    for i, bug in enumerate(report.bugs):
        yield ""
        yield from _bug(bug, i + 1)
    if report.arithmetic is not None:
        yield ""
        yield from _arithmetic(report.arithmetic, report.backward)
    for risk in report.risks:
        yield ""
        yield from _wrapped(f"Risk: {risk}.")
    if report.effects:
        yield ""
        yield from columns(effects(report), "<>>>", "  ").splitlines()
        yield from _cures(report)
    if report.notes or report.refused or report.not_tried:
        yield ""
    for note in report.notes:
        yield from _wrapped(f"note: {note}")
    for reason in dict.fromkeys(report.refused.values()):
        names = "; ".join(name for name, why in report.refused.items() if why == reason)
        yield from _wrapped(f"refused: {names} ({reason})")
    if report.not_tried:
        names = "; ".join(dict.fromkeys(report.not_tried))
        yield from _wrapped(f"not tried, because the function does not serve it: {names}")


def headline(report: Report) -> str:
    """Returns the verdict in one sentence."""
    if report.state == "bug":
        names = "; ".join(bug.name for bug in report.bugs)
        return f"{'a bug' if len(report.bugs) == 1 else f'{len(report.bugs)} bugs'}: {names}"
    no_bug = "no bug" if report.state == "risk" else "no bug and no risk"
    if report.arithmetic is None:
        return f"{_STATE[report.state]}, {no_bug}"
    with_it = "computes like" if report.arithmetic.explains else "is nearest to"
    return f"{_STATE[report.state]}, {no_bug}; it {with_it} {report.arithmetic.name}"


def _bug(bug: Bug, number: int) -> Iterator[str]:
    yield from _wrapped(f"Bug {number}: {bug.name}.")
    spoilt = ", ".join(WORDS[n] for n in bug.results)
    size = "not finite" if bug.times == float("inf") else f"{bug.times:.2g} times the largest"
    rest = "" if bug.times == float("inf") else " error that rounding explains"
    yield from _wrapped(f"  It spoils {spoilt} ({size}{rest}).")
    yield from _wrapped(f"  It begins at the problem {bug.problem!r}: {bug.where}.")
    if bug.others:
        yield from _wrapped(f"  It also shows at {'; '.join(bug.others)}.")
    if bug.smallest:
        yield from _wrapped(f"  The smallest case: {bug.smallest}.")
    if bug.files:
        data, script = bug.files
        yield f"  python {script}"
        yield f"  shows it without this package, on {data}"


def _arithmetic(found: Arithmetic, backward: bool) -> Iterator[str]:
    preset = found.match.candidate.preset
    who = f", {_WHO[preset]}" if preset in _WHO and not found.match.candidate.changes else ""
    yield from _wrapped(f"Arithmetic: {found.name}{who}.")
    yield from _wrapped(f"  {described(found.match.candidate.numerics, backward)}.")
    if found.next is not None:
        name, times = found.next
        yield from _wrapped(f"  The next preset, {name}, is {times:.3g} times farther away.")
    if found.alike:
        shown = "; ".join(found.alike[:4]) + ("; …" if len(found.alike) > 4 else "")
        yield from _wrapped(f"  These inputs cannot tell it from: {shown}.")
    if not found.explains:
        yield from _wrapped("  But float64 is about as near: its own arithmetic is none of these.")


def effects(report: Report) -> list[tuple[str, ...]]:
    """Returns the table of what the arithmetic does to training, with its header."""
    return [
        (
            "keys that cluster: largest score",
            "error of dQ",
            "row sum of dS",
            "error of W_Q's gradient",
        ),
        *(
            (
                name.split()[-1],
                f"{100 * e.dq:.2g} %",
                f"{e.row_sum:.1e}",
                f"{100 * e.query_weight:.2g} %",
            )
            for name, e in report.effects.items()
        ),
    ]


def _cures(report: Report) -> Iterator[str]:
    """Yields the table of what each cure leaves, the best cure first, and what to call for it."""
    if not report.cures:
        return
    by_sum = sorted(report.cures.items(), key=lambda item: item[1].row_sum)
    rows = [
        ("with another δ", "row sum of dS", "error of W_Q's gradient", ""),
        *(
            (
                name,
                f"{e.row_sum:.1e}",
                f"{100 * e.query_weight:.2g} %",
                "" if e.row_sum <= report.allowed else "still a risk",
            )
            for name, e in by_sum
        ),
    ]
    yield ""
    yield from columns(rows, "<>><", "  ").splitlines()
    yield ""
    best, effect = by_sum[0]
    if effect.row_sum <= report.allowed:
        yield from _actions(report.setting.names, best)


def _actions(names: frozenset[str], cure: str) -> Iterator[str]:
    """Yields lines that say what to call instead in JAX and PyTorch.

    Args:
      names: the names of what every problem had, such as `sinks`; the call must serve all of it.
      cure: the name of the preset that cures the arithmetic.
    """
    unfused = ", or jax.nn.dot_product_attention(…, implementation='xla')"
    yield from _wrapped(
        f"In JAX: lowprec_attn.attention.dot_product_attention(…, numerics={cure!r})"
        f"{'' if names & {'soft_cap', 'sinks'} else unfused}."
    )
    ours = "lowprec_attn.torch.attention"
    if "soft_cap" in names:
        ours += "_fn(logits_soft_cap=…)"
    ways = [] if names - {"soft_cap"} else [ours]
    unfused = "an unfused attention in float32" if names else "SDPBackend.MATH"
    yield from _wrapped(
        f"In PyTorch: {', or '.join([*ways, unfused])}, which holds all scores; no fused kernel of "
        "its own has a cure."
    )


def _wrapped(text: str, indent: str = "  ") -> Sequence[str]:
    begin = text[: len(text) - len(text.lstrip())]
    return wrapped(text, WIDTH, subsequent_indent=begin + indent)


def as_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON values, without arrays; `numerics` is text."""
    found = dataclasses.asdict(dataclasses.replace(report, arithmetic=None))
    if report.arithmetic is not None:
        fields = dataclasses.fields(report.arithmetic)
        named = {f.name: getattr(report.arithmetic, f.name) for f in fields if f.name != "match"}
        numerics = report.arithmetic.match.candidate.numerics
        found["arithmetic"] = named | {
            "numerics": str(numerics),
            "words": described(numerics, report.backward),
        }
    return {"headline": headline(report)} | found


def write(report: Report, json: Path | None, html: Path | None) -> None:
    """Writes the report to a JSON file and an HTML page; None leaves one out.

    Raises:
      DiskError: a file cannot be written.
    """
    if json is not None:
        with writing(json):
            write_json(json, as_json(report), indent=1)
    if html is not None:
        title = f"lowprec-attn check {report.target}"
        states = {"right": "healthy", "risk": "warned", "bug": "broken"}
        shown = [n for n in EVERY if any(n in errors for errors in report.errors.values())]
        rows = [
            (name, *(f"{errors[n]:.2e}" if n in errors else "" for n in shown))
            for name, errors in report.errors.items()
        ]
        write_page(
            html,
            title,
            [
                element("h1", title),
                element("div", headline(report), class_=f"state {states[report.state]}"),
                element("pre", "\n".join(lines(report))),
                element("h2", "‖x − x64‖ / ‖x64‖ of every problem"),
                table(("problem", *(WORDS[n] for n in shown)), rows, range(1, 1 + len(shown))),
            ],
        )
