"""The first and last lines that a run prints: what was chosen and why, and how it ended."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lowprec_attn import attention, hosts
from lowprec_attn.arithmetic.request import Request, Spec
from lowprec_attn.counts import many
from lowprec_attn.data.tokens import Corpus, unigram_loss
from lowprec_attn.numerics import PRESETS, Numerics, RowMax
from lowprec_attn.runs.instability.explosion import failure_in_words
from lowprec_attn.runs.pages.run import write_run_page
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.tables import columns
from lowprec_attn.training.devices import Devices
from lowprec_attn.training.models import parameter_count
from lowprec_attn.training.resources.efficiency import efficiency
from lowprec_attn.training.settings import Model, TrainSettings

# Beyond this number of epochs, a text teaches much less each time it is read again (Muennighoff et
# al., arXiv 2305.16264).
_EPOCHS = 4.0


def announce(settings: TrainSettings, corpus: Corpus, devices: Devices, run_dir: Path) -> None:
    """Prints device, scale, data, arithmetic, tokens per step, total tokens and run directory."""
    hosts.say(columns(_lines(settings, corpus, devices, run_dir), "<<"))


def _lines(
    settings: TrainSettings, corpus: Corpus, devices: Devices, run_dir: Path
) -> list[tuple[str, str]]:
    model = settings.model
    parameters = parameter_count(model)
    device = devices.mesh.devices.flat[0]
    tokens = settings.batch_size * model.context
    default = "tiny" if device.platform == "cpu" else "short"
    processes = jax.process_count()
    where = f" in {processes} processes" if processes > 1 else ""
    count = devices.mesh.devices.size
    lines = [
        ("device", f"{count} x {device.device_kind}{where}, JAX {jax.__version__}"),
        (
            "scale",
            f"{settings.variant} ({default} is the default on this device; "
            "--config=FILE:tiny, FILE:short or FILE:full chooses): "
            f"{parameters / 1e6:.1f}M parameters, "
            f"{many(model.layers, 'layer')}, {_heads(model)}, width {model.width}, "
            f"context {model.context}",
        ),
        (
            "data",
            f"{corpus.description}: {corpus.train.count:,} tokens to train on, "
            f"{corpus.val.count:,} held out"
            + ("" if settings.data.path else " (needs no download; data.path=DIR reads your own)"),
        ),
    ]
    lines += [("attention", text) for text in arithmetic(settings)]
    if settings.rollback is not None and settings.rollback.attention is not None:
        after = dataclasses.replace(settings, attention=settings.rollback.attention)
        lines += [("rolled back", text) for text in arithmetic(after)]
    split = f" in {settings.accumulation_steps} parts" if settings.accumulation_steps > 1 else ""
    lines += [
        (
            "step",
            f"{tokens:,} tokens ({settings.batch_size} x {model.context}{split}), "
            f"learning rate {settings.optimizer.peak_lr:g}",
        ),
        *_length(settings.steps, settings.steps * tokens, corpus.train.count),
        ("run", str(run_dir)),
    ]
    return lines


def _heads(model: Model) -> str:
    shared = model.kv_heads < model.heads
    return many(model.heads, "head") + (f" ({model.kv_heads} of keys)" if shared else "")


def _length(steps: int, tokens: int, text: int) -> list[tuple[str, str]]:
    """Returns the line about the run's length, and a warning if it reads its text many times.

    Args:
      steps, tokens: numbers of steps and tokens of the run.
      text: number of tokens of the training text.
    """
    epochs = tokens / text
    lines = [("steps", f"{steps:,}: {tokens:,} tokens, {epochs:,.1f} epochs of the text")]
    if epochs > _EPOCHS:
        enough = max(1, int(_EPOCHS * text * steps / tokens))
        warning = (
            f"the text is read {epochs:,.1f} times, and teaches little after {_EPOCHS:g}; "
            f"--config.data.path=DIR reads a larger one, --config.steps={enough} stops there"
        )
        lines.append(("warning", warning))
    return lines


def arithmetic(settings: TrainSettings, platform: str | None = None) -> list[str]:
    """Returns one line per distinct arithmetic: its name, its implementation, its heads.

    Args:
      settings: settings of the run.
      platform: name of the platform to compile for, None for that of this process's devices.
    """
    where: dict[tuple[Numerics, RowMax], list[str]] = {}
    for i, layer in enumerate(settings.attention.layers):
        for group in layer:
            heads = "" if len(layer) == 1 else f" heads {', '.join(map(str, group.heads))}"
            where.setdefault((group.numerics, group.row_max), []).append(f"{i}{heads}")
    return [
        f"{_name(*shared)}, {_implementation(settings, *shared, platform)}"
        + ("" if len(where) == 1 else f", in layer {', '.join(places)}")
        for shared, places in where.items()
    ]


def _name(numerics: Numerics, row_max: RowMax) -> str:
    """Returns the preset's name or `custom`, all points, and the row-max rule."""
    plain = numerics.replace(kv_block=None)
    named = (name for name, n in PRESETS.items() if n.replace(kv_block=None) == plain)
    preset = next(named, "custom")
    points = str(numerics).removeprefix("Numerics")
    return f"{preset} {points}, row max {row_max}"


