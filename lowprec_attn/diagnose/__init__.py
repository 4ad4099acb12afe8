"""Reads a user's own files for `diagnostics`, which takes arrays, and measures cures."""
