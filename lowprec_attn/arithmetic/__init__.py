"""The arithmetic of attention, written once: every implementation, kernels included, uses it.

`recurrence`, `softmax` and `backward` have the equations, `points` and `products` what rounds and
multiplies, `places`, `visibility`, `layout` and `grid` the tiling, `request` and `transforms` the
call. Imports `numerics` and `errors`.
"""
