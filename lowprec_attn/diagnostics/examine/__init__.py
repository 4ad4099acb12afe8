"""The door of `diagnostics`: opens a user's files, runs and models, examines them, words it.

It may import `training`; nothing else of `diagnostics` imports it.
"""
