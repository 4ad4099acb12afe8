"""Gets the layers of a Hugging Face GPT-2, Llama or Qwen3 by running its weights on a text."""

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec_attn import attention
from lowprec_attn.diagnostics.examine import sequence
from lowprec_attn.diagnostics.examine.array_file import DiagnoseError, read_tensors
from lowprec_attn.diagnostics.examine.run_layers import as_layers
from lowprec_attn.diagnostics.layer import Layer
from lowprec_attn.files import NotJsonError, read_json, stays_inside
from lowprec_attn.gpt2 import hugging_face as gpt2
from lowprec_attn.gpt2.model import Attend
from lowprec_attn.llama import hugging_face as llama
from lowprec_attn.training.devices import compiler_options
from lowprec_attn.training.signals import make_layers
from lowprec_attn.training.step import make_loss

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Autocast trains these models in bfloat16, whatever format their weights are stored in.
_ACTIVATIONS = "bfloat16"
_READERS = {"gpt2": gpt2, **dict.fromkeys(llama.MODEL_TYPES, llama)}


def is_one(path: Path) -> bool:
    """Whether a folder holds the weights of a Hugging Face model and is no run directory."""
    patterns = ("*.safetensors", _INDEX, "pytorch_model*.bin*")
    return any(file.is_file() for pattern in patterns for file in path.glob(pattern))


def load(path: Path, text: Path | None) -> list[Layer]:
    """Returns every layer of the model, with X and dO.

    The model runs forward and backward once on one sequence, without dropout, in bfloat16 with
    float32 weights and the arithmetic `flash`.

    Args:
      path: folder with `config.json` and `model.safetensors`, or with the parts of the latter and
        their index.
      text: a file of text, for which the folder needs `tokenizer.json`, or of token ids; see
        `sequence.load`.

    Raises:
      UserError: a file is missing or unusable, or the model is of another type.
    """
    if text is None:
        raise DiagnoseError(
            f"{path}: weights hold no q, k and v; add --text FILE, on which the model runs"
        )
    config = _json(path / _CONFIG)
    reader = _reader(config)
    settings = reader.model_settings(config, _ACTIVATIONS)
    params = reader.parameters(_tensors(path), settings)
    ids = sequence.load(
        text, settings.context, settings.vocab_size, lambda: sequence.of_folder(path)
    )
    attend = Attend(attention.dot_product_attention)
    loss = make_loss(settings, gpt2.all_heads(settings), attend)
    layers_of = jax.jit(
        make_layers(settings, loss), compiler_options=compiler_options(jax.default_backend())
    )
    arrays = layers_of(params, jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:]), jax.random.key(0))
    note = f"one step in {_ACTIVATIONS} and flash, on the first {ids.shape[1]} tokens of {text}"
    layers = as_layers(str(path), settings, arrays)
    return [layer._replace(notes=(note,)) for layer in layers]


def _reader(config: dict[str, Any]) -> ModuleType:
    """Returns the module that reads models of this type."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise DiagnoseError(
            f"config.json says model_type {kind!r}, and only {', '.join(_READERS)} are read; the "
            "recipe of docs/diagnose.md saves q, k, v and do of any model"
        )
    return _READERS[kind]


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the one weights file, or of all parts that an index names."""
    if (path / _INDEX).is_file():
        names = _parts(path / _INDEX)
    elif (path / _WEIGHTS).is_file():
        names = [_WEIGHTS]
    else:
        raise DiagnoseError(
            f"{path} has no {_WEIGHTS}; pickled weights are not read: save them again with "
            "model.save_pretrained(FOLDER, safe_serialization=True)"
        )
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        tensors |= read_tensors(path / name)
    return tensors


def _parts(index: Path) -> list[str]:
    """Returns the files that an index names, which must lie in its own folder."""
    parts = _json(index).get("weight_map")
    if not isinstance(parts, dict):
        raise DiagnoseError(f"{index}: weight_map must name the file of each array; copy it again")
    for name in parts.values():
        if not stays_inside(name):
            raise DiagnoseError(
                f"{index}: weight_map must name files of its folder, got {name!r}; copy it again"
            )
    return sorted(set(parts.values()))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DiagnoseError(f"{path} is missing; it stands beside the weights of a model")
    try:
        value = read_json(path)
    except NotJsonError as error:
        raise DiagnoseError(f"{error}; copy it again") from error
    if not isinstance(value, dict):
        raise DiagnoseError(f"{path} holds {type(value).__name__}, not a mapping; copy it again")
    return value
