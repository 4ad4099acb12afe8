"""GPT-2 as a Flax model: blocks, norm, embedding, loss, and their settings.

Imports `arithmetic` and, through one module, the GPU kernels.
"""
