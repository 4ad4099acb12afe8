"""The Hopper machine as the kernels use it: warpgroups, shared memory, barriers, layouts."""
