"""The front end of `diagnostics`: opens files, runs and models, examines them and words the result.

It may import `training`; no other part of `diagnostics` imports it.
"""
