"""Reads the layers of a run directory: its newest checkpoint on a sequence of its own text."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from lowprec_attn import attention
from lowprec_attn.data.batches import validation_batches
from lowprec_attn.data.tokens import Tokens
from lowprec_attn.diagnose.array_file import DiagnoseError
from lowprec_attn.diagnose.layer import Layer
from lowprec_attn.files import read_json
from lowprec_attn.gpt2.model import score_scale
from lowprec_attn.runs.checkpoint import Checkpoints
from lowprec_attn.runs.run_dir import RunDir
from lowprec_attn.training.config import train_settings
from lowprec_attn.training.devices import run_devices
from lowprec_attn.training.program import make_program
from lowprec_attn.training.run import open_corpus
from lowprec_attn.training.settings import TrainSettings
from lowprec_attn.training.signals import as_computed, make_layers
from lowprec_attn.training.step import make_steps, root_key, step_key


def load(path: Path) -> list[Layer]:
    """Every layer of a run, with X and the arithmetic that it was trained in.

    The parameters are those of the newest intact checkpoint. In a run that has exploded to a loss
    that is not finite, that is the last good state. The model runs forward and backward once, on
    one device, on the first sequence of the run's held-out text.

    Raises:
      UserError: it is no run directory, holds no checkpoint, its text is not there, or an
        implementation that it names does not run here.
    """
    run_dir = RunDir(path)
    if any(path.glob("*.safetensors")) and not run_dir.checkpoints.is_dir():
        raise DiagnoseError(
            f"{path}: weights alone hold no q, k and v; docs/diagnose.md has a recipe that saves "
            "them from one step of a Hugging Face model"
        )
    if not run_dir.config.is_file() or not run_dir.checkpoints.is_dir():
        raise DiagnoseError(
            f"{path}: neither a file nor a run directory: it has no config.json and checkpoints"
        )
    config = read_json(run_dir.config)
    if not isinstance(config, dict):
        raise DiagnoseError(f"{run_dir.config} holds {type(config).__name__}, not a config")
    text = config.pop("text_sha256", None)
    settings = dataclasses.replace(train_settings(config), devices=1, shard_optimizer=False)
    corpus = open_corpus(settings.data)
    corpus.require(context=settings.model.context, vocab_size=settings.model.vocab_size)
    try:
        step, layers = _layers(settings, run_dir, corpus.val)
    except attention.UnsupportedError as error:
        raise DiagnoseError(
            f"{path}: {error}; its config names the implementation "
            f"{settings.attention.implementation}: diagnose it where that runs"
        ) from error
    notes = [f"parameters of step {step}, the first sequence of the held-out text"]
    if text is not None and text["val"] != corpus.val.sha256:
        notes.append(f"the text is not that of the run, but {corpus.val.source}")
    return [layer._replace(source=str(path), notes=tuple(notes)) for layer in layers]


def _layers(settings: TrainSettings, run_dir: RunDir, text: Tokens) -> tuple[int, list[Layer]]:
    """The step of the checkpoint, and its layers on the first sequence of a text."""
    devices = run_devices(settings)
    program = make_program(settings, devices)
    with Checkpoints(run_dir.checkpoints) as checkpoints:
        restored = checkpoints.restore(program.state)
    if restored is None:
        raise DiagnoseError(f"{run_dir.path}: holds no complete checkpoint; train on, or wait")
    (batch,) = validation_batches(text, settings.model.context, 1, 1)
    inputs, targets = (array[0] for array in devices.put_whole(batch))
    key = step_key(root_key(settings), jnp.int32(restored.step))
    layers_of = devices.jit(make_layers(settings, make_steps(settings, devices.attend_whole)))
    scale, _ = score_scale(settings.model)
    arrays = layers_of(restored.state.params, inputs, targets, key)
    copies = jax.device_get(arrays)
    layers = [
        Layer(
            str(run_dir.path),
            f"layer_{i:02d}",
            copy.q,
            copy.k,
            copy.v,
            do=copy.do,
            x=copy.x,
            is_causal=True,
            scale=scale,
            own=as_computed(settings.attention, i, of),
        )
        for i, (of, copy) in enumerate(zip(arrays, copies, strict=True))
    ]
    return restored.step, layers
