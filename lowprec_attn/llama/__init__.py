"""A Llama-style decoder as a Flax model: its layers, its settings, and weights of Hugging Face.

Imports `gpt2`, with which it shares projections, embedding, residual stream and loss.
"""
