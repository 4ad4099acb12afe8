"""The files of a run: its directory, checkpoints, metrics, environment, report, copies.

Imports `hosts`, `files` and `errors`; knows nothing of models or attention.
"""
