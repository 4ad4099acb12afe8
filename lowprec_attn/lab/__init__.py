"""Experiments: sets of training runs that differ in named settings and in nothing else."""
