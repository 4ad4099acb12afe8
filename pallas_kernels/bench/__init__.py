"""The benchmark: every available implementation of attention, timed in turn on named shapes.

`python -m pallas_kernels.bench --help`; method and records: `docs/benchmarks.md`.
"""
