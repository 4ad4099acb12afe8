"""Tuning: times the tiles of GPU kernels, each kernel alone.

`sweep.py` takes the times. `gpu.py` and `hopper.py` have the tiles and the inputs of their kernels.
The command is `python -m benchmarks.tune`.
"""
