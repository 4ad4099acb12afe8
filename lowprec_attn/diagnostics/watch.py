"""Watches a training run: measures attention at regular steps and warns where scores run away.

The steps between cost nothing. At a watched step the arrays of one sequence are captured and
measured in the same way as in `diagnose`.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from lowprec_attn.diagnostics import masks
from lowprec_attn.diagnostics.capture import Capture, capture
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.measurement import Arithmetic, measure, refusal
from lowprec_attn.diagnostics.rules import RULES, RUNAWAY_SCORE, Signals, runaway
from lowprec_attn.diagnostics.verdict import SMALL
from lowprec_attn.errors import OneLineError
from lowprec_attn.files import append_line, strict_json
from lowprec_attn.numerics import EXACT, FLASH, Numerics, get_preset

_logger = logging.getLogger("lowprec_attn.watch")

_SHARES = next(rule.signals for rule in RULES if rule.name == "delta")
_LARGE_SHARE = next(rule.threshold for rule in RULES if rule.name == "delta")
SIGNALS = ("score_maximum", *_SHARES, "p_row_sum_error_rms", "ds_row_sum_rms",
           "rounded_ds_row_sum_rms")  # fmt: skip
_WITH_CAP = (*SIGNALS, "score_maximum_before_cap")

Write = Callable[[int, dict[str, float]], Any]


class SummaryWriter(Protocol):
    """A TensorBoard writer, as in PyTorch and tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Records one number."""


class Framework(NamedTuple):
    """What differs between JAX and PyTorch.

    Attributes:
      captured: opens a block that captures the arrays of one backward pass.
      cure: the call that makes rows of dS sum to zero in this framework.
      on_cpu: whether to measure on the CPU instead of JAX's default device.
    """

    captured: Callable[[], contextlib.AbstractContextManager[Capture]]
    cure: str
    on_cpu: bool = False


class WatchError(OneLineError, ValueError):
    """A layer cannot be watched; the message says why, in one line."""


class Watch:
    """Watches attention at some steps of a run; the `watch` of JAX or of PyTorch makes one.

    Attributes:
      every: a step is watched if its number is a multiple of this, 0 included.
    """

    def __init__(
        self,
        every: int,
        path: str | Path | None,
        write: Write | SummaryWriter | None,
        numerics: Numerics | str | None,
        framework: Framework,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every = every
        self._path = None if path is None else Path(path)
        self._write = write
        self._given = get_preset(numerics) if isinstance(numerics, str) else numerics
        self._numerics = self._given or EXACT  # the arithmetic of the last watched step
        self._framework = framework
        self._ran_away: set[str] = set()  # layers that had run away at the last watched step

    def step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Returns a block for the forward and backward pass of a step.

        The block does nothing at a step that is not watched.

        Args:
          step: the number of the step, from 0.

        Raises:
          CaptureError: nothing was captured.
          WatchError: a layer has something that cannot be measured, for example a bias.
          DiskError: the file cannot be written.
        """
        return contextlib.nullcontext() if step % self.every else self._watched(step)

    @contextlib.contextmanager
    def _watched(self, step: int) -> Iterator[None]:
        with self._framework.captured() as taken:
            yield
        if not taken.layers:  # with several processes only the first has the layers
            return
        layers = {name: _layers(name, values) for name, values in taken.layers.items()}
        self._numerics = self._given or _of_dtype([one for of in layers.values() for one in of])
        device = jax.local_devices(backend="cpu")[0] if self._framework.on_cpu else None
        with jax.default_device(device) if device else contextlib.nullcontext():
            signals = {name: self._measured(of_name) for name, of_name in layers.items()}
        self._record(step, signals)

    def _measured(self, layers: list[Layer]) -> dict[str, list[float]]:
        """Returns a layer's signals, per head the worst over sequences of different padding."""
        arithmetic = Arithmetic("the run", self._numerics)
        if (refused := refusal(layers[0], arithmetic)) is not None:
            raise WatchError(f"{layers[0].name}: no attention has {refused}; watch with another")
        measured = [measure(layer, arithmetic, _WITH_CAP) for layer in layers]
        return {
            name: np.max([of_one[name] for of_one in measured], axis=0).tolist()
            for name in _WITH_CAP
            if all(name in of_one for of_one in measured)
        }

    def _record(self, step: int, signals: dict[str, dict[str, list[float]]]) -> None:
        found = {name: heads for name, of in signals.items() if (heads := runaway(of))}
        new = {name: found[name] for name in found if name not in self._ran_away}
        self._ran_away = set(found)
        if self._path is not None:
            line = {"step": step, "signals": signals}
            if found:
                line["runaway"] = {name: list(heads) for name, heads in found.items()}
            append_line(self._path, json.dumps(strict_json(line), allow_nan=False))
        if self._write is not None:
            _send(self._write, step, signals)
        if new:
            cure = None if self._numerics == EXACT else self._framework.cure
            _logger.warning("%s", _warning(step, new, signals, cure))


