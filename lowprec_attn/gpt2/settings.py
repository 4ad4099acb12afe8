"""The settings of the model, as frozen records."""

import dataclasses
from typing import Literal

from lowprec_attn.arithmetic.heads import HeadGroup

# What a model can be at most: every layer and head is named before anything is computed, and arrays
# count in int32.
LARGEST = {"layers": 4096, "heads": 4096, "kv_heads": 4096} | dict.fromkeys(
    ("width", "head_size", "value_size", "hidden", "context", "vocab_size"), 2**24
)
MOST_HEADS = 2**17  # of all layers

InitStd = Literal["gpt2", "small_init", "lecun_uniform"]
Remat = Literal[
    "nothing_saveable", "attention_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape and initialisation of the GPT-2 model.

    Attributes:
      architecture: which of the trainer's models it is.
      layers, heads, width: depth L, heads N per layer, model width d (a multiple of heads).
      context: tokens per sequence T.
      vocab_size: rows of the (tied) embedding table; 50304 is GPT-2's 50257 padded.
      init: standard deviation of the weights: `gpt2` 0.02, `small_init` sqrt(2 / (5 d)),
        `lecun_uniform` sqrt(1 / (3 d)). Projections into the residual stream are divided by
        sqrt(2 L) in every case.
      scale_placement: where 1/sqrt(H) enters: `scores` multiplies the float32 product q kᵀ;
        `qk` multiplies q and k by H^(-1/4) each, before the product and in their own format.
      activation_dtype: format of the activations between layers (the residual stream and all
        parameters stay float32).
      logits_dtype: format of the logits: float32; or bfloat16, as PyTorch's autocast has them,
        which spares memory traffic (with bfloat16 activations and an even vocab_size).
      qk_norm: q and k of every head are divided by their RMS and multiplied by a learned scale,
        so that no score exceeds √H · max|g_q| · max|g_k|; see `model.HeadNorm`.
      z_loss: c ≥ 0; gradients are those of the loss + c · log²Z, Z the normaliser of the output
        softmax (0: off); see `loss.cross_entropy`.
      biases: whether linear layers and norms have biases, which start at zero, as those of Radford
        et al. (2019) do; None for no.
      embedding_mean: c ≥ 0: all position embeddings start with one common vector of entries ±c,
        beside which those of 0.02 are small: the mean that hidden states of trained models have.
      remat: by which policy the backward pass computes the values of a block again; None keeps
        them. `nothing_saveable` keeps a block's inputs alone, `attention_saveable` also O and lse,
        so that attention's forward pass runs once; `dots_saveable`, and
        `dots_with_no_batch_dims_saveable`, the matrix products outside kernels of attention
        (`jax.checkpoint_policies`).
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    init: InitStd
    scale_placement: Literal["scores", "qk"]
    activation_dtype: Literal["bfloat16", "float32", "float16"]
    logits_dtype: Literal["float32", "bfloat16"]
    qk_norm: bool
    z_loss: float
    biases: bool | None = None  # configs of earlier versions do not have it
    embedding_mean: float = 0.0  # nor this
    architecture: Literal["gpt2"] = "gpt2"  # nor this
    remat: Remat | None = None  # nor this

    @property
    def kv_heads(self) -> int:
        """K, that of all heads."""
        return self.heads

    @property
    def head_size(self) -> int:
        """H of queries and keys."""
        return self.width // self.heads

    @property
    def value_size(self) -> int:
        """V, that of queries and keys."""
        return self.head_size

    @property
    def soft_cap(self) -> None:
        """Scores have none."""
        return None

    @property
    def sinks(self) -> bool:
        """Heads have none."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The arithmetic of every layer, and who computes it.

    Attributes:
      layers: for each layer its heads, grouped by their arithmetic.
      implementation: of `attention.IMPLEMENTATIONS`, None for the fastest that serves.
    """

    layers: tuple[tuple[HeadGroup, ...], ...]
    implementation: str | None = None
