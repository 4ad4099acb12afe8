"""The benchmark: every available implementation of attention, timed in turn on named shapes.

`python -m benchmarks.attention --help`; method and records: `docs/benchmarks.md`.
"""
