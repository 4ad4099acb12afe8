"""Experiments: arms, the processes that run them, their records, tables and figures.

This package imports `runs`, `files` and `errors`. Each arm trains in its own process.
"""

RECORDS = "records.jsonl.xz"
"""The name of the file that holds the records of an experiment; see `archive`."""
