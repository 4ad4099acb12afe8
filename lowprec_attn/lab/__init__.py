"""Experiments: arms, the processes that run them, their records, tables and figures.

This package imports `runs`, `files` and `errors`. Each arm trains in its own process.
"""
