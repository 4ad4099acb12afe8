"""Words what `diagnose` says: the sentences and table rows that its text and its page share."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lowprec_attn.counts import many
from lowprec_attn.diagnostics import verdict
from lowprec_attn.diagnostics.actions import ACTIONS
from lowprec_attn.diagnostics.examine.examination import Examination, Head
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.measurement import Arithmetic, keys_per_step

_SHOWN = 4  # names of layers that a sentence lists at most
LEGEND = (
    "ΣP−1: how far rows of the backward pass's P miss a sum of 1 (RMS). δ share: the errors of δ",
    "as a part of the gradient that reaches W_Q. repeat: rows whose largest score repeats; ones:",
    "rows with two or more P̄ that round to 1; one key: rows where one key holds all weight;",
    "cohere: about 1 if errors have random signs; met: rules that this head meets.",
    "docs/glossary.md explains the letters.",
)


def preface(layers: Sequence[Layer], arithmetics: Sequence[Arithmetic]) -> Iterator[str]:
    """Yields lines on what was read, the keys per softmax step, and the notes of the layers."""
    for source, of_source in itertools.groupby(layers, key=lambda layer: layer.source):
        alike = collections.Counter(_shape(layer) for layer in of_source)
        for shape, count in alike.items():
            many = f"{count} layers, each " if count > 1 else ""
            yield f"{source}: {many}{shape}"
    if arithmetics:
        yield _steps(arithmetics)
    notes: dict[str, list[str]] = {}
    for layer in layers:
        for note in _notes(layer):
            notes.setdefault(note, []).append(title(layer, layers))
    for note, names in notes.items():
        some = f"{', '.join(names)}: " if len(names) < len(layers) else ""
        yield f"note: {some}{note}"


def title(layer: Layer, layers: Sequence[Layer]) -> str:
    """Returns the title of a layer; empty where all layers have one source and it has no name."""
    if len({other.source for other in layers}) == 1:
        return layer.name
    return f"{layer.source}:{layer.name}" if layer.name else layer.source


def headline(examined: Sequence[Examination]) -> str:
    """Returns the answer in one line: how many heads show nothing, or what was found where."""
    layers = [one.layer for one in examined]
    count = sum(layer.q.shape[2] for layer in layers)
    of_layers = f" of {len(layers)} layers" if len(layers) > 1 else ""
    places: dict[str, list[str]] = {}
    for one in examined:
        for finding in one.findings:
            if finding.warns is any(other.found for other in examined):
                places.setdefault(finding.kind, []).append(title(one.layer, layers))
    if not any(one.found for one in examined):
        others = {kind: names for kind, names in places.items() if kind != "none"}
        if not others:
            return f"Nothing found in {many(count, 'head')}{of_layers}: {_largest(examined)}."
        told = f"Seen, but no warning by itself: {_listed(others)}."
        return f"No warning in {many(count, 'head')}{of_layers}. {told}"
    warned = sum(one.found for one in examined)
    return f"Warning in {warned} of {many(len(layers), 'layer')}: {_listed(places)}."


def verdicts(examined: Sequence[Examination]) -> list[tuple[str, list[str]]]:
    """Returns the title of each layer that shows something, with its findings as sentences."""
    layers = [one.layer for one in examined]
    return [
        (title(one.layer, layers), [f"{finding.sentence}." for finding in one.findings])
        for one in examined
        if one.findings[0].kind != "none"
    ]


def others(examined: Sequence[Examination]) -> Iterator[str]:
    """Yields one sentence on the layers that show nothing, if there are such layers."""
    count = sum(one.findings[0].kind == "none" for one in examined)
    if count == len(examined):
        yield "Verdict: nothing found."
    elif count:
        yield f"Verdict for the {many(count, 'other layer')}: nothing found."


def actions(examined: Iterable[Examination]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns each kind that warns, with what to do about it as pairs of a label and a text."""
    kinds = dict.fromkeys(f.kind for one in examined for f in one.findings if f.warns)
    if kinds.keys() & {"row_sums", "delta"}:  # these are why scores grow
        kinds.pop("scores", None)
    return [(kind, ACTIONS[kind].lines()) for kind in kinds]