def _implementation(
    settings: TrainSettings, numerics: Numerics, row_max: RowMax, platform: str | None
) -> str:
    model = settings.model
    spec = Spec(
        numerics=numerics, row_max=row_max, scale=1.0, soft_cap=model.soft_cap, is_causal=True
    )
    request = Request(
        spec=spec,
        q_shape=(1, model.context, model.heads, model.head_size),
        kv_shape=(1, model.context, model.kv_heads, model.head_size),
        value_size=model.value_size,
        has_sinks=model.sinks,
        dtype=jnp.dtype(model.activation_dtype),
        platform=platform,
    )
    if (function := settings.attention.function) is not None:
        return (
            f"which `{function}` is taken to have; it computes all layers, on a GPU not always to "
            "the same bits"
        )
    name = attention.resolve(request, settings.attention.implementation)
    exponent = attention.exponent_of(request, settings.attention.implementation)
    return f"computed by `{name}`, exponents {exponent}"


@hosts.first_only
def report_failure(run_dir: RunDir, failure: Mapping[str, Any]) -> None:
    """Records and prints that a run failed: a value was not finite, or the loss exploded.

    Args:
      run_dir: directory of the run.
      failure: content of `failure.json`, with a `step` and a `message`.
    """
    run_dir.end(run_dir.failure, failure, lambda: _show(run_dir))
    print(f"{failure_in_words(failure)}; the last state is in {run_dir.path}")


@hosts.first_only
def report_end(run_dir: RunDir, loss: float, corpus: Corpus) -> None:
    """Records and prints the losses of a run that has reached its last step."""
    unigram = unigram_loss(corpus.train, corpus.val)
    run_dir.failure.unlink(missing_ok=True)  # left by an earlier attempt
    summary = {"val_loss": loss, "unigram_loss": unigram, "below_unigram": unigram - loss}
    run_dir.end(run_dir.summary, summary, lambda: _show(run_dir))
    print(outcome(loss, unigram))


def outcome(val_loss: float, unigram_loss: float) -> str:
    """Returns the final losses of a run in words; both are in nats per token."""
    side = "below" if val_loss <= unigram_loss else "above"
    return (
        f"validation loss {val_loss:.3f} nats per token, "
        f"{abs(unigram_loss - val_loss):.3f} {side} the unigram model's {unigram_loss:.3f}"
    )


def _show(run_dir: RunDir) -> None:
    """Writes the page of the run, and prints how to open the page and the curves."""
    events = shlex.quote(str(run_dir.tensorboard))
    lines = [
        ("page", str(write_run_page(run_dir, efficiency))),
        ("curves", f"pip install tensorboard && tensorboard --logdir={events}"),
    ]
    print(columns(lines, "<<"))
