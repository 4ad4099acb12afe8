"""Flash attention for NVIDIA GPUs (Ampere and newer) in Pallas, lowered through Triton."""
