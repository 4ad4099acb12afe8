"""The settings of the model, as a frozen record."""

import dataclasses
from typing import Literal

from lowprec_attn.gpt2.settings import InitStd, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSettings:
    """Shape and initialisation of the Llama-style model.

    Attributes:
      architecture: name of the model among the trainer's models.
      layers, heads, width: depth L, query heads N per layer, model width d.
      kv_heads: key and value heads K, a divisor of N (grouped-query attention).
      head_size: H of queries and keys, even.
      value_size: V of values.
      hidden: width of the MLP.
      context: tokens per sequence T.
      vocab_size: rows of the embedding table, and of the output layer.
      tied: whether the output layer is the embedding table.
      rope_theta: base of the rotation's frequencies θ^(−2i/H).
      norm_eps: ε of every RMSNorm.
      embedding_mean: c ≥ 0; one vector of entries ±c is added to all initial token embeddings. None
        is 0.
      init, activation_dtype, logits_dtype, z_loss, remat: see `gpt2.settings.ModelSettings`.
      qk_norm: q and k of every head pass an RMSNorm before they are rotated, as in Qwen3.
      soft_cap: c of scores c · tanh(score / c), as in Gemma 2; None for no cap.
      sinks: whether every head has a learned score without a key, as in gpt-oss; it starts at 0.
    """

    architecture: Literal["llama"] = "llama"
    layers: int
    heads: int
    kv_heads: int
    width: int
    head_size: int
    value_size: int
    hidden: int
    context: int
    vocab_size: int
    tied: bool
    rope_theta: float
    norm_eps: float
    init: InitStd
    activation_dtype: Literal["bfloat16", "float32", "float16"]
    logits_dtype: Literal["float32", "bfloat16"]
    z_loss: float
    qk_norm: bool
    soft_cap: float | None
    sinks: bool
    remat: Remat | None = None  # configs of earlier versions lack it, and the next
    embedding_mean: float | None = None

    @property
    def biases(self) -> bool:
        """Whether the linear layers have biases."""
        return False
