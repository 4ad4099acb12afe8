"""Writes the page of one run: its health, curves, signals and speed, and how to repeat it."""

import json
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from lowprec_attn.counts import many
from lowprec_attn.diagnostics.rules import RULES, Rule
from lowprec_attn.files import flatten
from lowprec_attn.runs.history import History, Layer
from lowprec_attn.runs.instability.health import Health, judge
from lowprec_attn.runs.pages import figures, layers, style
from lowprec_attn.runs.pages.drawing import drawing
from lowprec_attn.runs.pages.markup import element, folded, keys, table, write_page
from lowprec_attn.runs.run_dir import RunDir

_INCIDENTS_SHOWN = 8

Efficiency = Callable[[History, float], str]
"""Maps a run and its tokens per second to a sentence on the reached share of the devices' peak."""


def write_run_page(run_dir: RunDir, efficiency: Efficiency, path: Path | None = None) -> Path:
    """Writes the page of a run, finished or not; returns its path.

    Args:
      run_dir: the run directory.
      efficiency: returns a sentence on the share of the devices' peak that the run reached, or on
        why that share is not known.
      path: the file to write; None for `report.html` in the run directory.

    Raises:
      RunError, OSError: a record of the run cannot be read.
      DiskError: the page cannot be written.
    """
    path = run_dir.page if path is None else path
    history = History.read(run_dir)
    health = judge(history)
    write_page(
        path,
        title(history),
        [
            element("h1", title(history)),
            element("p", health.sentence, class_=f"state {health.state}"),
            *_rules_met(health),
            *_incidents(history),
            *_curves(history, health),
            *_signals(history),
            *_speed(history, efficiency),
            *_origin(history),
        ],
    )
    return path


def title(history: History) -> str:
    """Returns a line that identifies a run: directory, config, arithmetic, seed."""
    config, attention = history.config, history.config.get("attention", {})
    return (
        f"{history.path.name}: {config.get('name')}:{config.get('variant')}, numerics "
        f"{_numerics(attention)}, row max {attention.get('row_max')}, seed {config.get('seed')}"
    )


def _numerics(attention: Mapping[str, Any]) -> str:
    """Returns the preset's name, with the points that are changed and where others are computed."""
    points = (attention.get("points") or {}).items()
    changed = [f"{point}={value}" for point, value in points if value is not None]
    changed += [f"other {places}" for places in ("layers", "heads") if attention.get(places)]
    name = str(attention.get("numerics"))
    return f"{name} with {', '.join(changed)}" if changed else name


def _rules_met(health: Health) -> list[Element]:
    if not health.met and not health.noted:
        return []
    rows = [
        (
            met.alarm.rule.name,
            f"{met.step:,}",
            f"{met.layer}",
            f"{met.alarm.head}",
            f"{met.alarm.value:.4g}",
            f"{met.alarm.rule.threshold:g}",
            f"{met.times}",
            "yes" if met.at_last else "no",
            "no, alone" if met in health.noted else "yes",
            met.alarm.rule.meaning.format(value=met.alarm.value),
        )
        for met in (*health.met, *health.noted)
    ]
    header = (
        *("rule", "first step", "layer", "head", "value", "threshold", "diagnostics that meet it"),
        *("at the last", "warns", "meaning"),
    )
    return [element("h2", "Rules met"), table(header, rows)]


def _incidents(history: History) -> list[Element]:
    if not history.incidents:
        return []
    rows = [(f"{incident.step:,}", incident.text) for incident in history.incidents]
    listed = table(("step", "what happened"), rows)
    if len(rows) > _INCIDENTS_SHOWN:
        listed = folded(f"{len(rows)}, from step {rows[0][0]} on", listed)
    return [element("h2", "Warnings, spikes, rollbacks"), listed]


def _curves(history: History, health: Health) -> list[Element]:
    drawn = [drawing(figures.loss(history, health), "loss", "Loss, nats per token")]
    if history.signals:
        by_name = {rule.name: rule for rule in RULES}
        for rule in (by_name.pop("scores"), *by_name.values()):
            drawn.append(_rule_figure(history, health, rule))
        norms = figures.by_layer(history, _value("query_weight_norm"), health, log=False)
        drawn.append(drawing(norms, "norms", "Largest spectral norm of a head's W_Q"))
        drawn += _across_steps(history, health)
    legend = [
        (style.RAW, "training, each step"),
        (style.SMOOTHED, "training, mean of 50 steps"),
        (style.VALIDATION, "validation"),
        (
            style.THRESHOLD,
            "dashed: unigram model, threshold of a rule; grey line: undone by a rollback",
        ),
        (style.EXPLOSION, "explosion, or not finite (a value: a cross)"),
        (style.ALARM, "dotted: a rule is met first, a rollback; cross: a spike"),
    ]
    shades = figures.shades(history.layers)
    return [
        element("h2", "Curves"),
        element("div", *drawn, class_="figures"),
        keys(legend),
        keys((shade, f"layer {i}") for i, shade in enumerate(shades)),
    ]


