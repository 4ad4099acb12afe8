"""For PyTorch: attention by this library's kernels, and tools that examine any attention.

    from lowprec_attn.torch import attention, capture
    torch.nn.functional.scaled_dot_product_attention = attention  # for a whole model

By default, rows of dS sum to zero in `attention`; `bridge` explains how it works. `capture` takes
q, k, v and dO of every attention call in a training step of any model. `watch` measures some steps
of a run, and warns.
"""

from lowprec_attn.torch.bridge import TorchAttentionError, attention, attention_fn
from lowprec_attn.torch.capture import capture
from lowprec_attn.torch.watch import TorchWatch, watch

__all__ = ["TorchAttentionError", "TorchWatch", "attention", "attention_fn", "capture", "watch"]
