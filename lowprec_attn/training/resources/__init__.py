"""What a run takes of its devices and host: memory, floating-point operations, a TPU slice."""
