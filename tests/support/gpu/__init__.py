"""The compiled GPU kernels on a device, or for one: problems, checks, targets."""
