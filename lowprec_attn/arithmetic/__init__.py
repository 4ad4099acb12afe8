"""The arithmetic of attention, written once and used by every implementation and kernel.

`recurrence`, `softmax` and `backward` hold the equations, `points` and `products` the roundings and
matrix products, `places`, `visibility`, `layout` and `grid` the tiling, and `request` and
`transforms` the call. The package imports only `numerics` and `errors`.
"""
