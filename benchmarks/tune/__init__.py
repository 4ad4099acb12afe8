"""Tuning: the tiles of GPU kernels, each kernel timed alone.

`sweep.py` times; `gpu.py` and `hopper.py` have the tiles and the inputs of their kernels. The
command is `python -m benchmarks.tune`.
"""
