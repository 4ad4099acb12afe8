"""The benchmark: times every available implementation of attention in turn on named shapes.

See `python -m benchmarks.attention --help`. `docs/benchmarks.md` describes method and records.
"""
