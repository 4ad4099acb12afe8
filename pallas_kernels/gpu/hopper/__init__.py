"""Kernels for NVIDIA's Hopper GPUs (sm_90a) in Pallas Mosaic GPU: for speed.

`attention` is the entry of attention. It serves the arithmetic that people train with, see
`unsupported` there; `pallas_kernels.gpu` serves everything else.

The kernels are warp-specialized and persistent, as FlashAttention-3's (arXiv 2407.08608): a program
stays on its multiprocessor and works through many tiles; one producer warpgroup loads (TMA), two or
three consumer warpgroups multiply (WGMMA) and do the softmax. A tile's life in the forward kernel,
two consumers, two stages of k and v, time downwards:

    producer             q buffer   k, v stages   consumer 0              consumer 1
    ------------------   --------   -----------   ---------------------   ---------------------
    q of tile u          full (u)
    k, v of step 0                  full (0)
    k, v of step 1                  full (1)      S₀ = q k₀ᵀ              waits for its turn
    waits for stage 0                             softmax of S₀           S₀ = q k₀ᵀ
      (k of step 2)                 k empty (0)   S₁ = q k₁ᵀ, P̄₀ v₀       softmax of S₀
    k of step 2                     full (2)      softmax of S₁, while    S₁ = q k₁ᵀ, P̄₀ v₀
                                                  P̄₀ v₀ is multiplied     softmax of S₁, while
    v of step 2                     v empty (0)   releases v₀             ...
    ...
    q of tile u + 1      (u + 1)                  last P̄ v; Ō / l         last P̄ v; Ō / l
                         O (u)                    O through q's memory,   O through q's memory,
    q of tile u + 2      empty (u)                released in tile u + 1  released in tile u + 1

Each buffer is owned by the producer from when all consumers have arrived at its `empty` barrier, by
the copy engine until the last byte has arrived at its `full` barrier, and by the consumers until
each has released it (`machine.pipeline`). Consumers pass the tensor cores to each other through
named barriers (`machine.ping_pong`): one multiplies during the other's softmax. O has no memory of
its own; the next q but one waits for it. In the backward kernels q, dO and O, or k and v, have q's
place, and dQ, or dK and dV, O's.

Where to find what:

  attention            what is served, and the entry; vjp: the passes, under one `custom_vjp`
  block_sizes          ForwardTile, BackwardTile and what is legal; tuning, tuning.toml: the table
  problem              one call: sizes, windows, masks, parts of arrays
  segments, sinks      ids that hide keys, of segments and lengths; a row's m and l before its keys
  tile_scheduler       which program has which tiles, and in which order
  producer             loads, of every attention kernel
  forward/kernel       memory and roles; forward/mainloop: the steps; forward/softmax: the causal
                       mask, the maximum, P̄; forward/epilogue: O is divided, rounded, stored;
                       forward/long_steps: the mainloop of `published`
  backward/            query_gradients and key_gradients: memory, roles, epilogues; query_mainloop,
                       key_mainloop: the steps; query_operands, key_operands: δ, P and dP;
                       cooperative_*: two consumers share 64 rows; dq_accumulator: dQ unordered
  machine/             pipeline, ping_pong, exchange (from consumer to consumer), wgmma, layouts,
                       warpgroups (registers), instructions and instruction_order (inline PTX),
                       maxima (the test for ties)
  gelu_products, cross_entropy   the trainer's, which `pallas_kernels.gpu.trainer` chooses

All but attention, block_sizes and tuning import Mosaic GPU.
"""
