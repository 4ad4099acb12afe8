"""The TPU compiler's schedules of the kernels, on a host without a TPU."""
