"""The resources that a run takes: memory, floating-point operations, a TPU slice, Python's heap."""
