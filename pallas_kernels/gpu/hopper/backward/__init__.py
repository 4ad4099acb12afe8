"""The backward pass: the kernels of dQ, and of dK and dV."""
