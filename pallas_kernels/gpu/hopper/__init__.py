"""Kernels for NVIDIA's Hopper GPUs (sm_90a) in Pallas Mosaic GPU: for speed.

`attention` is the entry of attention. It serves the arithmetic that people train with, see
`unsupported` there; `pallas_kernels.gpu` serves everything else. Who lives here:

  vjp            the passes, under one `custom_vjp`; all below but block_sizes import Mosaic GPU
  forward, query_gradients, key_gradients   one kernel each
  split_query_gradients, split_key_gradients   the same where a warpgroup has no registers for two
                 sums; `handover` is how one warpgroup gives P to another
  query_sums   dQ as a sum without an order, by the last of them, if asked for
  long_steps     `published`: steps that are walked over in parts, for their products are rounded
  by_query       what forward and dQ share: loading, steps that are skipped
  query_rows, by_key   what the kernels of dQ, and those of dK and dV, share
  problem        one call: sizes, tiles, what may be multiplied with what
  schedule       which program does which tiles, and in which order
  machine        warpgroups, shared memory and barriers, as Mosaic GPU names them
  block_sizes    tile sizes: speed only
  gelu_products, cross_entropy   the trainer's, which `pallas_kernels.gpu.trainer` chooses

A program stays on its multiprocessor and works through many tiles. One warpgroup loads (TMA), the
others multiply (WGMMA) and do the softmax.
"""