_RULE_TITLES = {
    "scores": "Largest |score| of each layer",
    "row_sums": "Σ_j P − 1 of the backward pass, RMS over rows, worst head of each layer",
    "delta": "Errors of δ as a share of W_Q's gradient, worst head of each layer",
}


def _rule_figure(history: History, health: Health, rule: Rule) -> Element:
    figure = figures.by_layer(history, rule.value, health, rule.threshold)
    caption = f"{_RULE_TITLES[rule.name]}; rule {rule.name}: ≥\N{NO-BREAK SPACE}{rule.threshold:g}"
    if rule.least_score:
        caption += f" in heads with a score of {rule.least_score:g} or more"
    if rule.least_gradient:
        caption += f" and {rule.least_gradient:g} or more of the layer's largest gradient"
    return drawing(figure, rule.name, caption)


_ACROSS_STEPS = {
    "delta_error_cumulative": "Σ (δ_lp − δ_hp) over the tokens of all measurements so far, the "
    "head of each layer where it is largest in size",
    "outer_product_similarity_across_steps": "Mean cosine between (PK)[T]ᵀ X[T] of a token and of "
    "one at the measurement before, the head of each layer where it is largest in size",
}


def _across_steps(history: History, health: Health) -> list[Element]:
    """Draws whether errors of δ add up over training, if that was recorded."""
    recorded = {name for layers in history.signals.values() for layer in layers for name in layer}
    return [
        drawing(figures.by_layer(history, _of_largest_size(name), health, log=False), name, caption)
        for name, caption in _ACROSS_STEPS.items()
        if name in recorded
    ]


def _of_largest_size(name: str) -> Callable[[Layer], np.ndarray]:
    def value(layer: Layer) -> np.ndarray:
        x = np.asarray(layer.get(name, [-np.inf]), float)
        return x[[np.argmax(np.abs(x))]]

    return value


def _value(name: str) -> Callable[[Layer], np.ndarray]:
    return lambda layer: np.asarray(layer.get(name, [-np.inf]), float)


def _signals(history: History) -> list[Element]:
    if not history.signals:
        note = "none were recorded (diagnostics_every=0)"
        return [element("h2", "Signals"), element("p", note)]
    where = element("code", "lowprec_attn.diagnostics.attention_signals")
    across = element("code", "lowprec_attn.training.across_steps")
    said = element(
        *("p", "The docstring of ", where, " defines the signals of one step. The docstring of "),
        *(across, " defines the signals that compare a step with the step measured before."),
    )
    return [element("h2", "Signals of every layer and head"), said, *layers.details(history)]


def _speed(history: History, efficiency: Efficiency) -> list[Element]:
    heading = element("h2", "Speed")
    if not history.rates:
        return [heading, element("p", "no timing was recorded")]
    rate = statistics.median(history.rates.values())
    said = (
        f"{rate:,.0f} tokens a second, the median of {many(len(history.rates), 'step')}. The first "
        f"step of a process compiles. A step that waits for diagnostics includes their time. "
        f"{efficiency(history, rate)}"
    )
    figure = drawing(figures.rates(history.rates), "speed", "Tokens per second")
    return [heading, element("p", said), element("div", figure, class_="figures")]


def _origin(history: History) -> list[Element]:
    """Returns the config, the environment and the command that made the run."""
    config = [(element("code", name), json.dumps(value)) for name, value in flatten(history.config)]
    parts = [element("h2", "How to repeat it")]
    if history.starts:
        parts.append(element("pre", _command(history.starts[0])))
        described = [dict(flatten(start)) for start in history.starts]
        names = list(dict.fromkeys(name for start in described for name in start))
        header = ("", *(f"start {i + 1}" for i in range(len(described))))
        rows = [(name, *(_cell(start.get(name)) for start in described)) for name in names]
        parts.append(folded("environment of every start", table(header, rows)))
    else:
        parts.append(element("p", "environment.json is missing, which holds the command"))
    parts.append(folded("config", table(("field", "value"), config)))
    return parts


def _command(start: Mapping[str, Any]) -> str:
    commit = start.get("commit")
    words: Sequence[str] = start.get("command", [])
    program = ["python"] if words and words[0].endswith(".py") else []
    lines = [shlex.join([*program, *words])]
    if commit is None:
        lines.insert(0, "# the commit is not known: this was no checkout")
    else:
        clean = str(commit).removesuffix("-dirty")
        changed = "   # with changes that are in no commit" if clean != commit else ""
        lines.insert(0, f"git checkout {clean}{changed}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
