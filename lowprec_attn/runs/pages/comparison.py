"""The page of several runs: fields that differ, curves over each other, last numbers."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np

from lowprec_attn.diagnostics.rules import RULES
from lowprec_attn.files import flatten
from lowprec_attn.runs.history import History, HistoryError
from lowprec_attn.runs.instability.explosion import smoothed_losses
from lowprec_attn.runs.instability.health import Health, judge
from lowprec_attn.runs.pages import figures
from lowprec_attn.runs.pages.drawing import drawing
from lowprec_attn.runs.pages.markup import Content, element, keys, table, write_page
from lowprec_attn.runs.pages.run import median_rate
from lowprec_attn.runs.run_dir import RunDir

_SCORES = next(rule for rule in RULES if rule.name == "scores")
_ABSENT = "(absent)"


def write_comparison(run_dirs: Sequence[RunDir], path: Path) -> Path:
    """Writes the page of several runs; returns its path.

    Args:
      run_dirs: run directories, finished or not, each of them once.
      path: where to.

    Raises:
      RunError, OSError: a record of a run cannot be read, or a run is there twice.
      DiskError: the disk refuses.
    """
    histories = [History.read(run_dir) for run_dir in run_dirs]
    names = _names([history.path for history in histories])
    healths = [judge(history) for history in histories]
    scores = [_largest_scores(history) for history in histories]
    losses = [smoothed_losses(history.losses) for history in histories]
    drawn = [
        drawing(
            figures.series(histories, losses, [history.val_losses for history in histories]),
            "loss",
            "Loss, nats per token: training, mean of 50 steps; points: validation",
        )
    ]
    if any(scores):
        figure = figures.series(histories, scores, log=True, threshold=_SCORES.threshold)
        caption = f"Largest |score| of any layer; rule scores: ≥ {_SCORES.threshold:g}"
        drawn.append(drawing(figure, "scores", caption))
    title = f"Comparison of {len(names)} runs"
    write_page(
        path,
        title,
        [
            element("h1", title),
            *(
                element("p", element("b", name), f": {health.sentence}", class_=_state(health))
                for name, health in zip(names, healths, strict=True)
            ),
            element("h2", "Fields of the configs that differ"),
            _differences(names, histories),
            element("h2", "Curves"),
            keys((figures.shade_of_run(i), name) for i, name in enumerate(names)),
            element("div", *drawn, class_="figures"),
            element("h2", "Last numbers"),
            _ends(names, histories, healths, scores),
        ],
    )
    return path


def _state(health: Health) -> str:
    return f"state {health.state}"


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as few as tell them apart."""
    for path in paths:
        if paths.count(path) > 1:
            raise HistoryError(f"{path} is there twice; give every run once")
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _differences(names: Sequence[str], histories: Sequence[History]) -> Element:
    configs = [
        {name: _short(json.dumps(value)) for name, value in flatten(history.config)}
        for history in histories
    ]
    fields = dict.fromkeys(field for config in configs for field in config)
    rows: list[tuple[Content, ...]] = [
        (element("code", field), *values)
        for field in fields
        if len(set(values := [config.get(field, _ABSENT) for config in configs])) > 1
    ]
    if not rows:
        return element("p", "none: the configs are equal")
    return table(("field", *names), rows)


def _short(value: str) -> str:
    """Without most of a SHA-256, which would make a column wider than a page."""
    return re.sub(r'^"([0-9a-f]{12})[0-9a-f]{52}"$', r'"\1…"', value)


def _largest_scores(history: History) -> dict[int, float]:
    """By step, of all layers and heads."""
    found: dict[int, float] = {}
    for layer in range(figures.layers(history)):
        for step, value in figures.largest(history, _SCORES.value, layer).items():
            found[step] = float(np.maximum(found.get(step, -math.inf), value))
    return found


def _ends(
    names: Sequence[str],
    histories: Sequence[History],
    healths: Sequence[Health],
    scores: Sequence[Mapping[int, float]],
) -> Element:
    rows = []
    for name, history, health, score in zip(names, histories, healths, scores, strict=True):
        smoothed = smoothed_losses(history.losses)
        rows.append(
            (
                name,
                f"{history.steps:,}",
                health.state,
                _at(health.explosion if health.not_finite is None else health.not_finite),
                _at(health.met[0].step if health.met else None),
                _last(smoothed, ".4f"),
                _last(history.val_losses, ".4f"),
                f"{min(history.val_losses.values()):.4f}" if history.val_losses else "–",
                _last(score, ".4g"),
                f"{np.max(list(score.values())):.4g}" if score else "–",
                f"{median_rate(history):,.0f}" if history.rates else "–",
            )
        )
    header = (
        *("run", "steps", "state", "exploded, or not finite, at", "first alarm at"),
        *("training loss, mean of 50", "validation loss", "lowest"),
        *("largest |score|", "at any step", "tokens a second"),
    )
    return table(header, rows)


def _at(step: int | None) -> str:
    return "–" if step is None else f"{step:,}"


def _last(values: Mapping[int, float], form: str) -> str:
    return format(values[max(values)], form) if values else "–"
