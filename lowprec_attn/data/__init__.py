"""Text to batches: documents, tokenizers, token files, the built-in text, the order of a run.

Imports `hosts`, `files` and `errors`; nothing of JAX's models.
"""
