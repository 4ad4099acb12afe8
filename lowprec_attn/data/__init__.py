"""Makes batches from text: documents, tokenizers, token files, built-in texts, the order of a run.

Imports small helpers (`hosts`, `files`, `errors` and others), and none of the models.
"""
