"""Trains a model: settings, optimizer, step, devices, loop, and memory estimates by compilation.

Imports the layers below: `runs`, `data`, `llama`, `gpt2`, `diagnostics`, `attention`.
"""
