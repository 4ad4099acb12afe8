"""Kernels for NVIDIA's Hopper GPUs (sm_90a) in Pallas Mosaic GPU: for speed.

`attention` is the entry of attention. It serves the arithmetic that people train with, see
`unsupported` there; `pallas_kernels.gpu` serves everything else. Who lives here:

  vjp            the passes, under one `custom_vjp`; all below but block_sizes import Mosaic GPU
  forward        the forward kernel; long_steps: `published`, whose products are rounded
  backward       the kernels of dQ, and of dK and dV
  producer       the warpgroup that loads
  tile_scheduler which program does which tiles, and in which order
  problem        one call: sizes, tiles, what may be multiplied with what
  machine        pipelines, ping-pong, matrix products, layouts
  block_sizes    tile sizes: speed only
  gelu_products, cross_entropy   the trainer's, which `pallas_kernels.gpu.trainer` chooses

A program stays on its multiprocessor and works through many tiles. A producer warpgroup loads
(TMA), consumer warpgroups multiply (WGMMA) and do the softmax.
"""
