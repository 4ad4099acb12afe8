"""Flash attention for NVIDIA GPUs (Ampere and newer) in Pallas, lowered through Triton.

The trainer's kernels live here too: `trainer` chooses between them and the Mosaic GPU kernels of
`hopper`.
"""
