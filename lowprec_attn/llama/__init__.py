"""A Llama-style decoder as a Flax model: layers, settings, and weights from Hugging Face.

Imports `gpt2`, with which it shares projections, embedding, residual stream and loss.
"""
