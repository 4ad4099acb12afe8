"""Compares arms in Markdown tables."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lowprec_attn.lab.experiment import panel_titles
from lowprec_attn.lab.records import ArmRecord, largest_scores, ran_away, runaway
from lowprec_attn.lab.report.mechanism import NEITHER
from lowprec_attn.lab.report.outcomes import (
    GROWING_FACTOR,
    GROWING_SCORE,
    HEALTHY_AFTER,
    ArmOutcome,
    Word,
    undecided,
)
from lowprec_attn.lab.report.spans import NONE, number, span
from lowprec_attn.runs.instability.explosion import EXCESS_NATS, LASTING_STEPS, SMOOTHED_STEPS
from lowprec_attn.tables import markdown, with_legend

_COLUMNS = 7
_SEEDS_LISTED = 5  # values of more seeds do not fit into a cell
_BETWEEN, _NO_RUN = " / ", "no run"


def outcome_table(found: Sequence[ArmOutcome]) -> str:
    """Returns a table with a row per arm: how many seeds exploded, when, and the others' losses."""
    seeds = sorted({seed for outcome in found for seed in outcome.records})
    header = [
        "arm",
        "mechanism",
        "exploded",
        "95 % interval",
        "explosion",
        "median",
        "loss above the control",
    ]
    titles = panel_titles(outcome.arm for outcome in found)
    rows = [_outcome_row(outcome, seeds) for outcome in found]
    many = len(seeds) > _SEEDS_LISTED
    for row, outcome in zip(rows, found, strict=True):
        name = outcome.arm.name
        if name != outcome.arm.title and (many or titles[name] == name):
            row[0] = f"{name}: {row[0]}"  # the name in the figure and in the table of seeds
    everything = [record for outcome in found for record in outcome.records.values()]
    if any(record.signals for record in everything):
        header.append("largest score at the end")
        rows = [[*row, _scores(o, seeds)] for row, o in zip(rows, found, strict=True)]
    judged = any(record.large_heads for record in everything)
    if judged:
        header.append("runaway")
        rows = [[*row, _runaways(o, seeds)] for row, o in zip(rows, found, strict=True)]
    if any(record.rollbacks for record in everything):
        header.append("rollbacks")
        rows = [[*row, _rollbacks(o, seeds)] for row, o in zip(rows, found, strict=True)]
    reasons = undecided(found)
    verdict = f"\nExplosions decide nothing where a control fails: {'; '.join(reasons)}.\n"
    listed = f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    order = ", in this order" if len(seeds) > 1 and not many else ""
    told = {word for outcome in found for word in outcome.words.values()}
    explained = "".join(text for word, text in _EXPLAINED.items() if word in told)
    if judged:
        meaning = runaway(record.runaway_rule for record in everything)
        explained += f"{meaning}; in brackets how many have. "
    legend = (
        f"{listed}{order}. Mechanism: *A*, a row statistic is rounded; *B*, O or P̄V is rounded and "
        f"δ reads it; in brackets the points that do; {NEITHER}, neither. Explosion: the step from "
        f"which the training loss, a mean of {SMOOTHED_STEPS} steps, stayed {EXCESS_NATS} nats "
        f"above its best for {LASTING_STEPS} steps. {explained}Intervals are Wilson's, of the runs "
        f"that exploded, are healthy or behind."
    )
    each = f"\n{_seed_table(found, seeds)}" if many else ""
    return f"{with_legend(legend, header, rows)}{verdict if reasons else ''}{each}"


_EXPLAINED: dict[Word, str] = {
    "healthy": f"*Healthy*: none, up to {HEALTHY_AFTER} times the step at which the positive "
    "control of the seed broke, and no score still grows. ",
    "growing": "*Growing*: as healthy, but the largest score in the last quarter of the steps is "
    f"above {GROWING_SCORE:g}, and above {GROWING_FACTOR:g} times that of the quarter before. ",
    "behind": f"*Behind*: none so far, but at the end the loss is {EXCESS_NATS} nats or more above "
    "the negative control's. ",
    "censored": "*Censored*: none, but the run is shorter, or that control did not break. ",
    "not finite": "*Not finite*: the run ended at a step that was withheld, since a loss, gradient "
    "or update was not finite. ",
}


def not_finite_table(found: Sequence[ArmOutcome]) -> str | None:
    """Returns a table of the runs that ended at a value that was not finite, or None if none did.

    It has a row per arm and first such value.
    """
    runs = [
        (outcome, record)
        for outcome in found
        for record in outcome.records.values()
        if record.not_finite is not None
    ]
    if not runs:
        return None
    titles = panel_titles(outcome.arm for outcome in found)
    ended: dict[tuple[str, str], list[ArmRecord]] = {}
    for outcome, record in runs:
        assert record.failure is not None
        what = record.failure["message"].removeprefix("first non-finite value ")
        ended.setdefault((titles[outcome.arm.name].replace("\n", " "), what), []).append(record)
    rows = []
    for (arm, what), records in ended.items():
        steps = {record.not_finite for record in records if record.not_finite is not None}
        after = sum(record.explosion is not None for record in records)
        rows.append([arm, str(len(records)), span(steps, _step), what, str(after or "")])
    legend = "Runs that ended at a step that was withheld: where the first value was not finite."
    header = ["arm", "runs", "step", "not finite", "of which exploded before"]
    return with_legend(legend, header, rows)


