"""Pallas kernels: attention for GPUs and TPUs, and three operations of the trainer for GPUs.

This package holds what both devices share. `gpu` and `tpu` add memory, instructions and schedules.
"""
