"""The training of a model: settings, optimizer, step, devices, loop, and what compiling it tells.

Imports what stands below it: `runs`, `data`, `llama`, `gpt2`, `diagnostics`, `attention`.
"""
