"""The forward pass: `kernel` runs it; `mainloop`, `softmax` and `epilogue` are its parts."""
