"""Pallas attention kernels, their problem shapes and the benchmark."""
