"""Benchmarks: attention beside its peers, tiles, the TPU compiler's schedules, training.

Not in the wheel; run from a checkout, `python -m benchmarks.attention`.
"""
