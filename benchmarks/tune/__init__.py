"""Tuning: the tiles of GPU kernels, each kernel timed alone.

`sweep.py` times; `gpu.py` has the tiles and the inputs of the general kernels. The
command is `python -m benchmarks.tune`.
"""
