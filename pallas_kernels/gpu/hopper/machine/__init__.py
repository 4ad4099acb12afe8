"""The Hopper machine as the kernels use it, with nothing of attention in it."""
