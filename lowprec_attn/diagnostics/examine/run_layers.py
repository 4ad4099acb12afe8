"""Gets the layers of a run directory by running a checkpoint on one sequence."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from lowprec_attn import attention
from lowprec_attn.diagnostics.examine import sequence
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError
from lowprec_attn.diagnostics.examine.series import Series
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.diagnostics.trend import QUANTITIES
from lowprec_attn.errors import RunError
from lowprec_attn.runs import metrics
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.history import History
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.models import score_scale
from lowprec_attn.training.run import open_corpus
from lowprec_attn.training.saved_model import restore, settings_of, val_sha256_of
from lowprec_attn.training.settings import Model, TrainSettings
from lowprec_attn.training.signals import LayerArrays, as_computed, make_layers
from lowprec_attn.training.step import make_loss, root_key, step_key


def load(path: Path, text: Path | None = None, last_step: int | None = None) -> list[Layer]:
    """Returns every layer of a run, with X and the arithmetic that it was trained in.

    The parameters come from the newest intact checkpoint. In a run whose loss has become infinite
    or NaN, this is the last good state. The model runs forward and backward once, on one device, on
    the first sequence of the run's held-out text or of `text`.

    Args:
      path: the run directory.
      text: a file of another text, or of token ids; see `sequence.load`.
      last_step: checkpoints and records of later steps are ignored; None keeps all.

    Raises:
      UserError: the path is no run directory, the run has no checkpoint up to `last_step`, its text
        is missing, or the implementation that it names does not run here.
    """
    run_dir = RunDir(path)
    parts = {"config.json": run_dir.config.is_file(), "checkpoints": run_dir.checkpoints.is_dir()}
    if not all(parts.values()):
        missing = " and no ".join(name for name, there in parts.items() if not there)
        raise DiagnoseError(f"{path}: neither a file nor a run directory: it has no {missing}")
    settings = settings_of(path)
    ids, of_text = _sequence(settings, val_sha256_of(path), text)
    try:
        step, layers = _layers(settings, run_dir, ids, last_step)
    except attention.UnsupportedError as error:
        raise DiagnoseError(
            f"{path}: {error}; its config names the implementation "
            f"{settings.attention.implementation}: diagnose it on a device that has it"
        ) from error
    bad_data = _bad_data(run_dir, last_step)
    notes = (f"parameters of step {step}, {of_text[0]}", *of_text[1:], *bad_data)
    return [layer._replace(source=str(path), notes=notes) for layer in layers]


def text_of(path: Path) -> list[Path]:
    """Returns the directory of a run's token files; nothing for a built-in text or another path.

    Raises:
      UserError: the run's config is damaged.
    """
    if not RunDir(path).config.is_file():
        return []
    data = settings_of(path).data.path
    return [] if data is None else [Path(data)]


def series(path: Path, last_step: int | None = None) -> Series | None:
    """Returns the signals that a run has recorded; None where it has fewer than two records.

    Args:
      path: the run directory.
      last_step: as in `load`.

    Raises:
      MetricsError: the metrics of the run are damaged.
    """
    run_dir = RunDir(path)
    if not run_dir.metrics.exists():
        return None
    lines = [line for line in metrics.read(run_dir.metrics) if _is_known(line["step"], last_step)]
    by_step = {line["step"]: line["signals"] for line in lines if "signals" in line}
    if len(by_step) < 2:
        return None
    steps, count = sorted(by_step), max(map(len, by_step.values()))
    layers = [[by_step[step].get(f"layer_{i}", {}) for i in range(count)] for step in steps]
    names = [quantity.signal for quantity in QUANTITIES]
    return Series(
        source=str(path),
        places=tuple(f"step {step:,}" for step in steps),
        layers=tuple(f"layer_{i:02d}" for i in range(count)),
        values={
            name: np.array([[np.max(layer.get(name, np.nan)) for layer in row] for row in layers])
            for name in names
        },
    )


def _is_known(step: int, last_step: int | None) -> bool:
    return last_step is None or step <= last_step


def _bad_data(run_dir: RunDir, last_step: int | None) -> list[str]:
    """Returns a note on the run's last spike that points at its batch, which no array can show."""
    try:
        happened = History.read(run_dir).incidents
    except (RunError, OSError):  # a diagnosis can do without these records
        return []
    spikes = [one for one in happened if one.at_batch and _is_known(one.step, last_step)]
    return [f"of the run's training: {spike}" for spike in spikes[-1:]]


def _sequence(
    settings: TrainSettings, val_sha256: str | None, text: Path | None
) -> tuple[Int32[np.ndarray, "1 ids"], list[str]]:
    """Returns the token ids to run the model on, and notes about them."""
    model = settings.model
    if text is not None:

        def encode() -> sequence.Encode:
            return sequence.of_run(open_corpus(settings.data).val.tokenizer)

        ids = sequence.load(text, model.context, model.vocab_size, encode)
        return ids, [f"the first {ids.shape[1]} tokens of {text}"]
    corpus = open_corpus(settings.data)
    corpus.require(context=model.context, vocab_size=model.vocab_size)
    notes = ["the first sequence of the held-out text"]
    if val_sha256 is not None and val_sha256 != corpus.val.sha256:
        notes.append(f"the text is not that of the run, but {corpus.val.source}")
    return np.asarray(corpus.val.ids[: model.context + 1], np.int32)[None], notes


def _layers(
    settings: TrainSettings, run_dir: RunDir, ids: Int32[np.ndarray, "1 ids"], last_step: int | None
) -> tuple[int, list[Layer]]:
    """Returns the step of the checkpoint and its layers on one sequence."""
    saved = restore(settings, run_dir, last_step)
    if saved is None:
        with Checkpoints(run_dir.checkpoints) as checkpoints:
            steps = checkpoints.steps()
        if steps:
            raise DiagnoseError(
                f"{run_dir.path}: holds no checkpoint up to step {last_step}; its first is of step "
                f"{steps[0]}"
            )
        raise DiagnoseError(f"{run_dir.path}: holds no complete checkpoint; train on, or wait")
    loss = make_loss(settings.model, saved.attention, saved.devices.attend_whole)
    layers_of = saved.devices.jit(make_layers(settings.model, loss, settings.attention.function))
    key = step_key(root_key(settings), jnp.int32(saved.step))
    arrays = layers_of(saved.params, ids[:, :-1], ids[:, 1:], key)
    layers = [
        layer._replace(own=as_computed(saved.attention, i, of, settings.model.soft_cap))
        for i, (layer, of) in enumerate(
            zip(as_layers(str(run_dir.path), settings.model, arrays), arrays, strict=True)
        )
    ]
    return saved.step, layers


def as_layers(source: str, model: Model, arrays: Sequence[LayerArrays]) -> list[Layer]:
    """Returns the layers of a model, named by their numbers, with arrays on the host."""
    scale, _ = score_scale(model)
    return [
        Layer(
            source,
            f"layer_{i:02d}",
            copy.q,
            copy.k,
            copy.v,
            do=copy.do,
            x=copy.x,
            projection=copy.projection,
            is_causal=True,
            scale=scale,
            soft_cap=model.soft_cap,
            sinks=copy.sinks,
            returned=copy.returned,
        )
        for i, copy in enumerate(jax.device_get(arrays))
    ]
