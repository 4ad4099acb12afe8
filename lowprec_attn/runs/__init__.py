"""The files of a run: its directory, checkpoints, metrics, environment, report, copies.

Imports `hosts`, `files` and `errors`, and the rules of `diagnostics`; knows nothing of models.
"""
