"""The settings of the model, as frozen records."""

import dataclasses
from typing import Literal

from lowprec_attn.arithmetic.heads import HeadGroup

# The largest sizes of a model. Every layer and head is listed before anything is computed, and
# arrays are indexed in int32.
LARGEST = {"layers": 4096, "heads": 4096, "kv_heads": 4096} | dict.fromkeys(
    ("width", "head_size", "value_size", "hidden", "context", "vocab_size"), 2**24
)
MOST_HEADS = 2**17  # heads of all layers together

InitStd = Literal["gpt2", "small_init", "lecun_uniform"]
Remat = Literal[
    "nothing_saveable", "attention_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape and initialisation of the GPT-2 model.

    Attributes:
      architecture: name of the model among the trainer's models.
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
      logits_dtype: format of the logits: float32, or bfloat16 as in PyTorch's autocast. The latter
        saves memory traffic, and needs bfloat16 activations and an even vocab_size.
      qk_norm: q and k of every head are divided by their RMS and multiplied by a learned scale,
        so that no score exceeds √H · max|g_q| · max|g_k|; see `model.HeadNorm`.
      z_loss: c ≥ 0; gradients are taken of the loss + c · log²Z, where Z is the normaliser of the
        output softmax. 0 switches it off; see `loss.cross_entropy`.
      biases: whether linear layers and norms have biases, as in Radford et al. (2019). They start
        at zero. None for no biases.
      embedding_mean: c ≥ 0; one vector of entries ±c is added to all initial position embeddings.
        It stands for the common mean that hidden states of trained models have. Next to it,
        entries of deviation 0.02 are small.
      remat: policy by which the backward pass recomputes the values of a block; None keeps them
        all. `nothing_saveable` keeps only the inputs of a block. `attention_saveable` also keeps O
        and lse, so that the forward pass of attention runs once. `dots_saveable` and
        `dots_with_no_batch_dims_saveable` keep matrix products outside the attention kernels
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
    # Configs of earlier versions lack the fields with defaults.
    biases: bool | None = None
    embedding_mean: float = 0.0
    architecture: Literal["gpt2"] = "gpt2"
    remat: Remat | None = None

    @property
    def kv_heads(self) -> int:
        """Key heads K: every query head has its own key head."""
        return self.heads

    @property
    def head_size(self) -> int:
        """H of queries and keys."""
        return self.width // self.heads

    @property
    def value_size(self) -> int:
        """V of values, which equals H."""
        return self.head_size

    @property
    def soft_cap(self) -> None:
        """None: scores have no soft cap."""
        return None

    @property
    def sinks(self) -> bool:
        """False: heads have no sinks."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The arithmetic of every layer, and the implementation that computes it.

    Attributes:
      layers: for each layer its heads, grouped by their arithmetic.
      implementation: one of `attention.IMPLEMENTATIONS`, None for the fastest that serves.
      function: the name of another library's attention that computes all layers in its place; see
        `gpt2.functions`.
    """

    layers: tuple[tuple[HeadGroup, ...], ...]
    implementation: str | None = None
    function: str | None = None
