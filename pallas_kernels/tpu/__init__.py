"""Flash attention for TPUs (v4 and newer) in Pallas, lowered through Mosaic."""
