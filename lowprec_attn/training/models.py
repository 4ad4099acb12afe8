"""The models that can be trained; `config.model.architecture` names one, see `settings.MODELS`.

A model is a record of settings, a `gpt2.model.Decoder` made of (settings, attention, rngs), and a
module with these functions of the settings:

    parameter_count(settings) -> int              all weights
    product_weights(settings) -> int              weights that enter a matrix product
    kept_values(settings) -> int                  values per token and layer for the backward pass
    score_scale(settings) -> (float, float)       factors of q·k in a score, and of X W_Q in q
    query_of(settings, weights, T) -> function    maps X W_Q to q; None if q is a multiple of X W_Q

Parameters with the same role have the same names in all models: `tokens`, `norm`, and in each of
`blocks` an `attention` with `query`, `key`, `value` and `out`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flax import nnx

from lowprec_attn.gpt2 import model as gpt2
from lowprec_attn.gpt2.model import Decoder
from lowprec_attn.gpt2.settings import AttentionSettings, ModelSettings
from lowprec_attn.llama import model as llama
from lowprec_attn.llama.settings import LlamaSettings
from lowprec_attn.training.settings import Model

_MODULES: dict[type[Model], ModuleType] = {ModelSettings: gpt2, LlamaSettings: llama}
_Make = Callable[[Any, AttentionSettings, nnx.Rngs], Decoder]
_DECODERS: dict[type[Model], _Make] = {ModelSettings: gpt2.GPT2, LlamaSettings: llama.Llama}


def of(settings: Model) -> ModuleType:
    """The module of a model."""
    return _MODULES[type(settings)]


def decoder(settings: Model, attention: AttentionSettings, rngs: nnx.Rngs) -> Decoder:
    """A model with initial weights."""
    return _DECODERS[type(settings)](settings, attention, rngs)


def parameter_count(settings: Model) -> int:
    """Number of weights of a model."""
    return of(settings).parameter_count(settings)


def score_scale(settings: Model) -> tuple[float, float]:
    """Returns the factor of q·k in a score, and the factor of X W_Q in q if `query_of` is None."""
    return of(settings).score_scale(settings)
