"""The files of a run: its directory, checkpoints, metrics, environment, report, copies.

This package imports `hosts`, `files`, `errors` and the rules of `diagnostics`, and no model code.
"""
