"""What a run leaves behind: its directory, checkpoints, metrics, environment, report, copies.

Imports `hosts`, `files` and `errors`; knows nothing of models or attention.
"""
