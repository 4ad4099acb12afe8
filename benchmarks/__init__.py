"""Benchmarks of attention and its peers, tiles, the TPU compiler's schedules, and training.

They are not in the wheel. Run them from a checkout, for example `python -m benchmarks.attention`.
"""
