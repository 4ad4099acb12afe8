"""GPT-2 as a Flax model: blocks, norm, embedding, loss, and their settings.

`llama` shares the decoder around the blocks, projections, embedding and loss.
Imports `arithmetic` and, through one module, the GPU kernels.
"""
