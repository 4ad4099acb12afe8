"""Fast kernels for NVIDIA Hopper GPUs (sm_90a), written in Pallas Mosaic GPU.

`attention` is the entry point. It serves the arithmetic that people train with; its `unsupported`
names what it declines. `pallas_kernels.gpu` serves everything else.

The kernels are warp-specialized and persistent, like FlashAttention-3 (arXiv 2407.08608). A program
stays on its multiprocessor and works through many tiles. One producer warpgroup loads by TMA. Two
or three consumer warpgroups multiply by WGMMA and compute the softmax. The table follows a tile
through the forward kernel with two consumers and two stages of q, k and v. Time runs downwards:

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

The producer owns a buffer once all consumers have arrived at its `empty` barrier. The copy engine
owns it until its last byte has arrived at the `full` barrier. The consumers own it until each of
them has released it (`machine.pipeline`). Consumers take turns at the tensor cores through named
barriers (`machine.ping_pong`): one multiplies while another computes its softmax.

O has no shared memory of its own here. It leaves through the buffer of its q, so the q of tile
u + 2 is loaded once the O of tile u has left. The backward kernels work alike: in the dQ kernel, q,
dO and O take the place of q, and dQ takes the place of O; in the dK and dV kernel, k and v take the
place of q, and dK and dV take the place of O.

Where to find what:

  attention            the entry point, and what it serves; vjp: both passes, in one `custom_vjp`
  block_sizes          ForwardTile, BackwardTile, and their legal values; tuning, tuning.toml: the
                       tuned tiles
  problem              one call: sizes, windows, masks, parts of arrays
  segments, sinks      segment ids and lengths that hide keys; m and l of a row before its first key
  ends                 zeros in what lengths hide, without a copy of the arrays
  tile_scheduler       which program works on which tiles, and in which order
  producer             the producer warpgroup of every attention kernel
  forward/kernel       shared memory and roles; forward/mainloop: the steps; forward/softmax: the
                       mask, the row maximum, P̄; forward/epilogue: O is divided, rounded, stored;
                       forward/long_steps: the mainloop of `published`
  backward/            query_gradients, key_gradients: shared memory, roles, epilogues;
                       query_mainloop, key_mainloop: the steps; query_operands, key_operands: δ, P
                       and dP; cooperative_*: two consumers share 64 rows; dq_accumulator: dQ summed
                       without a fixed order
  machine/             pipeline, ping_pong, exchange (from consumer to consumer), wgmma, layouts,
                       warpgroups (registers), instructions and instruction_order (inline PTX),
                       maxima (the test for ties)
  gelu_products, cross_entropy   kernels of the trainer, chosen by `pallas_kernels.gpu.trainer`

All modules but attention, block_sizes and tuning import Mosaic GPU.
"""
