"""The arithmetic of attention, written once: the request, the points, one softmax step, one
backward tile, the tiling.

Imports `numerics` and `errors`. Every implementation, kernels included, computes with it.
"""
