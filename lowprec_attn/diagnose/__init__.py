"""Reads a user's own files and runs for `diagnostics`, measures them and words it."""
