"""What the TPU compiler makes of the kernels, on a host without a TPU."""
