"""Pallas kernels: attention on GPUs and TPUs, and on GPUs three operations of the trainer.

Here is what both devices share; `gpu` and `tpu` add memory, instructions and schedules.
"""
