"""The forward pass: `kernel` is run, `mainloop`, `softmax` and `epilogue` are its parts."""