def _listed(places: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for kind, names in places.items():
        shown = ", ".join(name for name in names[:_SHOWN] if name)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{kind} in {shown}{more}" if shown else kind)
    return "; ".join(parts)


def _largest(examined: Sequence[Examination]) -> str:
    """Says how large the largest signals of all layers are."""
    measured = [
        (one.layer, signals) for one in examined for signals in one.measured.values() if signals
    ]
    judged = [(layer, of) for layer, of in measured if "delta_error_rms" in of] or measured
    by_place = {str(i): signals for i, (_, signals) in enumerate(judged)}
    said = verdict.nothing(by_place, min(layer.rows for layer, _ in judged))
    without = sum(one.layer.do is None for one in examined)
    if without == len(examined):
        said += "; without dO the backward pass is not judged"
    elif without:
        said += f"; {many(without, 'layer')} without dO are not in these numbers"
    return said.removeprefix("nothing found: ")


def first_not_finite(examined: Sequence[Examination]) -> Iterator[str]:
    """Says in which layer of a model NaN and infinity stand first.

    A single layer gets no sentence, because its verdict already says it.

    Args:
      examined: layers in their order in the model.
    """
    layers = [one.layer for one in examined]
    bad = [(one.layer, [name for name in one.not_finite if name != "do"]) for one in examined]
    forward = [(layer, names) for layer, names in bad if names]
    backward = [one.layer for one in examined if "do" in one.not_finite]
    if len(layers) < 2:
        return
    if forward:
        layer, names = forward[0]
        yield (
            f"NaN or infinity stands first in {title(layer, layers)} ({', '.join(names)}) of "
            f"{len(forward)} layers that hold any: look there before the others."
        )
    if backward:
        yield (
            f"Of dO, whose way is backwards, it stands first in {title(backward[-1], layers)}, of "
            f"{len(backward)} layers."
        )


def worths(examined: Iterable[Examination]) -> list[tuple[str, str]]:
    """Returns what each rule that was met was worth in the lab, paired with its name."""
    findings = (finding for one in examined for finding in one.findings)
    return list(dict.fromkeys((f.kind, f"{f.worth}.") for f in findings if f.worth))


def rows(heads: Sequence[Head], layers: Sequence[Layer]) -> tuple[list[list[str]], str]:
    """Returns the table, heading first, and the alignment of its columns; bars separate groups."""
    has_delta = any("delta_error_rms" in head.values for head in heads)
    named = any(title(layer, layers) for layer in layers)
    heading = [
        *(["layer"] if named else []),
        *("head", "numerics", "|score|"),
        *(["ΣP−1", "δ share"] if has_delta else []),
        *("repeat", "ones", "one key", "|", "O: RMS", "cohere"),
        *(["|", "δ: mean", "RMS", "cohere"] if has_delta else ["|", "Ō: RMS", "cohere"]),
        *("|", "met"),
    ]
    left = {"layer", "numerics", "met"}
    align = "".join("<" if name in left else ">" for name in heading)
    table = [heading]
    for head in heads:
        value = head.values
        shares = (value[name] for name in ("repeated_maxima", "rounded_to_one", "dominated_rows"))
        row = [title(head.layer, layers)] if named else []
        row += [str(head.head), head.label, f"{value['score_maximum']:.4g}"]
        if has_delta:
            row += _backward(value)
        row += [*(f"{share:.1%}" for share in shares), "|", *_error(value, "output")]
        if has_delta:
            row += ["|", _mean(value), *_error(value, "delta")]
        else:
            row += ["|", *_error(value, "unnormalized")]
        table.append([*row, "|", ", ".join(head.met) or "–"])
    return table, align


def _backward(value: dict[str, float]) -> list[str]:
    """Returns the cells of Σ P − 1 and of the share of δ's errors."""
    if "delta_error_rms" not in value:
        return ["–", "–"]
    weight = "query_weight_gradient_error_relative"
    share = value.get(weight, value["query_gradient_error_relative"])
    return [f"{value['p_row_sum_error_rms']:.0e}", f"{share:.1%}"]


def _mean(value: dict[str, float]) -> str:
    return f"{value['delta_error_mean']:+.1e}" if "delta_error_mean" in value else "–"


def _error(value: dict[str, float], name: str) -> list[str]:
    """Returns the cells of an error's RMS and coherence."""
    if f"{name}_error_rms" not in value:
        return ["–", "–"]
    return [f"{value[f'{name}_error_rms']:.1e}", f"{value[f'{name}_error_coherence']:.1f}"]


def _shape(layer: Layer) -> str:
    keys = f"k and v {list(layer.k.shape)}"
    if layer.k.shape != layer.v.shape:
        keys = f"k {list(layer.k.shape)}, v {list(layer.v.shape)}"
    return (
        f"q {list(layer.q.shape)}, {keys} [B,T,N,H], {layer.q.dtype}, "
        f"{'causal' if layer.is_causal else 'all keys'}"
        f"{'' if layer.window is None else ', window {} left, {} right'.format(*layer.window)}, "
        f"scale {layer.factor:.6g}"
        f"{'' if layer.soft_cap is None else f', soft cap {layer.soft_cap:g}'}"
        f"{'' if layer.sinks is None else ', sinks'}"
    )


def _steps(arithmetics: Sequence[Arithmetic]) -> str:
    """Returns `softmax in steps of 256 keys`, or `… of 256 (flash), 512 (published) keys`."""
    labels = {a.label: str(keys_per_step(a)) for a in arithmetics}
    if len(set(labels.values())) > 1:
        each = ", ".join(f"{step} ({label})" for label, step in labels.items())
        return f"softmax in steps of {each} keys"
    return f"softmax in steps of {next(iter(labels.values()))} keys"


def _notes(layer: Layer) -> Iterator[str]:
    yield from layer.notes
    length, keys = layer.q.shape[1], layer.k.shape[1]
    if layer.is_causal and length != keys:
        yield (
            f"causal with {length} queries and {keys} keys: query t sees the keys 0 to t; "
            "use --full if that is not meant"
        )
    if layer.do is None:
        yield "there is no do (the gradient of the loss by O), so δ and Σ_j P are skipped"
    elif layer.x is None:
        yield (
            "δ share is of dQ, because W_Q's gradient needs x, the input of W_Q; the rule was set "
            "on shares of W_Q's gradient"
        )