def watch(
    every: int = 500,
    path: str | Path | None = None,
    *,
    write: Write | SummaryWriter | None = None,
    numerics: Numerics | str | None = None,
) -> Watch:
    """Watches the attention of a run in JAX, in any training loop.

    It measures per layer and head the largest |score| (with a soft cap, both after and before the
    cap), the errors of δ over W_Q's gradient (over dQ, where W_Q's input is not known), the row
    sums of dS, and the row sums of P less 1. It warns in one line of the logger
    `lowprec_attn.watch` where two or more heads of a layer have scores above 512, after the cap.

    The steps between watched steps cost nothing. At a watched step the first sequence of the batch
    is copied to the host and measured on JAX's default device. The first watched step compiles the
    training step once more.

    Args:
      every: number of steps from one watched step to the next.
      path: a file to which each watched step adds a JSON line. With several processes all of them
        watch, because they run one program, and one of them is given the path.
      write: a SummaryWriter of TensorBoard, or a function of a step and a flat dict of numbers,
        such as `lambda step, metrics: wandb.log(metrics, step=step)`.
      numerics: the arithmetic of the run's attention, in which its errors are emulated. None means
        FlashAttention's arithmetic where q is bfloat16 or float16, and `exact` where q is float32
        or float64.

    Raises:
      ValueError: `every` is below 1, or there is no preset of this name.

    Example:
      >>> watched = watch(every=500, path="attention.jsonl")
      >>> for step, batch in enumerate(batches):
      ...     with watched.step(step):
      ...         params, opt_state, loss = train_step(params, opt_state, batch)
    """
    return Watch(every, path, write, numerics, _JAX)


_JAX = Framework(capture, 'attention.dot_product_attention(..., numerics="normalized_delta")')


def _of_dtype(layers: Sequence[Layer]) -> Numerics:
    """Returns FlashAttention's arithmetic in the format of the arrays.

    For float32 and float64 it is `EXACT`.
    """
    formats = {layer.q.dtype.name for layer in layers} - {"float32", "float64"}
    return FLASH.with_format(min(formats)) if formats else EXACT


def _layers(name: str, values: Mapping[str, Any]) -> list[Layer]:
    """Returns a captured layer without what its masks hide, as one layer per kind of padding."""
    for refused in masks.REFUSED.keys() & values.keys():
        raise WatchError(f"{name}: {refused} {masks.REFUSED[refused]}, which is not measured")
    if "ignored" in values:
        ignored = ", ".join(values["ignored"])
        raise WatchError(f"{name}: {ignored} of the call is not measured; train without, or use it "
                         "in another way (is_causal, local_window_size)")  # fmt: skip
    window = values.get("window")
    layer = Layer(
        "",
        name,
        values["q"],
        values["k"],
        values["v"],
        do=values.get("do"),
        x=values.get("x"),
        is_causal=values["is_causal"],
        scale=values.get("scale"),
        window=None if window is None else (int(window[0]), int(window[1])),
        soft_cap=values.get("logits_soft_cap"),
        sinks=values.get("sinks"),
    )
    hiding = {w: np.asarray(values[w]) for w in masks.SERVED if w in values}
    try:
        cut = masks.applied(layer, hiding)
    except ValueError as error:
        raise WatchError(f"{name}: {error}") from error
    return [one._replace(is_causal=bool(one.is_causal)) for one in cut]


def _send(write: Write | SummaryWriter, step: int, signals: Mapping[str, Signals]) -> None:
    metrics = {
        f"attention/{layer}/head_{head}/{name}": float(value)
        for layer, of_layer in signals.items()
        for name, values in of_layer.items()
        for head, value in enumerate(values)
    }
    if callable(write):
        write(step, metrics)
        return
    for name, value in metrics.items():
        write.add_scalar(name, value, step)


def _warning(
    step: int,
    found: Mapping[str, tuple[int, ...]],
    signals: Mapping[str, Signals],
    cure: str | None,
) -> str:
    """Says in one line what was found and what to do.

    `cure` is None where the run's attention rounds nothing.
    """
    places = []
    shares = []
    for name, heads in found.items():
        of_layer = signals[name]
        largest = float(np.asarray(of_layer["score_maximum"])[heads[0]])
        places.append(
            f"{name}: heads {', '.join(map(str, heads))} above {RUNAWAY_SCORE:.0f}, the largest "
            f"{largest:,.0f}"
        )
        known = [np.asarray(of_layer[share])[list(heads)] for share in _SHARES if share in of_layer]
        shares += [float(np.max(known[0]))] if known else []
    share = float(np.max(shares)) if shares else np.nan  # NaN if any share is NaN
    if cure is None:
        said = (
            "Attention is float32, so rounding is not the cause: lower the learning rate, or put "
            "norms on q and k"
        )
    elif not shares:
        said = (
            "The backward pass was not seen: norms on q and k, or a lower learning rate, bound "
            "scores whatever the cause"
        )
    elif not share < _LARGE_SHARE:
        said = (
            f"Errors of δ are {share:.0%} of the gradient that reaches W_Q: use {cure}, whose rows "
            "of dS sum to zero"
        )
    elif share < SMALL * _LARGE_SHARE:
        said = (
            f"Errors of δ are only {share:.1%} of the gradient that reaches W_Q, so the cause is "
            "elsewhere: lower the learning rate, or put norms on q and k"
        )
    else:
        said = (
            f"Errors of δ are {share:.0%} of the gradient that reaches W_Q, which names no cause: "
            f"norms on q and k bound scores, a lower learning rate and {cure} are to be tried"
        )
    return (
        f"step {step:,}: scores run away in {'; '.join(places)}. {said}, and resume from a "
        "checkpoint at which the largest score was below 100"
    )