def _seed_table(found: Sequence[ArmOutcome], seeds: Sequence[int]) -> str:
    """Returns a table with a row per seed and how each run ended; the outcome table only counts."""
    legend = (
        "By seed: the step of explosion, or what became of the run, and the step at which a value "
        "was not finite."
    )
    rows = [[str(seed), *(_end(outcome, seed) for outcome in found)] for seed in seeds]
    return with_legend(legend, ["seed", *(outcome.arm.name for outcome in found)], rows)


def _end(outcome: ArmOutcome, seed: int) -> str:
    """Returns the step of the explosion, else the step that was not finite, else the outcome."""
    if seed not in outcome.records:
        return _NO_RUN
    record, word = outcome.records[seed], outcome.words[seed]
    if record.explosion is not None:
        return f"{record.explosion:,}"
    return f"not finite at {record.not_finite:,}" if record.not_finite is not None else word


def _outcome_row(outcome: ArmOutcome, seeds: Sequence[int]) -> list[str]:
    control = f" ({outcome.arm.control} control)" if outcome.arm.control else ""
    median = outcome.median_explosion
    return [
        f"{outcome.arm.title}{control}",
        outcome.mechanism,
        f"{outcome.exploded} of {len(outcome.records)}",
        share_interval(outcome),
        _explosions(outcome, seeds),
        NONE if median is None else f"{median:,.0f}",
        _excesses(outcome, seeds),
    ]


def share_interval(outcome: ArmOutcome) -> str:
    """Returns the 95 % interval of the share of runs that explode; a dash if no run is known."""
    return NONE if outcome.interval is None else "{:.0%} to {:.0%}".format(*outcome.interval)


def _step(step: float) -> str:
    return f"{step:,.0f}"


def _explosions(outcome: ArmOutcome, seeds: Sequence[int]) -> str:
    if len(seeds) <= _SEEDS_LISTED:
        return _BETWEEN.join(_end(outcome, seed) for seed in seeds)
    steps = [r.explosion for r in outcome.records.values() if r.explosion is not None]
    parts = [span(steps, _step)] if steps else []
    others: tuple[Word, ...] = ("behind", "healthy", "growing", "censored", "not finite")
    parts += [f"{count} {word}" for word in others if (count := outcome.count(word))]
    return _BETWEEN.join(parts)


def _scores(outcome: ArmOutcome, seeds: Sequence[int]) -> str:
    """Returns the largest |score| of all layers at the last record of each run, or NaN."""
    last: dict[int, float] = {}
    for seed, record in outcome.records.items():
        if record.signals:
            step = max(record.signals)
            (of_layers,) = largest_scores({step: record.signals[step]}).values()
            last[seed] = float(np.max(of_layers))  # unlike `max`, it keeps a NaN
    return _numbers(outcome, seeds, last, number)


def _runaways(outcome: ArmOutcome, seeds: Sequence[int]) -> str:
    if len(seeds) > _SEEDS_LISTED:
        return ran_away(outcome.records.values())
    found = {seed: record.large_heads for seed, record in outcome.records.items()}
    texts = {
        seed: f"{'yes' if large.ran_away else 'no'} ({large.heads})"
        for seed, large in found.items()
        if large
    }
    return _by_seed(outcome, seeds, texts)


def _rollbacks(outcome: ArmOutcome, seeds: Sequence[int]) -> str:
    """Returns how often each run went back to an earlier step."""
    counts = {seed: len(record.rollbacks) for seed, record in outcome.records.items()}
    return _numbers(outcome, seeds, counts if any(counts.values()) else {}, str)


def _excesses(outcome: ArmOutcome, seeds: Sequence[int]) -> str:
    known = {seed: x for seed, x in outcome.excess.items() if math.isfinite(x)}
    return _numbers(outcome, seeds, known, "{:+.3f}".format)


def _numbers(
    outcome: ArmOutcome,
    seeds: Sequence[int],
    values: Mapping[int, float],
    text: Callable[[float], str],
) -> str:
    """Returns the number of each seed or, of many seeds, the least and largest number."""
    if len(seeds) > _SEEDS_LISTED or not values:
        return span(values.values(), text)
    return _by_seed(outcome, seeds, {seed: text(x) for seed, x in values.items()})


def _by_seed(outcome: ArmOutcome, seeds: Sequence[int], texts: Mapping[int, str]) -> str:
    """Returns the text of each seed, or what stands for a run without one or for no run."""
    of_runs = dict.fromkeys(outcome.records, NONE) | dict(texts)
    return _BETWEEN.join(of_runs.get(seed, _NO_RUN) for seed in seeds)


