"""Converts weights of a Hugging Face Llama or Qwen3 to weights of this model, and back.

Qwen3 is Llama with QK-norm.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lowprec_attn import installation
from lowprec_attn.files import write_atomically, write_json, writing
from lowprec_attn.gpt2.hugging_face import (
    WeightsError,
    all_heads,
    placed,
    require_values,
    same_values,
    shape_of,
    tensor_of,
)
from lowprec_attn.llama.model import Llama
from lowprec_attn.llama.settings import LlamaSettings

MODEL_TYPES = {"llama": False, "qwen3": True}
"""Whether a model has QK-norm, by `model_type`."""
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# The values that this model computes. The first value of a field is its default in the configs of
# transformers.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "tie_word_embeddings": (False, True),
    "rope_scaling": (None,),
}
_SHAPE = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "width": "hidden_size",
    "head_size": "head_dim",
    "hidden": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_PREFIX = "model."
_HEAD = "lm_head.weight"
_LINEAR = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "mlp_gate": "mlp.gate_proj",
    "mlp_in": "mlp.up_proj",
    "mlp_out": "mlp.down_proj",
}
_NORMS = {"norm_1/scale": "input_layernorm", "norm_2/scale": "post_attention_layernorm"}
_QK_NORMS = {"attention/query_norm": "self_attn.q_norm", "attention/key_norm": "self_attn.k_norm"}


def model_settings(config: Mapping[str, Any], activation_dtype: Any) -> LlamaSettings:
    """Returns the settings of the model that a `config.json` describes, with float32 logits.

    Args:
      config: the fields of a `LlamaConfig` or a `Qwen3Config`.
      activation_dtype: see `LlamaSettings`.

    Raises:
      WeightsError: the config describes a variant that this model does not compute.
    """
    require_values(config, _REQUIRED)
    rope = config.get("rope_parameters") or {}  # transformers before 5 has no such section
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise WeightsError(
            f"config.json says rope_parameters {rope!r}, and only rope_type 'default' is computed "
            "here"
        )
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    filled = {name: value for name, value in config.items() if value is not None}
    filled.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(width, int) and heads:
        filled.setdefault("head_dim", width // heads)
    shape = shape_of(filled, _SHAPE)
    if shape["heads"] % shape["kv_heads"]:
        raise WeightsError(
            f"config.json says num_attention_heads {shape['heads']}, not a multiple of "
            f"num_key_value_heads {shape['kv_heads']}"
        )
    if shape["head_size"] % 2:
        raise WeightsError(
            f"config.json says head_dim {shape['head_size']}, and RoPE needs an even number"
        )
    return LlamaSettings(
        **shape,
        value_size=shape["head_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=_number("rope_theta", rope.get("rope_theta", config.get("rope_theta", 1e4))),
        norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        init="gpt2",
        activation_dtype=activation_dtype,
        logits_dtype="float32",
        z_loss=0.0,
        qk_norm=MODEL_TYPES[config["model_type"]],
        soft_cap=None,
        sinks=False,
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise WeightsError(f"config.json says {name} {value!r}, not a positive number")
    return float(value)


def parameters(tensors: Mapping[str, np.ndarray], settings: LlamaSettings) -> Any:
    """Returns the float32 parameters of `Llama(settings, …)` with the values of these tensors.

    Args:
      tensors: tensors by their names in transformers, with or without the prefix `model.`.
        Matrices are [out, in].
      settings: the result of `model_settings`.

    Raises:
      WeightsError: a tensor is missing, has another shape or dtype, or the output layer is not tied
        although `config.json` says so.
    """
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    table = named.get("embed_tokens.weight", np.zeros(0))
    if settings.tied and _HEAD in named and not same_values(named[_HEAD], table):
        raise WeightsError(
            f"{_HEAD} is not embed_tokens.weight, and config.json says they are tied"
        )
    ours = {}
    for path, source in _sources(settings).items():
        tensor = tensor_of(named, source, _PREFIX)
        ours[path] = (source, tensor.T if path.endswith("/kernel") else tensor)
    return placed(lambda: Llama(settings, all_heads(settings), nnx.Rngs(0)), ours)


def save(folder: Path, settings: LlamaSettings, params: Any) -> None:
    """Writes `config.json` and `model.safetensors` as transformers reads them, in float32.

    Args:
      folder: made if it does not exist. No tokenizer is written. A model or a run that is there
        already is left as it is.
      settings: settings of the model.
      params: parameters, as `parameters` returns them.

    Raises:
      WeightsError: the model is neither a Llama nor a Qwen3, the folder holds one of the files, or
        safetensors is not installed.
      DiskError: the disk refuses.
    """
    weights_file, config_file = folder / "model.safetensors", folder / "config.json"
    for path in (weights_file, config_file):
        if os.path.lexists(path):
            raise WeightsError(f"{path} is there already; give another folder")
    with installation.needing("diagnose", WeightsError, "safetensors is not installed"):
        from safetensors.numpy import save as serialized
    config = _config(settings)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): value
        for path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(params))
    }
    tensors = {
        source: np.ascontiguousarray(flat[path].T if path.endswith("/kernel") else flat[path])
        for path, source in _sources(settings).items()
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(weights_file):
        # Transformers requires the metadata field `format`. Its value for PyTorch is "pt".
        write_atomically(weights_file, serialized(tensors, {"format": "pt"}))
    with writing(config_file):
        write_json(config_file, config)


def _config(settings: LlamaSettings) -> dict[str, Any]:
    """Returns the `config.json` of a model; raises WeightsError if it cannot describe the model."""
    kinds = {qk_norm: kind for kind, qk_norm in MODEL_TYPES.items()}
    kind = kinds[settings.qk_norm]
    for name, value in {"value_size": settings.head_size, "soft_cap": None, "sinks": False}.items():
        if getattr(settings, name) != value:
            raise WeightsError(f"no {kind} has {name} {getattr(settings, name)!r}")
    return {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        **{theirs: getattr(settings, ours) for ours, theirs in _SHAPE.items()},
        "tie_word_embeddings": settings.tied,
        "rms_norm_eps": settings.norm_eps,
        "rope_theta": settings.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "attention_bias": False,
        "hidden_act": "silu",
        "dtype": "float32",
    }


def _sources(settings: LlamaSettings) -> dict[str, str]:
    """Returns the name of each parameter's tensor in transformers, by the parameter's path."""
    found = {"tokens/embedding": "model.embed_tokens.weight", "norm/scale": "model.norm.weight"}
    if not settings.tied:
        found["head"] = _HEAD
    of_block = {f"{ours}/kernel": theirs for ours, theirs in _LINEAR.items()} | _NORMS
    if settings.qk_norm:
        of_block |= _QK_NORMS
    for i in range(settings.layers):
        for ours, theirs in of_block.items():
            found[f"blocks/{i}/{ours}"] = f"model.layers.{i}.{theirs}.weight"
    return found
