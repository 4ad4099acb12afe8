"""GPT-2 as a Flax model: blocks, norm, embedding, loss, and the settings of their shape.

Imports `arithmetic` and, through one module, the kernels that serve it on a GPU.
"""