def score_table(records: Sequence[ArmRecord], layer: int, steps: Sequence[int]) -> str:
    """Returns a table with a row per run: the largest |score| of a layer by step, and the end.

    Args:
      records: the records of the arms.
      layer: the layer, counted from 0.
      steps: the steps of the columns.
    """
    seeds = len({record.seed for record in records}) > 1
    header = [
        "arm",
        *(["seed"] if seeds else []),
        *map(str, steps),
        "other layers",
        "W_Q norm",
        "validation loss",
        "its largest rise",
        "not finite at step",
    ]
    rows = []
    for record in records:
        title, *cells = _row(record, layer, steps)
        rows.append([title, *([str(record.seed)] if seeds else []), *cells])
    table = markdown(header, rows)
    held_out = any(record.held_out is not None for record in records)
    return (
        f"Largest |score| of layer {layer} by step (layers count from 0); then, at an arm's last "
        f"recorded step: the largest |score| of\nany other layer, the largest spectral norm of a "
        f"head's W_Q in layer {layer}, the validation loss and the most by which it exceeded an "
        f"earlier one.{_HELD_OUT if held_out else ''}\n\n{table}"
    )


_HELD_OUT = (
    "\nStarred: on held-out text, as earlier versions measured the end of a run; so is its last "
    "point in a figure.\nAll others: on the training batch of the step."
)


_ACROSS_STEPS = {
    "outer_product_similarity": "two tokens of a step",
    "outer_product_similarity_across_steps": "a token of either step",
    "common_direction_across_steps": "common directions",
    "delta_error_cumulative": "Σ of δ's errors",
}


def across_steps_table(records: Sequence[ArmRecord]) -> str | None:
    """Returns a table with a row per run on whether errors of δ add up over tokens and steps.

    Args:
      records: the records of the arms. Without one that has recorded this, the result is None.
    """
    recorded = [
        record
        for record in records
        if any("delta_error_cumulative" in layer for layer in record.signals[max(record.signals)])
    ]
    if not recorded:
        return None
    legend = (
        "Cells have the value of largest size of all layers and heads, at a run's last recorded "
        "step, and its layer. First cosines between the matrices (PK)[T]ᵀ X[T] of two tokens of "
        "the step; of a token of this step and one of the step measured before; and between the "
        "common directions of either step (`lowprec_attn.diagnostics.across_steps`). Then the sum "
        "of (δ_lp − δ_hp)[T] over the tokens of every measurement "
        "(`lowprec_attn.training.across_steps`)."
    )
    rows = [
        [record.arm.title, str(record.seed), *(_extreme(record, name) for name in _ACROSS_STEPS)]
        for record in recorded
    ]
    return with_legend(legend, ["arm", "seed", *_ACROSS_STEPS.values()], rows)


def _extreme(record: ArmRecord, name: str) -> str:
    """Returns the value of largest magnitude at the last step (NaN if one is), and its layer."""
    layers = record.signals[max(record.signals)]
    values = [(x, i) for i, layer in enumerate(layers) for x in layer.get(name, ())]
    if not values:
        return NONE
    value, layer = max(values, key=lambda pair: math.inf if pair[0] != pair[0] else abs(pair[0]))
    return f"{value:.2g} in {layer}"


def spread(records: Sequence[ArmRecord]) -> list[int]:
    """Returns the recorded steps nearest to seven evenly spread ones, up to the last."""
    recorded = sorted({step for record in records for step in record.signals})
    wanted = np.linspace(recorded[-1] / _COLUMNS, recorded[-1], _COLUMNS)
    return sorted({min(recorded, key=lambda step: abs(step - x)) for x in wanted})


def _row(record: ArmRecord, layer: int, steps: Sequence[int]) -> list[str]:
    last = max(record.signals)

    def marked(text: str, step: int) -> str:
        return f"{text}*" if step == record.held_out else text

    others = [
        record.largest("score_maximum", last, i)
        for i in range(len(record.signals[last]))
        if i != layer
    ]
    losses = record.val_losses
    return [
        record.arm.title,
        *(
            marked(number(record.largest("score_maximum", step, layer)), step)
            if step in record.signals
            else NONE
            for step in steps
        ),
        marked(number(max(others)), last) if others else NONE,
        f"{record.largest('query_weight_norm', last, layer):.1f}",
        f"{losses[max(losses)]:.3f}" if losses else NONE,
        _largest_rise(losses),
        "no" if record.not_finite is None else f"{record.not_finite}",
    ]


def _largest_rise(losses: Mapping[int, float]) -> str:
    """Returns the most by which a loss exceeds an earlier one, and the step, as text."""
    steps = sorted(losses)
    if len(steps) < 2:
        return NONE
    values = np.array([losses[step] for step in steps])
    rises = values - np.minimum.accumulate(values)
    last = int(np.argmax(rises))
    return "none" if rises[last] == 0 else f"{rises[last]:.2f} at {steps[last]}"
