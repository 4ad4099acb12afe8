"""Converts `config.json` and tensors of a Hugging Face GPT-2 to settings and weights of `GPT2`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lowprec_attn.arithmetic.heads import group_heads
from lowprec_attn.errors import UserError
from lowprec_attn.gpt2.model import GPT2, Decoder
from lowprec_attn.gpt2.settings import LARGEST, MOST_HEADS, AttentionSettings, ModelSettings
from lowprec_attn.numerics import FLASH, StandardMax

# The values that this model computes. The first value of a field is its default in the GPT2Config
# of transformers.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}
_SHAPE = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "context": "n_positions",
    "vocab_size": "vocab_size",
}
_PREFIX = "transformer."
_HEAD = "lm_head.weight"
_LINEAR = {"attention/out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
_NORMS = {"norm_1": "ln_1", "norm_2": "ln_2"}


class WeightsError(UserError, ValueError):
    """Weights or a config that do not fit a model of this library."""


def model_settings(config: Mapping[str, Any], activation_dtype: Any) -> ModelSettings:
    """Returns the settings of the model in a `config.json`, with biases and float32 logits.

    Args:
      config: the fields of a `GPT2Config`.
      activation_dtype: see `ModelSettings`.

    Raises:
      WeightsError: the config describes another model, or a variant of GPT-2 that is not computed
        here.
    """
    require_values(config, _REQUIRED)
    shape = shape_of(config, _SHAPE)
    if shape["width"] % shape["heads"]:
        raise WeightsError(
            f"config.json says n_embd {shape['width']}, not a multiple of n_head {shape['heads']}"
        )
    if config.get("n_inner") not in (None, 4 * shape["width"]):
        raise WeightsError(
            f"config.json says n_inner {config['n_inner']}, and this library computes only 4 n_embd"
        )
    return ModelSettings(
        **shape,
        init="gpt2",
        scale_placement="scores",
        activation_dtype=activation_dtype,
        logits_dtype="float32",
        qk_norm=False,
        z_loss=0.0,
        biases=True,
    )


def require_values(config: Mapping[str, Any], served: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a variant of a model that is not computed here.

    A field that `config.json` leaves out has the first value in `served`.

    Raises:
      WeightsError: a field has a value that is not served.
    """
    for name, values in served.items():
        if config.get(name, values[0]) not in values:
            raise WeightsError(
                f"config.json says {name} {config[name]!r}, and only "
                f"{' or '.join(map(repr, values))} is computed here; the recipe of "
                "docs/diagnose.md saves q, k, v and do of any model"
            )


def shape_of(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the checked sizes of a model.

    Args:
      config: config of the model.
      names: the name of a size in transformers, by our name.

    Raises:
      WeightsError: a size is missing or out of range.
    """
    shape: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in names.items()}
    for ours, value in shape.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not 1 <= value <= LARGEST[ours]:
            raise WeightsError(
                f"config.json says {names[ours]} {value!r}, not a number from 1 to {LARGEST[ours]}"
            )
    if shape["layers"] * shape["heads"] > MOST_HEADS:
        raise WeightsError(
            f"config.json says {names['layers']} {shape['layers']} and {names['heads']} "
            f"{shape['heads']}, more than {MOST_HEADS} heads in all"
        )
    return shape


def parameters(tensors: Mapping[str, np.ndarray], settings: ModelSettings) -> Any:
    """Returns the float32 parameters of `GPT2(settings, …)` with the values of these tensors.

    Args:
      tensors: tensors by their names in transformers, with or without the prefix `transformer.`.
        Matrices are [in, out], as in Conv1D of transformers. Buffers of masks are ignored.
      settings: the result of `model_settings`.

    Raises:
      WeightsError: a tensor is missing, has another shape or dtype, or the output layer is not
        tied.
    """
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    if _HEAD in named and not same_values(named[_HEAD], named.get("wte.weight", np.zeros(0))):
        raise WeightsError(f"{_HEAD} is not wte.weight; only tied output layers are computed here")
    ours = {}
    for path, source, part in _sources(settings.layers):
        tensor = tensor_of(named, source, _PREFIX)
        if part is not None and tensor.shape[-1] == 3 * settings.width:
            tensor = np.split(tensor, 3, axis=-1)[part]
        ours[path] = (source, tensor)
    return placed(lambda: GPT2(settings, all_heads(settings), nnx.Rngs(0)), ours)


def tensor_of(named: Mapping[str, np.ndarray], source: str, prefix: str) -> np.ndarray:
    """Returns a tensor by its name in transformers; `named` has the names without the prefix.

    Raises:
      WeightsError: there is no such tensor.
    """
    tensor = named.get(source.removeprefix(prefix))
    if tensor is None:
        raise WeightsError(
            f"there is no tensor {source}, with or without the prefix {prefix}; is it the model of "
            "this config.json?"
        )
    return tensor


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two tables are the same; NaN, which a broken run leaves there, equals NaN."""
    return np.array_equal(a, b, equal_nan=True)


def placed(decoder: Callable[[], Decoder], ours: Mapping[str, tuple[str, np.ndarray]]) -> Any:
    """Returns the float32 parameters of a decoder from a complete set of tensors.

    Args:
      decoder: makes the decoder. Only its shapes are evaluated, which takes minutes for many
        layers.
      ours: the name of a tensor in transformers and the tensor, by the path of the parameter.

    Raises:
      WeightsError: a tensor has another shape or dtype.
    """
    target = nnx.eval_shape(lambda: nnx.state(decoder(), nnx.Param))

    def value(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        source, tensor = ours[name]
        if tensor.shape != like.shape or not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise WeightsError(
                f"{source} gives {name} as {tensor.dtype}{list(tensor.shape)}, and config.json "
                f"asks for floats {list(like.shape)}"
            )
        return jnp.asarray(tensor.astype(np.float32))

    return jax.tree.map_with_path(value, target)


def all_heads(settings: Any) -> AttentionSettings:
    """Returns `flash` for every head: the arithmetic of the fused kernels that run such models."""
    heads = group_heads([(FLASH, StandardMax())] * settings.heads)
    return AttentionSettings(layers=(heads,) * settings.layers)


def _sources(layers: int) -> list[tuple[str, str, int | None]]:
    """Returns for every parameter its path, its tensor in transformers, and which third of it."""
    found: list[tuple[str, str, int | None]] = [
        ("tokens/embedding", "wte.weight", None),
        ("positions/embedding", "wpe.weight", None),
        ("norm/scale", "ln_f.weight", None),
        ("norm/bias", "ln_f.bias", None),
    ]
    for i in range(layers):
        ours, theirs = f"blocks/{i}", f"h.{i}"
        for kernel, weight in (("kernel", "weight"), ("bias", "bias")):
            for part, name in enumerate(("query", "key", "value")):
                path = f"{ours}/attention/{name}/{kernel}"
                found.append((path, f"{theirs}.attn.c_attn.{weight}", part))
            for path, name in _LINEAR.items():
                found.append((f"{ours}/{path}/{kernel}", f"{theirs}.{name}.{weight}", None))
        for kernel, weight in (("scale", "weight"), ("bias", "bias")):
            for path, name in _NORMS.items():
                found.append((f"{ours}/{path}/{kernel}", f"{theirs}.{name}.{weight}", None))
    return found
