"""Experiments: arms, the processes that run them, their records, tables and figures.

Imports `runs`, `files` and `errors`; an arm trains in a process of its own.
"""
